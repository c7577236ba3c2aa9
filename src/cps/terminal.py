"""The terminal: where the command line writes, and errors in plain words."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console()
errors = Console(stderr=True)


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
        except KeyboardInterrupt:
            errors.print("\nStopped. What was learned is saved: give the same command again to go on.")
            raise typer.Exit(130) from None
        except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
            errors.print(f"[red]error:[/red] {shown(error)}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None

    return wrapped


def bars(where: Console, *, quiet: bool = False) -> Progress:
    """Return progress bars that say what is done, how much of it, how long it will take, and a note."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    return Progress(TextColumn("{task.description}"), *columns, console=where, transient=True, disable=quiet)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int, str], None]]:
    """Give a function that shows on the error stream what is done, how much of it, of how much, and a note."""
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
