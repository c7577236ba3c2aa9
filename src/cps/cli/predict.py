"""The command that predicts the classes of images: `cps predict`."""

import csv
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cps.app.list_files import FileState, file_states
from cps.cli.arguments import Loader, check_task_number, get_loader
from cps.cli.terminal import (
    CtrlC,
    console,
    errors,
    format_json,
    replace_control_characters,
    sanitize,
    show_progress,
    warn,
)

if TYPE_CHECKING:
    from cps.app.predict_files import FilePrediction
    from cps.learner import Learner
    from cps.loading import Load
    from cps.storage.reload import ReloadedFile

SOME_UNREADABLE = 3  # exit code
COLUMNS: tuple[str, ...] = ("path", "class", "version", "task", "share", "confidence", "unknown", "error")


def predict(
    model: Annotated[Path, typer.Option(help="The model file.")],
    images: Annotated[
        list[str] | None, typer.Argument(help="Images, folders, or patterns such as 'inbox/*.jpg'.")
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="Number of consecutive images that share a task.")] = 1,
    group_by_folder: Annotated[
        bool, typer.Option("--group-by-folder", help="The images of each folder share a task.")
    ] = False,
    task: Annotated[int | None, typer.Option(min=1, help="The task of all images, if it is known, from 1.")] = None,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="The images are in order, as from a camera: the task changes only sometimes."),
    ] = False,
    watch: Annotated[Path | None, typer.Option(help="Folder in which new images are predicted as they arrive.")] = None,
    reject: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Share of known images that may be called unknown; 0 disables rejection."),
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    loader: Loader = None,
) -> None:
    """Predict the class of images and the task it belongs to, or call them unknown.

    The share is that of the task among all tasks, and the confidence that of
    the class within the task: a prediction is certain only if both are high.

    Exit codes: 0 if all images were predicted, 3 if some could not be read,
    1 after an error, 2 for wrong arguments.
    """
    modes, is_grouped = (group > 1) + group_by_folder + stream + (task is not None), group > 1 or group_by_folder
    _require(bool(images) or watch is not None, "give images, folders or patterns, or a folder with --watch")
    _require(not (as_json and as_csv), "give at most one of --json and --csv")
    _require(modes <= 1, "give at most one of --group, --group-by-folder, --stream and --task")
    _require(not is_grouped or watch is None, "--watch cannot be combined with groups; use --stream instead")
    seen = file_states(watch) if watch is not None else {}  # before slow imports, so that no new image is missed
    from cps.app import predict_files as app
    from cps.app.watch_folder import watch_folder

    reloaded = _open_model(model, accelerator, get_loader(loader))
    _check_task(reloaded.value, task)
    predictor = app.Predictor(task=None if task is None else task - 1, reject=reject, stream=stream)
    files = app.find_images(images) if images else []
    seen |= _states_of(files, watch)
    stop = CtrlC()
    arriving: Iterator[FilePrediction] = iter(())
    if watch is not None:
        arriving = watch_folder(partial(_current_learner, reloaded, task), watch, predictor, seen=seen, until=stop)
    _warn_about_other_files(app.find_other_files(images or []))
    groups = app.group_by_folder(files) if group_by_folder else app.group_by_size(files, group)
    is_table = not (as_json or as_csv or watch)
    unreadable = _ErrorCounter()
    write = _make_writer(as_json=as_json, as_csv=as_csv)
    predictions = unreadable.count(app.predict_files(reloaded.value, groups, predictor))
    if is_table:
        _print_table([*_with_progress(predictions, len(files))])
    else:
        for prediction in _with_progress(predictions, len(files)):
            write(prediction)
    if watch is not None:
        _write_arriving(unreadable.count(arriving), watch, write, stop)
    if unreadable.number:
        errors.print(f"{unreadable.number} image(s) could not be read", highlight=False)
        raise typer.Exit(SOME_UNREADABLE)


def _states_of(files: list[Path], folder: Path | None) -> dict[Path, FileState | None]:
    """Return the states of the given files that are in the watched folder, so that they are predicted once."""
    if folder is None or not files:
        return {}
    given = {os.path.abspath(file) for file in files}
    return {path: state for path, state in file_states(folder).items() if os.path.abspath(path) in given}


def _write_arriving(
    arriving: "Iterator[FilePrediction]", folder: Path, write: "Callable[[FilePrediction], None]", stop: CtrlC
) -> None:
    with stop:
        errors.print(f"watching {sanitize(folder)}; press Ctrl-C to stop")
        for prediction in arriving:
            write(prediction)
    errors.print("stopped")


def _open_model(model: Path, accelerator: str, load: "Load") -> "ReloadedFile[Learner]":
    from cps.app.predict_files import image_format_of
    from cps.runtime.devices import make_fabric
    from cps.selection.rejection import FEW_HELD_OUT
    from cps.storage.reload import ReloadedFile

    fabric = make_fabric(accelerator=accelerator)

    def load_learner() -> "Learner":
        learner = load(model, fabric=fabric)
        learner.network.mute(FEW_HELD_OUT)  # `cps learn` has printed it
        if not learner.network.subnetworks:
            raise ValueError(f"'{model}' has no tasks; learn one first with: cps learn FOLDER --model {model}")
        image_format_of(learner)
        return learner

    return ReloadedFile(model, load_learner)


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise typer.BadParameter(message)


def _check_task(learner: "Learner", task: int | None) -> None:
    """Raise `ValueError` if the model has no such task."""
    if task is not None:
        check_task_number(task, learner.network)


def _current_learner(reloaded: "ReloadedFile[Learner]", task: int | None) -> "Learner":
    """Return the learner of the current model file, and report if it has changed.

    Raise `ValueError` if the given task is no longer the same.
    """
    before = reloaded.value.classes
    if reloaded.refresh():
        _check_task(reloaded.value, task)
        if task is not None and reloaded.value.classes[task - 1] != before[task - 1]:
            raise ValueError(f"task {task} of the model is now a different task; run the command again")
        number = len(reloaded.value.classes)
        errors.print(f"the model file has changed; using the new model with {number} task(s)", highlight=False)
    return reloaded.value


def _warn_about_other_files(paths: list[Path]) -> None:
    from cps.runtime.text import quote_names

    if paths:
        warn(f"{len(paths)} file(s) are skipped because they are not images: {quote_names(paths)}")


class _ErrorCounter:
    """Counts the predictions that are errors."""

    def __init__(self) -> None:
        self.number = 0

    def count(self, predictions: "Iterator[FilePrediction]") -> "Iterator[FilePrediction]":
        """Yield the predictions, and count the errors among them."""
        for prediction in predictions:
            self.number += bool(prediction.error)
            yield prediction


def _make_row(prediction: "FilePrediction") -> dict[str, str | int | float | None]:
    """Return a prediction as JSON data; the task counts from 1."""
    task = None if prediction.task is None else prediction.task + 1
    shares = [None if value is None else round(value, 4) for value in (prediction.share, prediction.confidence)]
    is_unknown = _is_unknown(prediction)
    values = (
        str(prediction.path),
        prediction.label,
        prediction.version,
        task,
        *shares,
        is_unknown,
        prediction.error or None,
    )
    return dict(zip(COLUMNS, values, strict=True))


def _is_unknown(prediction: "FilePrediction") -> bool:
    return prediction.label is None and not prediction.error


def _make_writer(*, as_json: bool, as_csv: bool) -> "Callable[[FilePrediction], None]":
    """Return a function that prints a prediction as one line and flushes it."""
    if as_csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        clean = replace_control_characters if sys.stdout.isatty() else str  # a file name must not control the terminal
        writer.writeheader()
        sys.stdout.flush()

        def write_csv(prediction: "FilePrediction") -> None:
            row = _make_row(prediction)
            writer.writerow({key: clean(value) if isinstance(value, str) else value for key, value in row.items()})
            sys.stdout.flush()

        return write_csv
    if as_json:
        return lambda prediction: print(format_json(_make_row(prediction)), flush=True)
    return lambda prediction: console.print(sanitize(_line(prediction)), highlight=False, soft_wrap=True)


def _line(prediction: "FilePrediction") -> str:
    """Return a prediction as one line of text."""
    if prediction.error or prediction.task is None:
        return f"{prediction.path}: {prediction.error}"
    if _is_unknown(prediction):
        return f"{prediction.path}: unknown (most similar: task {prediction.task + 1})"
    shares = f"share {prediction.share:.2f}, confidence {prediction.confidence:.2f}"
    return f"{prediction.path}: {_named(prediction)} (task {prediction.task + 1}, {shares})"


def _named(prediction: "FilePrediction") -> str:
    """Return the class as text, with its version unless that is the first."""
    is_first = prediction.version in (None, 1)
    return str(prediction.label) if is_first else f"{prediction.label}, version {prediction.version}"


def _with_progress(predictions: "Iterator[FilePrediction]", total: int) -> "Iterator[FilePrediction]":
    with show_progress() as update:
        for done, prediction in enumerate(predictions, start=1):
            update("predicting", done, total, "")
            yield prediction


def _print_table(predictions: "list[FilePrediction]") -> None:
    table = Table("image", "class", "task", "share", "confidence")
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    for prediction in predictions:
        if prediction.error:
            table.add_row(sanitize(prediction.path), f"[red]{sanitize(prediction.error)}[/red]", "", "", "")
        else:
            task = "" if prediction.task is None else str(prediction.task + 1)
            name = "[yellow](unknown)[/yellow]" if _is_unknown(prediction) else sanitize(_named(prediction))
            shares = f"{prediction.share:.2f}", f"{prediction.confidence:.2f}"
            table.add_row(sanitize(prediction.path), name, task, *shares)
    console.print(table)
