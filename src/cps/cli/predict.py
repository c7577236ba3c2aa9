"""The command of those who use a model: `cps predict`."""

import csv
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cps.app.watch_folder import State, states_in
from cps.cli.loaders import Loader, loader_of
from cps.cli.terminal import CtrlC, console, errors, json_text, printable, progress_bar, shown, warn

if TYPE_CHECKING:
    from cps.app.predict_files import Answer
    from cps.learner import Learner
    from cps.loading import Load
    from cps.storage.reload import ReloadedFile

SOME_UNREADABLE = 3  # exit code
COLUMNS: tuple[str, ...] = ("path", "class", "task", "share", "confidence", "unknown", "error")


def predict(
    model: Annotated[Path, typer.Option(help="The model file.")],
    images: Annotated[
        list[str] | None, typer.Argument(help="Images, folders, or patterns such as 'inbox/*.jpg'.")
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="So many images in a row are known to share a task.")] = 1,
    group_by_folder: Annotated[
        bool, typer.Option("--group-by-folder", help="Images of a folder share a task.")
    ] = False,
    task: Annotated[int | None, typer.Option(min=1, help="The task of all images, where it is known.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Images come in a row, as from a camera: the task changes now and then.")
    ] = False,
    watch: Annotated[Path | None, typer.Option(help="Then predict images as they arrive in this folder.")] = None,
    reject: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of known images that may be called unknown; 0: never unknown.")
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object on each line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV with a header.")] = False,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    loader: Loader = None,
) -> None:
    """Name the class of images, with the task it was found in, and how sure both are; or call them unknown.

    The share is the task's among all tasks, the confidence the class's in that task: an answer is as sure as both. Ends
    with 0 if all images were predicted, 3 if some could not be read, 1 after an error, 2 for a wrong command.
    """
    ways, in_groups = (group > 1) + group_by_folder + stream + (task is not None), group > 1 or group_by_folder
    _refuse_if(not images and watch is None, "give images, folders or patterns, or --watch with a folder")
    _refuse_if(as_json and as_csv, "give at most one of --json and --csv")
    _refuse_if(ways > 1, "give at most one of --group, --group-by-folder, --stream and --task")
    _refuse_if(in_groups and watch is not None, "groups are for named images; else there is --stream")
    seen = states_in(watch) if watch is not None else {}  # before anything that takes long
    from cps.app import predict_files as inbox

    followed = _followed(model, accelerator, loader_of(loader))
    _check_task(followed.made, task)
    asking = inbox.Asking(task=None if task is None else task - 1, reject=reject, in_a_row=stream)
    files = inbox.find_images(images) if images else []
    seen |= _named(files, watch)
    current = partial(_current, followed, task)
    stop = CtrlC()
    coming = inbox.watch(current, watch, asking, seen=seen, until=stop) if watch is not None else iter(())
    _name_overlooked(inbox.overlooked(images or []))
    groups = inbox.by_folder(files) if group_by_folder else inbox.by_number(files, group)
    is_table = not (as_json or as_csv or watch)
    unreadable = _Unreadable()
    write = _writer(as_json=as_json, as_csv=as_csv)
    found = unreadable.counted(inbox.answers(followed.made, groups, asking))
    if is_table:
        _show([*_with_bar(found, len(files))])
    else:
        for answer in _with_bar(found, len(files)):
            write(answer)
    if watch is not None:
        _write_coming(unreadable.counted(coming), watch, write, stop)
    if unreadable.number:
        errors.print(f"{unreadable.number} image(s) could not be read", highlight=False)
        raise typer.Exit(SOME_UNREADABLE)


def _named(files: list[Path], folder: Path | None) -> dict[Path, State | None]:
    """Return the state of files that are named and lie in the folder that is watched: they are answered once."""
    if folder is None or not files:
        return {}
    named = {os.path.abspath(file) for file in files}
    return {path: state for path, state in states_in(folder).items() if os.path.abspath(path) in named}


def _write_coming(coming: "Iterator[Answer]", folder: Path, write: "Callable[[Answer], None]", stop: CtrlC) -> None:
    with stop:
        errors.print(f"watching {shown(folder)}; Ctrl-C stops")
        for answer in coming:
            write(answer)
    errors.print("stopped")


def _followed(model: Path, accelerator: str, load: "Load") -> "ReloadedFile[Learner]":
    from cps.app.predict_files import size_of
    from cps.runtime.devices import make_fabric
    from cps.selection.rejection import ROUGH
    from cps.storage.reload import ReloadedFile

    fabric = make_fabric(accelerator=accelerator)

    def opened() -> "Learner":
        learner = load(model, fabric=fabric)
        learner.network.warned.add(ROUGH)  # which `cps learn` has said
        if not learner.network.subnetworks:
            raise ValueError(f"'{model}' has no task left; learn one first with: cps learn FOLDER --model {model}")
        size_of(learner)
        return learner

    return ReloadedFile(model, opened)


def _refuse_if(is_wrong: bool, what: str) -> None:
    if is_wrong:
        raise typer.BadParameter(what)


def _check_task(learner: "Learner", task: int | None) -> None:
    """Refuse a model that has not learned the task that is asked for."""
    from cps.network.input_checks import check_task_number

    if task is not None:
        check_task_number(task, learner.network)


def _current(followed: "ReloadedFile[Learner]", task: int | None) -> "Learner":
    """Return the learner of the model as it is now, and say if it is another; the task asked for must be the same."""
    before = followed.made.classes
    if followed.refresh():
        _check_task(followed.made, task)
        if task is not None and followed.made.classes[task - 1] != before[task - 1]:
            raise ValueError(f"task {task} of the model is another now; give the command again with its number")
        number = len(followed.made.classes)
        errors.print(f"the model has changed; now it answers with {number} task(s)", highlight=False)
    return followed.made


def _name_overlooked(paths: list[Path]) -> None:
    from cps.data.image_folder import in_quotes

    if paths:
        warn(f"{len(paths)} file(s) are left out, since they are no images: {in_quotes(paths)}")


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
    sure = [None if value is None else round(value, 4) for value in (answer.share, answer.confidence)]
    values = (str(answer.path), answer.label, task, *sure, _is_unknown(answer), answer.error or None)
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
        return lambda answer: print(json_text(_row(answer)), flush=True)
    return lambda answer: console.print(shown(_in_words(answer)), highlight=False, soft_wrap=True)


def _in_words(answer: "Answer") -> str:
    if answer.error or answer.task is None:
        return f"{answer.path}: {answer.error}"
    if _is_unknown(answer):
        return f"{answer.path}: unknown (nearest is task {answer.task + 1})"
    sure = f"share {answer.share:.2f}, confidence {answer.confidence:.2f}"
    return f"{answer.path}: {answer.label} (task {answer.task + 1}, {sure})"


def _with_bar(answers: "Iterator[Answer]", total: int) -> "Iterator[Answer]":
    with progress_bar() as show:
        for done, answer in enumerate(answers, start=1):
            show("predicting", done, total, "")
            yield answer


def _show(answers: "list[Answer]") -> None:
    table = Table("image", "class", "task", "share", "confidence")
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    for answer in answers:
        if answer.error:
            table.add_row(shown(answer.path), f"[red]{shown(answer.error)}[/red]", "", "", "")
        else:
            task = "" if answer.task is None else str(answer.task + 1)
            name = "[yellow](unknown)[/yellow]" if _is_unknown(answer) else shown(answer.label)
            table.add_row(shown(answer.path), name, task, f"{answer.share:.2f}", f"{answer.confidence:.2f}")
    console.print(table)
