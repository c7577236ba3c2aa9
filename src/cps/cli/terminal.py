"""Output of the command line: consoles, progress, warnings, errors, and text that is safe to print."""

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

MIN_SECONDS = 5.0  # a shorter activity gets no progress line
LINE_INTERVAL = 60.0  # seconds between the progress lines of an activity

for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # characters that the encoding lacks are printed as escapes

console = Console(emoji=False)
errors = Console(stderr=True, emoji=False)


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it prints errors and warnings as one line without a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module="PIL")  # about damage that it can read in spite of
                warnings.showwarning = lambda message, *_: warn(str(message))
                command(*args, **kwargs)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors too, but not errors
            raise
        except BrokenPipeError:  # the reader has closed the pipe, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt as stop:
            errors.print(f"\nStopped. {stop}".rstrip())
            raise typer.Exit(130) from None
        except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
            errors.print(f"[red]error:[/red] {sanitize(error)}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None

    return wrapped


@contextmanager
def explain_interrupt(is_saved: Callable[[], bool]) -> Iterator[None]:
    """After Ctrl-C, say whether the command can be resumed."""
    try:
        yield
    except KeyboardInterrupt:
        saved = "Progress is saved: run the same command again to resume."
        raise KeyboardInterrupt(saved if is_saved() else "Nothing was learned yet, and nothing has changed.") from None


class CtrlC:
    """A context that Ctrl-C ends. Calling it returns True once Ctrl-C was pressed.

    Python discards a KeyboardInterrupt that is raised inside a finaliser (`__del__`), so an endless loop should also
    ask whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self._is_pressed = False

    def __call__(self) -> bool:
        """Return True if Ctrl-C was pressed."""
        return self._is_pressed

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGINT, self._press)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        signal.signal(signal.SIGINT, self._previous)
        return kind is KeyboardInterrupt

    def _press(self, *_: object) -> None:
        self._is_pressed = True
        raise KeyboardInterrupt


class ProgressLines:
    """Progress as lines, for output that is not a terminal: one at the end of each activity, and one a minute."""

    def __init__(self, where: Console):
        self._where = where
        self._activity = self._state = ""
        self._start = self._last_print = time.monotonic()

    def update(self, activity: str, done: int, total: int, note: str) -> None:
        """Record the progress of an activity; a new activity ends the one before."""
        if activity != self._activity:
            self.end()
            self._activity, self._start = activity, time.monotonic()
        self._state = f"{done} of {total}" + (f", {note}" if note else "")
        if time.monotonic() - max(self._last_print, self._start) > LINE_INTERVAL:
            self._print()

    def end(self) -> None:
        """Print the state of the last activity, unless it was short."""
        if self._activity and time.monotonic() - self._start > MIN_SECONDS:
            self._print()

    def _print(self) -> None:
        self._last_print = time.monotonic()
        line = f"{self._activity}: {self._state}, {self._last_print - self._start:.0f} s"
        self._where.print(sanitize(line), highlight=False, soft_wrap=True)


def make_progress_bars(where: Console, *, quiet: bool = False) -> Progress:
    """Return progress bars with a description, a count, the remaining time and a note."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    return Progress(TextColumn("{task.description}"), *columns, console=where, transient=True, disable=quiet)


class NestedProgress:
    """Progress of a long activity: a bar for all of it and one for its present part; lines if there is no terminal.

    It is a context, and so are its bars: they disappear at the end.
    """

    def __init__(self, where: Console, note: str, *, quiet: bool):
        self.lines = None if where.is_terminal or quiet else ProgressLines(where)
        self.progress = make_progress_bars(where, quiet=quiet or self.lines is not None)
        self.note = note  # what the bar for all of it counts

    def __enter__(self) -> "NestedProgress":
        self.progress.start()
        self.whole = self.progress.add_task("starting", note=self.note, total=None)
        self.part = self.progress.add_task("", note="", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.lines is not None:
            self.lines.end()

    def update(
        self, whole: str, done: float, total: float, part: str, part_done: int, part_total: int, note: str = ""
    ) -> None:
        """Show how much of the whole and of its present part is done; a whole without a total stays as it was."""
        if self.lines is not None:
            self.lines.update(f"{whole}, {part}" if total else part, part_done, part_total, note)
            return
        if total:
            self.progress.update(self.whole, description=whole, completed=done, total=total)
        self.progress.update(self.part, description=part, completed=part_done, total=part_total, note=note)


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int, str], None]]:
    """Yield a function (activity, done, total, note) that shows progress on the error stream."""
    if not errors.is_terminal:
        lines = ProgressLines(errors)
        yield lines.update
        lines.end()
        return
    with make_progress_bars(errors) as progress:
        bar = progress.add_task("starting", note="", total=None)

        def update(activity: str, done: int, total: int, note: str) -> None:
            if done < progress.tasks[0].completed:  # a new activity
                progress.reset(bar, total=total)
            progress.update(bar, description=activity, completed=done, total=total, note=note)

        yield update


def warn(message: str) -> None:
    """Print a warning to the error stream."""
    errors.print(f"[yellow]warning:[/yellow] {sanitize(message)}", highlight=False, soft_wrap=True)


def sanitize(text: object) -> str:
    """Return text that rich prints as it is: without markup and without control characters."""
    return escape(replace_control_characters(text))


def replace_control_characters(text: object) -> str:
    """Replace characters that could move the cursor or change the terminal in another way."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def format_json(content: object, indent: int | None = None) -> str:
    """Return JSON to print, with non-ASCII characters as they are if the encoding of standard output has them."""
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(content, indent=indent)
    return text
