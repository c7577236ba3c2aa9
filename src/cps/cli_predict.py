"""The command of those who use a model: `cps predict`."""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cps.terminal import console, errors, printable, progress_bar, shown

if TYPE_CHECKING:
    from cps.inbox import Answer

SOME_UNREADABLE = 3  # exit code
COLUMNS: tuple[str, ...] = ("path", "class", "task", "confidence", "unknown", "error")


def predict(
    model: Annotated[Path, typer.Option(help="The model file.")],
    images: Annotated[
        list[str] | None, typer.Argument(help="Images, folders, or patterns such as 'inbox/*.jpg'.")
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="So many images in a row are known to share a task.")] = 1,
    group_by_folder: Annotated[
        bool, typer.Option("--group-by-folder", help="Images of a folder share a task.")
    ] = False,
    watch: Annotated[Path | None, typer.Option(help="Then predict images as they arrive in this folder.")] = None,
    reject: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of known images that may be called unknown; 0: never unknown.")
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object on each line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV with a header.")] = False,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
) -> None:
    """Name the class of images, with the task it was found in and a confidence; or call them unknown.

    Ends with 0 if all images were predicted, 3 if some could not be read, 1 after an error, 2 for a wrong command.
    """
    if (as_json and as_csv) or (group > 1 and group_by_folder) or (not images and watch is None):
        raise typer.BadParameter(
            "give images or --watch; at most one of --json and --csv, and one of --group and --group-by-folder"
        )
    if not images and (group > 1 or group_by_folder):
        raise typer.BadParameter("images that arrive one by one have no groups; --group is for images that are named")
    from cps import inbox
    from cps.devices import make_fabric
    from cps.growing import size_of
    from cps.loading import load

    learner = load(model, fabric=make_fabric(accelerator=accelerator))
    if not learner.network.subnetworks:
        raise ValueError(f"'{model}' has no task left; learn one first with: cps learn FOLDER --model {model}")
    size = size_of(learner, model)
    coming = inbox.watch(learner, watch, size, reject=reject) if watch is not None else iter(())
    files = inbox.find_images(images) if images else []
    groups = inbox.by_folder(files) if group_by_folder else inbox.by_number(files, group)
    is_table = not (as_json or as_csv or watch)
    unreadable = _Unreadable()
    write = _writer(as_json=as_json, as_csv=as_csv)
    found = unreadable.counted(inbox.answers(learner, groups, size, reject=reject))
    if is_table:
        _show([*_with_bar(found, len(files))])
    else:
        for answer in _with_bar(found, len(files)):
            write(answer)
    if watch is not None:
        errors.print(f"watching {shown(watch)}; Ctrl-C stops")
        try:
            for answer in unreadable.counted(coming):
                write(answer)
        except KeyboardInterrupt:
            errors.print("stopped")
    if unreadable.number:
        errors.print(f"{unreadable.number} image(s) could not be read", highlight=False)
        raise typer.Exit(SOME_UNREADABLE)


class _Unreadable:
    """Counts the answers that are errors as they pass."""

    def __init__(self) -> None:
        self.number = 0

    def counted(self, answers: "Iterator[Answer]") -> "Iterator[Answer]":
        for answer in answers:
            self.number += bool(answer.error)
            yield answer


def _row(answer: "Answer") -> dict[str, str | int | float | None]:
    """Return an answer as plain data; the task counts from 1."""
    task = None if answer.task is None else answer.task + 1
    share = None if answer.confidence is None else round(answer.confidence, 4)
    error = answer.error or None
    values = (str(answer.path), answer.label, task, share, _is_unknown(answer), error)
    return dict(zip(COLUMNS, values, strict=True))


def _is_unknown(answer: "Answer") -> bool:
    return answer.label is None and not answer.error


def _writer(*, as_json: bool, as_csv: bool) -> "Callable[[Answer], None]":
    """Return a function that writes one answer as a line, at once."""
    if as_csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        clean = printable if sys.stdout.isatty() else str  # a name must not command anybody's terminal
        writer.writeheader()
        sys.stdout.flush()

        def write_csv(answer: "Answer") -> None:
            row = _row(answer)
            writer.writerow({key: clean(value) if isinstance(value, str) else value for key, value in row.items()})
            sys.stdout.flush()

        return write_csv
    if as_json:
        return lambda answer: print(json.dumps(_row(answer), ensure_ascii=False), flush=True)
    return lambda answer: console.print(shown(_in_words(answer)), highlight=False, soft_wrap=True)


def _in_words(answer: "Answer") -> str:
    if answer.error or answer.task is None:
        return f"{answer.path}: {answer.error}"
    if _is_unknown(answer):
        return f"{answer.path}: unknown (nearest is task {answer.task + 1})"
    return f"{answer.path}: {answer.label} (task {answer.task + 1}, confidence {answer.confidence:.2f})"


def _with_bar(answers: "Iterator[Answer]", total: int) -> "Iterator[Answer]":
    with progress_bar() as show:
        for done, answer in enumerate(answers, start=1):
            show("predicting", done, total, "")
            yield answer


def _show(answers: "list[Answer]") -> None:
    table = Table("image", "class", "task", "confidence")
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    for answer in answers:
        if answer.error:
            table.add_row(shown(answer.path), f"[red]{shown(answer.error)}[/red]", "", "")
        else:
            task = "" if answer.task is None else str(answer.task + 1)
            name = "[yellow]unknown[/yellow]" if _is_unknown(answer) else shown(answer.label)
            table.add_row(shown(answer.path), name, task, f"{answer.confidence:.2f}")
    console.print(table)
