"""The commands of those who keep a model: `cps learn`, `inspect`, `verify` and `forget`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cps.app.task_metadata import accuracy_in_words, accuracy_of, history_in_words
from cps.cli.loaders import Loader, loader_of
from cps.cli.terminal import console, going_on, json_text, progress_bar, shown, warn
from cps.runtime.text import duration, listed, number_of, size_text

if TYPE_CHECKING:
    from cps.app.learn_folder import Learned, LearningPlan

BACKBONES = "small, resnet18-third, resnet18, resnet18-large or resnet32"
Model = Annotated[Path, typer.Argument(help="The model file.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")]


def learn(
    shipment: Annotated[Path, typer.Argument(help="A folder with a folder of images for each new class.")],
    model: Annotated[Path, typer.Option(help="The model file; it is created if there is none.")],
    size: Annotated[int | None, typer.Option(min=4, max=1024, help="Image size in pixels, for a new model.")] = None,
    backbone: Annotated[str | None, typer.Option(help=f"Network of a new model: {BACKBONES}.")] = None,
    imagenet: Annotated[bool, typer.Option("--imagenet", help="Start a new model from ImageNet weights.")] = False,
    weights: Annotated[Path | None, typer.Option(help="File of those weights, instead of a download.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs before pruning; half as many after each.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Images in a batch.")] = None,
    augment: Annotated[str | None, typer.Option(help="none, shift, shift+flip or crop+flip.")] = None,
    alpha: Annotated[float | None, typer.Option(min=0.01, max=1.0, help="Share of the signal kept by pruning.")] = None,
    hold_out: Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of images that measure accuracy.")] = 0.1,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out images that cannot be read, and empty folders.")
    ] = False,
    as_version: Annotated[bool, typer.Option("--as-version", help="Learn a known class anew, as 'name (2)'.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of a new model. Else 0.")] = None,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="32-true, bf16-mixed or 16-mixed. Else bf16-mixed on a GPU.")
    ] = None,
) -> None:
    """Learn a folder of new classes; no subnetwork that was learned before changes.

    The images are not needed afterwards. Stopped or killed, it goes on when the same command is given again; until it
    is done, the model stays as it was.
    """
    from cps.app import learn_folder as growing
    from cps.app.autoconfig import Options
    from cps.app.folder_scan import look
    from cps.runtime.devices import make_fabric, precision_of
    from cps.storage.lock import locked

    wishes = Options(size, backbone, epochs, batch, augment, alpha, seed, pretrained=imagenet or weights is not None)
    fabric = make_fabric(accelerator=accelerator, precision=precision)
    with going_on(growing.checkpoint_of(model).exists):
        with progress_bar() as show:
            looked = look(shipment, skip_empty=skip_damaged, watch=show)
        with locked(model):
            growth = growing.prepare(model, looked, wishes, fabric, weights=weights, as_version=as_version)
            if growth.done is not None:
                console.print(f"These images were learned before, as task {growth.done + 1}; there is nothing to do.")
                return
            for warning in (*looked.warnings(), *growing.namesakes(growth)):
                warn(warning)
            _show_choices(growth, precision_of(fabric), "asked for" if precision else str(fabric.device))
            with progress_bar() as show:
                read = growing.decode(growth, skip_damaged=skip_damaged, watch=show)
            for error in read.skipped:
                warn(f"skipped: {error}")
            growth, unreadable = growing.without_unreadable(growth, read)
            for name in unreadable:
                warn(f"none of the images of class '{name}' can be read; it is left out")
            for warning in growing.known_classes(growth, read):
                warn(warning)
            if growing.goes_on(growth):
                console.print("An interrupted run left a checkpoint; learning goes on from there.")
            with progress_bar() as show:
                learned = growing.learn(growth, read, share=hold_out, watch=show)
    _show_learned(growth, learned)


def inspect(model: Model, as_json: Json = False) -> None:
    """Show what a model holds: tasks, classes, history, capacity and fingerprints."""
    from cps.app.inspect import describe

    found = describe(model)
    if as_json or not found["tasks"]:
        empty = f"no task is left; learn one with: cps learn FOLDER --model {model}"
        print(json_text(found, indent=1) if as_json else empty)
        return
    table = Table("task", "classes", "known", "found", "density", "fingerprint")
    table.columns[1].overflow = "fold"
    for task in found["tasks"]:
        accuracy = accuracy_of(task["notes"])
        right = [f"{share:.0%}" for share in accuracy] if accuracy else ["", ""]
        right[0] = "one class" if len(task["classes"]) == 1 else right[0]
        cells = (str(task["task"]), shown(listed(task["classes"])), *right, f"{task['density']:.1%}")
        table.add_row(*cells, task["fingerprint"][:8])
    console.print(table)
    for task in found["tasks"]:
        console.print(f"task {task['task']}: {shown(history_in_words(task['notes']))}", highlight=False)
    console.print(
        "known, found: right answers on held-out images of the task when it was learned, with the task known and with "
        "it to be found among all; density: weights it uses; fingerprint: its start",
        style="dim",
    )
    classes = sum(len(task["classes"]) for task in found["tasks"])
    fullest = ", ".join(f"{shown(name)} {share:.0%}" for name, share in found["fullest"])
    console.print(
        f"tasks {len(found['tasks'])}, classes {classes}; {found['bytes'] / 2**20:.1f} MiB; "
        f"backbone {found['backbone'] or 'of your own'}, images {tuple(found['input_shape'])}\n"
        f"{found['free']:.1%} of {found['weights']:,} weights are free; the fullest layers: {fullest}",
        highlight=False,
    )


def verify(model: Model, as_json: Json = False, loader: Loader = None) -> None:
    """Check that a model is whole: every digest, every fingerprint, and its answers where they can be compared."""
    from cps.app.inspect import Check
    from cps.app.inspect import verify as check
    from cps.storage.container import FileError

    try:
        checks = check(model, None if loader is None else loader_of(loader))
    except FileError as error:
        if as_json:
            print(json_text([Check("file", 1, str(error))._asdict()], indent=1))
        raise
    if as_json:
        print(json_text([entry._asdict() for entry in checks], indent=1))
        return
    table = Table("what was checked", "number", "result")
    for what, number, result in checks:
        table.add_row(what, str(number), shown(result))
    console.print(table)
    console.print(f"[green]{shown(model)} is as it was written.[/green]")


def forget(
    model: Model,
    task: Annotated[int, typer.Option(min=1, help="The task to drop, from 1 as `cps inspect` counts.")],
    weights: Annotated[Path | None, typer.Option(help="ImageNet weights, for the weights that become free.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    loader: Loader = None,
) -> None:
    """Drop a task: what only it used is drawn anew, and all other tasks answer as before, to the bit."""
    from cps.app.learn_folder import checkpoint_of
    from cps.data.datasets import imagenet_weights
    from cps.network.backbones import large_resnet18
    from cps.network.input_checks import check_task_number
    from cps.storage.container import check_file, remove, remove_temporary
    from cps.storage.lock import locked

    check_file(model)
    with locked(model):
        learner = loader_of(loader)(model)
        tasks = len(learner.network.subnetworks)
        check_task_number(task, learner.network)
        classes = listed(learner.network.subnetworks[task - 1].classes)
        if not yes:
            if not sys.stdin.isatty():
                raise ValueError("a task is forgotten for good; add --yes where nobody can be asked")
            typer.confirm(f"Forget task {task} ({classes}) for good?", abort=True)
        fresh = None
        if weights is not None:
            fresh = large_resnet18()
            imagenet_weights(fresh, weights)
        learner.forget(task - 1, fresh=fresh)
        learner.save(model)  # which refuses if any other task has changed
        had_checkpoint = checkpoint_of(model).exists()
        remove_temporary(model, older=0)  # nobody else writes it now
        remove(checkpoint_of(model), older=0)
        if had_checkpoint:
            console.print("The checkpoint of an interrupted `cps learn` is gone too: it may hold weights of the task.")
    free = learner.network.free_share()
    console.print(f"Forgot task {task} ({shown(classes)}); {free:.1%} of the weights are free.", highlight=False)
    if task < tasks:
        moved = f"Tasks {task + 1} to {tasks} are now {task} to {tasks - 1}."
        console.print(f"Task {tasks} is now {task}." if task == tasks - 1 else moved, highlight=False)
    if tasks > 1:
        console.print("All other tasks are unchanged: their fingerprints hold.")


def _show_choices(growth: "LearningPlan", precision: str, why: str) -> None:
    from cps.app.estimate import estimate
    from cps.data.examples import free_memory

    counts = growth.shipment.counts
    images = sum(counts.values())
    expected = estimate(growth.learner, growth.size, images, max(2, len(counts)))
    of_what = f"{len(counts)} classes" if len(counts) > 1 else "one class, learned in its four turns"
    learned = sum(len(subnetwork.classes) for subnetwork in growth.learner.network.subnetworks)
    whose = f"{shown(growth.model)}, which knows {learned}" if growth.model.exists() else f"new: {shown(growth.model)}"
    table = Table("setting", "value", "why", title=f"{number_of(images, 'image')} of {of_what}; the model is {whose}")
    for choice in growth.choices:
        table.add_row(*(shown(part) for part in choice))
    table.add_row("precision", precision, why)
    table.add_row("time", f"about {duration(expected.seconds)}", "an estimate, from a few steps")
    table.add_row("memory", f"about {size_text(expected.memory)}", "an estimate")
    console.print(table)
    if growth.learner.network.device.type == "cpu" and expected.memory > free_memory():
        warn(f"only {free_memory() / 2**30:.1f} GiB of memory are free; a smaller --size or --batch needs less")


def _show_learned(growth: "LearningPlan", learned: "Learned") -> None:
    from cps.selection.statistics import ENOUGH

    notes = learned.notes
    console.print(
        f"Learned task {learned.task + 1}: {shown(listed(list(notes['classes'])))} from "
        f"{number_of(notes['images'] - notes['held out'], 'image')} in {duration(notes['seconds'])}.\n"
        f"Held-out accuracy: {accuracy_in_words(notes)}.",
        highlight=False,
    )
    if learned.task:
        console.print("The subnetworks of all tasks from before are unchanged: their fingerprints hold.")
    if notes["held out"] < ENOUGH:
        console.print(f"Under {ENOUGH} images were held out, so unknown ones are told roughly; --hold-out takes more.")
    console.print(f"Wrote [bold]{shown(growth.model)}[/bold]. The images are not needed any more.")
