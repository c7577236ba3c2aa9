"""The terminal: where the command line writes, and errors in plain words."""

import io
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

A_WHILE, A_MINUTE = 5.0, 60.0  # seconds

for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # what an encoding lacks is shown by its number

console = Console(emoji=False)
errors = Console(stderr=True, emoji=False)


def in_plain_words(command: Callable[..., None]) -> Callable[..., None]:
    """Say errors and warnings in one line without a traceback, and after Ctrl-C how to go on."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module="PIL")  # it warns of damage that it survives
                warnings.showwarning = lambda message, *_: warn(str(message))
                command(*args, **kwargs)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors too, but none that went wrong
            raise
        except BrokenPipeError:  # whoever reads has seen enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt as stop:
            errors.print(f"\nStopped. {stop}".rstrip())
            raise typer.Exit(130) from None
        except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
            errors.print(f"[red]error:[/red] {shown(error)}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None

    return wrapped


@contextmanager
def going_on(is_saved: Callable[[], bool]) -> Iterator[None]:
    """Say after Ctrl-C whether there is something saved to go on from."""
    try:
        yield
    except KeyboardInterrupt:
        saved = "What was learned is saved: give the same command again to go on."
        raise KeyboardInterrupt(saved if is_saved() else "Nothing was learned yet; all is as it was.") from None


class CtrlC:
    """Ctrl-C ends what is inside, soon even if something that tidied up just then has swallowed the interrupt.

    Whatever goes on for ever is to ask whether it was pressed.
    """

    def __init__(self) -> None:
        self._is_pressed = False

    def __call__(self) -> bool:
        """Say whether it was pressed."""
        return self._is_pressed

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._press)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        signal.signal(signal.SIGINT, self._before)
        return kind is KeyboardInterrupt

    def _press(self, *_: object) -> None:
        self._is_pressed = True
        raise KeyboardInterrupt


class Lines:
    """Progress where nobody looks at a terminal: a line for each thing that took a while, and one a minute."""

    def __init__(self, where: Console):
        self._where = where
        self._what = self._state = ""
        self._began = self._shown = time.monotonic()

    def show(self, what: str, done: int, total: int, note: str) -> None:
        """Take note of what is done, how much of it, of how much."""
        if what != self._what:
            self.end()
            self._what, self._began = what, time.monotonic()
        self._state = f"{done} of {total}" + (f", {note}" if note else "")
        if time.monotonic() - max(self._shown, self._began) > A_MINUTE:
            self._tell()

    def end(self) -> None:
        """Tell how far the last thing came."""
        if self._what and time.monotonic() - self._began > A_WHILE:
            self._tell()

    def _tell(self) -> None:
        self._shown = time.monotonic()
        line = f"{self._what}: {self._state}, {self._shown - self._began:.0f} s"
        self._where.print(shown(line), highlight=False, soft_wrap=True)


def bars(where: Console, *, quiet: bool = False) -> Progress:
    """Return progress bars that say what is done, how much of it, how long it will take, and a note."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    return Progress(TextColumn("{task.description}"), *columns, console=where, transient=True, disable=quiet)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int, str], None]]:
    """Give a function that shows on the error stream what is done, how much of it, of how much, and a note."""
    if not errors.is_terminal:
        lines = Lines(errors)
        yield lines.show
        lines.end()
        return
    with bars(errors) as progress:
        line = progress.add_task("starting", note="", total=None)

        def show(what: str, done: int, total: int, note: str) -> None:
            if done < progress.tasks[0].completed:  # something else has begun
                progress.reset(line, total=total)
            progress.update(line, description=what, completed=done, total=total, note=note)

        yield show


def warn(what: str) -> None:
    """Show a warning on the error stream."""
    errors.print(f"[yellow]warning:[/yellow] {shown(what)}", highlight=False, soft_wrap=True)


def shown(text: object) -> str:
    """Return a text as it is to be shown, whoever wrote it: nothing in it is markup, or moves the cursor."""
    return escape(printable(text))


def printable(text: object) -> str:
    """Return a text without signs that would move the cursor or change a terminal otherwise."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in str(text))


def json_text(content: object, indent: int | None = None) -> str:
    """Return JSON to print: as it reads, unless whoever reads could not be told so."""
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(content, indent=indent)
    return text
