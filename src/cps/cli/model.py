"""The commands that change or check a model file: `cps learn`, `inspect`, `verify` and `forget`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cps.app.task_metadata import (
    CLASS_COUNTS,
    NUM_HELD_OUT,
    NUM_IMAGES,
    SECONDS,
    accuracy_text,
    history_text,
    read_accuracy,
)
from cps.cli.arguments import Loader, check_task_number, get_loader
from cps.cli.terminal import console, explain_interrupt, format_json, sanitize, show_progress, warn
from cps.runtime.text import format_bytes, format_count, format_duration, join_names

if TYPE_CHECKING:
    from cps.app.learn_folder import LearnedTask, LearningPlan

BACKBONES = (
    "small, resnet18-third, resnet18, resnet18-large, resnet32, efficientnet-lite0, torchvision:NAME or timm:NAME"
)
Model = Annotated[Path, typer.Argument(help="The model file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def learn(
    folder: Annotated[Path, typer.Argument(help="A folder with one subfolder of images for each new class.")],
    model: Annotated[Path, typer.Option(help="The model file; it is created if it does not exist.")],
    size: Annotated[int | None, typer.Option(min=4, max=1024, help="Image size of a new model, in pixels.")] = None,
    backbone: Annotated[str | None, typer.Option(help=f"Backbone of a new model: {BACKBONES}.")] = None,
    pretrained: Annotated[
        bool | None,
        typer.Option(
            "--pretrained/--from-scratch", help="Start a new model from pretrained weights or not. Default: for photos."
        ),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="File with pretrained weights of the backbone.")] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Epochs before pruning; half as many follow each pruning round. A pretrained model is trained only if "
            "they or --minutes are given.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Train subnetworks of a pretrained model, too, for as many epochs as fit in."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Batch size.")] = None,
    augment: Annotated[str | None, typer.Option(help="none, shift, shift+flip or crop+flip.")] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of the signal that pruning keeps.")
    ] = None,
    hold_out: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the images held out to measure the accuracy.")
    ] = 0.1,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Skip images that cannot be read, and empty subfolders.")
    ] = False,
    as_version: Annotated[
        bool, typer.Option("--as-version", help="Learn a known class again, under the name 'class (2)'.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed of a new model. Default: 0.")] = None,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    precision: Annotated[
        str | None,
        typer.Option(help="32-true, bf16-mixed or 16-mixed. Default: bf16-mixed on a GPU, 32-true on a CPU."),
    ] = None,
) -> None:
    """Learn a folder of new classes. The tasks learned before do not change.

    Settings are chosen from the images and printed. The command can be
    interrupted at any time: the old model stays usable, and running it again
    resumes. The images are not needed afterwards.
    """
    from cps.app import learn_folder as app
    from cps.app.autoconfig import GIVEN, Options, default_precision
    from cps.app.folder_scan import scan_folder
    from cps.runtime.devices import make_fabric, precision_of
    from cps.storage.lock import locked

    if weights is not None and pretrained is False:
        raise ValueError("--weights gives pretrained weights, so it cannot be combined with --from-scratch")
    pretrained = True if weights is not None else pretrained
    options = Options(size, backbone, epochs, batch, augment, alpha, seed, pretrained, minutes)
    fabric = make_fabric(accelerator=accelerator, precision=precision or default_precision(accelerator, options))
    with explain_interrupt(app.checkpoint_path(model).exists):
        with show_progress() as on_progress:
            scan = scan_folder(folder, skip_empty=skip_damaged, on_progress=on_progress)
        with locked(model):
            plan = app.make_plan(model, scan, options, fabric, weights=weights, as_version=as_version)
            if plan.learned_as is not None:
                console.print(f"These images were already learned as task {plan.learned_as + 1}; nothing to do.")
                return
            for warning in filter(None, (plan.warning, *scan.warnings(), *app.similar_name_warnings(plan))):
                warn(warning)
            _print_plan(plan, precision_of(fabric), GIVEN if precision else str(fabric.device))
            with show_progress() as on_progress:
                decoded = app.decode_images(plan, skip_damaged=skip_damaged, on_progress=on_progress)
            for error in decoded.skipped:
                warn(f"skipped: {error}")
            plan, unreadable = app.drop_unreadable_classes(plan, decoded)
            for name in unreadable:
                warn(f"no image of class '{name}' can be read; the class is skipped")
            for warning in app.similar_image_warnings(plan, decoded):
                warn(warning)
            if app.can_resume(plan):
                console.print("Resuming from the checkpoint of an interrupted run.")
            with show_progress() as on_progress:
                learned = app.learn_folder(plan, decoded, hold_out=hold_out, on_progress=on_progress)
    _print_learned(plan, learned)


def inspect(model: Model, as_json: Json = False) -> None:
    """Show the content of a model: tasks, classes, history, capacity and fingerprints."""
    from cps.app.inspect import describe

    found = describe(model)
    if as_json:
        print(format_json(found, indent=1))
        return
    if not found["tasks"]:
        print(f"the model has no tasks; learn one with: cps learn FOLDER --model {model}")
        return
    table = Table("task", "classes", "task known", "task selected", "density", "fingerprint")
    table.columns[1].overflow = "fold"
    for task in found["tasks"]:
        accuracies = read_accuracy(task["notes"])
        known, selected = (f"{accuracy:.0%}" for accuracy in accuracies) if accuracies else ("", "")
        known = "one class" if len(task["classes"]) == 1 else known
        cells = (str(task["task"]), sanitize(join_names(task["classes"])), known, selected, f"{task['density']:.1%}")
        table.add_row(*cells, task["fingerprint"][:8])
    console.print(table)
    for task in found["tasks"]:
        console.print(f"task {task['task']}: {sanitize(history_text(task['notes']))}", highlight=False)
    console.print(
        "task known, task selected: accuracy on held-out images when the task was learned, with the task known and "
        "with the task selected among all; density: share of the weights that the task uses; fingerprint: the first 8 "
        "characters",
        style="dim",
    )
    classes = sum(len(task["classes"]) for task in found["tasks"])
    fullest = ", ".join(f"{sanitize(name)} {share:.0%}" for name, share in found["fullest"])
    console.print(
        f"tasks {len(found['tasks'])}, classes {classes}; {found['bytes'] / 2**20:.1f} MiB; "
        f"backbone {found['backbone'] or 'custom'}, images {tuple(found['input_shape'])}\n"
        f"{found['free']:.1%} of {found['weights']:,} weights are free; fullest layers: {fullest}",
        highlight=False,
    )


def verify(model: Model, as_json: Json = False, loader: Loader = None) -> None:
    """Check a model file: every digest, every fingerprint, and the outputs if they can be compared."""
    from cps.app.inspect import Check
    from cps.app.inspect import verify as check
    from cps.storage.container import FileError

    try:
        checks = check(model, None if loader is None else get_loader(loader))
    except FileError as error:
        if as_json:
            print(format_json([Check("file", 1, str(error))._asdict()], indent=1))
        raise
    if as_json:
        print(format_json([entry._asdict() for entry in checks], indent=1))
        return
    table = Table("check", "number", "result")
    for what, number, result in checks:
        table.add_row(what, str(number), sanitize(result))
    console.print(table)
    console.print(f"[green]{sanitize(model)} is intact.[/green]")


def forget(
    model: Model,
    task: Annotated[int, typer.Option(min=1, help="The task to forget, numbered from 1 as in `cps inspect`.")],
    weights: Annotated[
        Path | None, typer.Option(help="File with ImageNet weights, for the weights that become free.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    loader: Loader = None,
) -> None:
    """Forget a task permanently.

    Weights that no other task uses are initialised again. All other tasks
    keep exactly the same outputs.
    """
    from cps.app.learn_folder import checkpoint_path
    from cps.network.backbones import large_resnet18
    from cps.network.pretrained import load_imagenet_weights
    from cps.storage.atomic import remove, remove_temporary
    from cps.storage.container import check_file
    from cps.storage.lock import locked

    check_file(model)
    with locked(model):
        learner = get_loader(loader)(model)
        tasks = len(learner.network.subnetworks)
        check_task_number(task, learner.network)
        classes = join_names(learner.network.subnetworks[task - 1].classes)
        if not yes:
            if not sys.stdin.isatty():
                raise ValueError("forgetting a task is permanent; use --yes to confirm without a terminal")
            typer.confirm(f"Forget task {task} ({classes}) permanently?", abort=True)
        fresh = None
        if weights is not None:
            fresh = large_resnet18()
            load_imagenet_weights(fresh, weights)
        learner.forget(task - 1, fresh=fresh)
        learner.save(model)  # raises if any other task has changed
        had_checkpoint = checkpoint_path(model).exists()
        remove_temporary(model, min_age=0)  # no other program writes it while we hold the lock
        remove(checkpoint_path(model), min_age=0)
        if had_checkpoint:
            console.print("Removed the checkpoint of an interrupted `cps learn`: it may contain weights of the task.")
    free = learner.network.free_share()
    console.print(f"Forgot task {task} ({sanitize(classes)}); {free:.1%} of the weights are free.", highlight=False)
    if task < tasks:
        moved = f"Tasks {task + 1} to {tasks} are now {task} to {tasks - 1}."
        console.print(f"Task {tasks} is now {task}." if task == tasks - 1 else moved, highlight=False)
    if tasks > 1:
        console.print("All other tasks are unchanged: their fingerprints match.")


def _print_plan(plan: "LearningPlan", precision: str, precision_reason: str) -> None:
    from cps.app.estimate import estimate, estimate_frozen
    from cps.runtime.environment import free_memory

    counts = plan.scan.counts
    images = sum(counts.values())
    if plan.is_frozen:
        expected = estimate_frozen(plan.learner, plan.size, plan.scan.files)
    else:
        expected = estimate(plan.learner, plan.size, images, len(counts), plan.rotations)
    one_class = "one class" if plan.is_frozen else "one class, learned in four rotations"
    classes = f"{len(counts)} classes" if len(counts) > 1 else one_class
    learned = sum(len(subnetwork.classes) for subnetwork in plan.learner.network.subnetworks)
    path = sanitize(plan.model)
    model = f"model {path}, classes learned so far: {learned}" if plan.model.exists() else f"new model {path}"
    table = Table("setting", "value", "reason", title=f"{format_count(images, 'image')} of {classes}; {model}")
    for choice in plan.choices:
        table.add_row(*(sanitize(part) for part in choice))
    if not plan.is_frozen:
        table.add_row("precision", precision, precision_reason)
    basis = "estimated from a few images" if plan.is_frozen else "estimated from a few steps"
    table.add_row("time", f"about {format_duration(expected.seconds)}", basis)
    table.add_row("memory", f"about {format_bytes(expected.memory)}", "estimated")
    console.print(table)
    if plan.learner.network.device.type == "cpu" and expected.memory > free_memory():
        warn(f"only {free_memory() / 2**30:.1f} GiB of memory are free; a smaller --size or --batch needs less")


def _print_learned(plan: "LearningPlan", learned: "LearnedTask") -> None:
    from cps.selection.statistics import ENOUGH_HELD_OUT

    notes = learned.notes
    console.print(
        f"Learned task {learned.task + 1}: {sanitize(join_names(list(notes[CLASS_COUNTS])))} from "
        f"{format_count(notes[NUM_IMAGES] - notes[NUM_HELD_OUT], 'image')} in {format_duration(notes[SECONDS])}.\n"
        f"Accuracy on held-out images: {accuracy_text(notes)}.",
        highlight=False,
    )
    if learned.task:
        console.print("The subnetworks of all earlier tasks are unchanged: their fingerprints match.")
    if notes[NUM_HELD_OUT] < ENOUGH_HELD_OUT:
        console.print(
            f"Fewer than {ENOUGH_HELD_OUT} images were held out, so the rejection of unknown images is approximate; "
            "use --hold-out to hold out more."
        )
    console.print(f"Wrote [bold]{sanitize(plan.model)}[/bold]. The images are no longer needed.")
