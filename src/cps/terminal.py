"""The terminal: where the command line writes, and errors in plain words."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
errors = Console(stderr=True)


def in_plain_words(command: Callable[..., None]) -> Callable[..., None]:
    """Say errors in one line instead of a traceback, and after Ctrl-C how to go on."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            errors.print("\nStopped. What was learned is saved: give the same command again to go on.")
            raise typer.Exit(130) from None
        except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
            errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None

    return wrapped
