"""The commands about a model file: `cps learn`, `inspect`, `verify`, `card`, `rename` and `forget`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cps.app.task_metadata import (
    CLASS_COUNTS,
    accuracy_text,
    history_text,
    read_accuracy,
)
from cps.cli.arguments import Loader, check_task_number, get_loader
from cps.cli.terminal import (
    console,
    errors,
    explain_interrupt,
    format_json,
    replace_control_characters,
    sanitize,
    show_progress,
    warn,
)
from cps.runtime.text import format_bytes, format_count, format_duration, join_names

if TYPE_CHECKING:
    from cps.app.learn_folder import LearnedFolder, LearningPlan
    from cps.evaluation.confusion import Confusion

BACKBONES = (
    "small, resnet18-third, resnet18, resnet18-large, resnet32, resnet8, efficientnet-lite0, torchvision:NAME or "
    "timm:NAME"
)
Model = Annotated[Path, typer.Argument(help="The model file.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
MOST_CLASSES, MOST_PAIRS = 20, 5  # in the summary of the accuracy
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def learn(
    folder: Annotated[Path, typer.Argument(help="A folder with one subfolder of images for each class.")],
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
            help="Epochs before pruning; half as many follow each pruning round. Without a GPU, a pretrained model is "
            "trained only if they or --minutes are given.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Train subnetworks of a pretrained model, too, for as many epochs as fit in; 0: do not train.",
        ),
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
    as_version: Annotated[bool, typer.Option("--as-version", hidden=True, help="No longer needed.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed of a new model. Default: 0.")] = None,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    precision: Annotated[
        str | None,
        typer.Option(help="32-true, bf16-mixed or 16-mixed. Default: bf16-mixed on a GPU, 32-true on a CPU."),
    ] = None,
) -> None:
    """Learn a folder of new classes, and of more images of known ones.

    The tasks learned before do not change. On frozen features, images of
    known classes are added to what is known about them; where subnetworks are
    trained, the new task learns its own version of these classes.

    Settings are chosen from the images and printed. The command can be
    interrupted at any time: the old model stays usable, and running it again
    resumes. The images are not needed afterwards.
    """
    from cps.app import learn_folder as app
    from cps.app.autoconfig import GIVEN, Options
    from cps.app.folder_scan import scan_folder
    from cps.runtime.devices import make_fabric, precision_of
    from cps.storage.lock import locked

    if weights is not None and pretrained is False:
        raise ValueError("--weights gives pretrained weights, so it cannot be combined with --from-scratch")
    if as_version:
        warn("--as-version is no longer needed: images of known classes are learned under the names they have")
    pretrained = True if weights is not None else pretrained
    options = Options(size, backbone, epochs, batch, augment, alpha, seed, pretrained, minutes)
    fabric = make_fabric(accelerator=accelerator, precision=precision)
    with explain_interrupt(app.checkpoint_path(model).exists):
        with show_progress() as on_progress:
            scan = scan_folder(folder, skip_empty=skip_damaged, on_progress=on_progress)
        with locked(model):
            plan = app.make_plan(model, scan, options, fabric, weights=weights)
            if plan.learned_as is not None:
                console.print(f"These images were already learned as task {plan.learned_as + 1}; nothing to do.")
                return
            new = {folder for folder, name in plan.classes.items() if name in plan.task_classes}
            warnings = scan.warnings(known={*scan.counts} - new)
            for warning in filter(None, (plan.warning, *warnings, *app.similar_name_warnings(plan))):
                warn(warning)
            if plan.repeated:
                console.print(f"{format_count(plan.repeated, 'image')} learned before are left out.")
            _print_plan(plan, precision_of(fabric), GIVEN if precision else str(fabric.device))
            with show_progress() as on_progress:
                content = app.read_images(plan, skip_damaged=skip_damaged, on_progress=on_progress)
            for error in content.skipped:
                warn(f"skipped: {error}")
            plan, unreadable = app.drop_unreadable_classes(plan, content)
            for name in unreadable:
                warn(f"no image of class '{name}' can be read; the class is skipped")
            for warning in app.similar_image_warnings(plan, content):
                warn(warning)
            if app.can_resume(plan):
                console.print("Resuming from the checkpoint of an interrupted run.")
            with show_progress() as on_progress:
                learned = app.learn_folder(plan, content, hold_out=hold_out, on_progress=on_progress)
    _print_learned(plan, learned)


def inspect(
    model: Model,
    as_json: Json = False,
    picture: Annotated[
        Path | None, typer.Option(help="Write the confusion matrix of the held-out images to this SVG file.")
    ] = None,
) -> None:
    """Show the content of a model: tasks, classes, accuracy, history, capacity and fingerprints."""
    from cps.app.class_accuracy import read_confusion
    from cps.app.inspect import describe
    from cps.storage.atomic import write_text

    found = describe(model)
    confusion = read_confusion((task["classes"], task["notes"]) for task in found["tasks"])
    if picture is not None:
        write_text(picture, confusion.picture())
        errors.print(f"Wrote {sanitize(picture)}", highlight=False, soft_wrap=True)
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
        density = "closed form" if task["frozen"] else f"{task['density']:.1%}"
        cells = (str(task["task"]), sanitize(join_names(task["classes"])), known, selected, density)
        table.add_row(*cells, task["fingerprint"][:8])
    console.print(table)
    for task in found["tasks"]:
        console.print(f"task {task['task']}: {sanitize(history_text(task['notes']))}", highlight=False)
    _print_confusion(confusion, "when their folder was learned", model)
    console.print(
        "task known, task selected: accuracy on held-out images when the task was learned, with the task known and "
        "with the task selected among all; density: share of the weights that the task uses, or a closed form over "
        "frozen features, which uses none; fingerprint: the first 8 characters",
        style="dim",
    )
    classes = sum(len(task["classes"]) for task in found["tasks"])
    fullest = ", ".join(f"{sanitize(name)} {share:.0%}" for name, share in found["fullest"])
    fullest = f"; fullest layers: {fullest}" if found["free"] < 1 else ""
    console.print(
        f"tasks {len(found['tasks'])}, classes {classes}; {found['bytes'] / 2**20:.1f} MiB; "
        f"backbone {found['backbone'] or 'custom'}, images {tuple(found['input_shape'])}\n"
        f"{found['free']:.1%} of {found['weights']:,} weights are free{fullest}",
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


def card(
    model: Model,
    to: Annotated[Path | None, typer.Option(help="The Markdown file to write. Default: print it.")] = None,
) -> None:
    """Write a model card: what a model knows, how accurate it is, and how to use it."""
    from cps.app.model_card import model_card
    from cps.storage.atomic import write_text

    text = model_card(model)
    if to is None:
        print(replace_control_characters(text), end="")
        return
    write_text(to, text)
    console.print(f"Wrote [bold]{sanitize(to)}[/bold]")


def forget(
    model: Model,
    task: Annotated[
        int | None, typer.Option(min=1, help="The task to forget, numbered from 1 as in `cps inspect`.")
    ] = None,
    name: Annotated[str | None, typer.Option("--class", help="The class to forget.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="File with ImageNet weights, for the weights that become free.")
    ] = None,
    yes: Yes = False,
    loader: Loader = None,
) -> None:
    """Forget a task, or one class, permanently.

    Weights that no other task uses are initialised again. All other tasks
    keep exactly the same outputs. A class is taken out of all sums, and its
    outputs are cut off; a task whose last class goes is forgotten.
    """
    from cps.app import edit_model as app
    from cps.network.backbones import large_resnet18
    from cps.network.pretrained import load_imagenet_weights
    from cps.storage.container import check_file
    from cps.storage.lock import locked

    if (task is None) == (name is None):
        raise typer.BadParameter("give either --task or --class")
    check_file(model)
    with locked(model):
        learner = get_loader(loader)(model)
        tasks = len(learner.network.subnetworks)
        found = None if name is None else app.find_class(learner, name)
        if task is not None:
            check_task_number(task, learner.network)
            what = f"task {task} ({join_names(learner.network.subnetworks[task - 1].classes)})"
        else:
            of_class = [learner.network.subnetworks[index] for index in learner.network.tasks_of(found or "")]
            what = f"class '{found}'"
            if any(len(each.classes) > 1 and app.shares_covariance(each) for each in of_class):
                warn(
                    f"the covariance of the task of '{found}' is one sum over its classes, which is forgotten with the "
                    "class: fewer images of the other classes may be recognised"
                )
        _confirm(f"Forget {what} permanently?", "forgetting is permanent", yes=yes)
        fresh = None
        if weights is not None:
            fresh = large_resnet18()
            load_imagenet_weights(fresh, weights)
        if task is not None:
            had_checkpoint = app.forget_task(learner, task - 1, model, fresh=fresh)
        else:
            assert found is not None
            had_checkpoint = app.forget_class(learner, found, model, fresh=fresh)
        if had_checkpoint:
            console.print("Removed the checkpoint of an interrupted `cps learn`: it may contain weights of the task.")
    free = learner.network.free_share()
    console.print(f"Forgot {sanitize(what)}; {free:.1%} of the weights are free.", highlight=False)
    left = len(learner.network.subnetworks)
    if task is not None and task < tasks:
        moved = f"Tasks {task + 1} to {tasks} are now {task} to {tasks - 1}."
        console.print(f"Task {tasks} is now {task}." if task == tasks - 1 else moved, highlight=False)
    elif task is None and left < tasks:
        console.print("It was the last class of its task, so the task is gone; later tasks move down.")
    if left and (task is not None or left < tasks):
        console.print("All other tasks are unchanged: their fingerprints match.")


def rename(
    model: Model,
    old: Annotated[str, typer.Argument(help="The class to rename.")],
    new: Annotated[str, typer.Argument(help="Its new name, which no other class may have.")],
    yes: Yes = False,
    loader: Loader = None,
) -> None:
    """Give a class a new name, everywhere in the model.

    Predictions change only by the name. Fingerprints contain the names of the
    classes, so those of its tasks change.
    """
    from cps.app import edit_model as app
    from cps.selection.known_classes import check_new_name
    from cps.storage.container import check_file
    from cps.storage.lock import locked

    check_file(model)
    with locked(model):
        learner = get_loader(loader)(model)
        found = app.find_class(learner, old)
        check_new_name(learner.network, new)
        _confirm(f"Rename class '{found}' to '{new}'?", "renaming cannot be undone", yes=yes)
        app.rename_class(learner, found, new, model)
    console.print(f"Class '{sanitize(found)}' is now '{sanitize(new)}'.", highlight=False)


def _confirm(question: str, reason: str, *, yes: bool) -> None:
    """Ask for confirmation, unless `yes`; raise `ValueError` if there is no terminal to ask at."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ValueError(f"{reason}; use --yes to confirm without a terminal")
    typer.confirm(replace_control_characters(question), abort=True)


def _print_plan(plan: "LearningPlan", precision: str, precision_reason: str) -> None:
    from cps.app.estimate import estimate, estimate_frozen
    from cps.runtime.environment import free_memory

    counts = plan.scan.counts
    images = sum(counts.values())
    known = sorted(str(name) for name in plan.known)
    if plan.is_frozen:
        expected = estimate_frozen(plan.learner, plan.image_format, plan.scan.files)
    else:
        expected = estimate(plan.learner, plan.image_format.size, images, len(counts), plan.rotations)
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
    if known:
        how = "images are added to them" if plan.is_frozen else "a new version of each is learned"
        table.add_row("known classes", sanitize(join_names(known)), how)
    table.add_row("time", f"about {format_duration(expected.seconds)}", basis)
    table.add_row("memory", f"about {format_bytes(expected.memory)}", "estimated")
    console.print(table)
    if plan.learner.network.device.type == "cpu" and expected.memory > free_memory():
        warn(f"only {free_memory() / 2**30:.1f} GiB of memory are free; a smaller --size or --batch needs less")


def _print_learned(plan: "LearningPlan", learned: "LearnedFolder") -> None:
    from cps.selection.statistics import ENOUGH_HELD_OUT

    where = ""
    if learned.task is not None:
        where = f"Learned task {learned.task + 1}: {sanitize(join_names(list(learned.notes[CLASS_COUNTS])))}"
    if learned.added:
        added = format_count(sum(learned.added.values()), "image")
        where += ". " if where else ""
        where += f"Added {added} to known classes: {sanitize(join_names([*learned.added]))}"
    images = learned.images if plan.is_frozen else learned.images - learned.held_out
    console.print(
        f"{where} from {format_count(images, 'image')} in {format_duration(learned.seconds)}.", highlight=False
    )
    is_whole_task = learned.task is not None and not learned.added
    accuracy = accuracy_text(learned.notes) if is_whole_task else _accuracy_of_all(learned)
    console.print(f"Accuracy on held-out images: {accuracy}.", highlight=False)
    _print_confusion(learned.confusion, "of this folder", plan.model)
    if learned.task:
        console.print("The subnetworks of all earlier tasks are unchanged: their fingerprints match.")
    if learned.held_out < ENOUGH_HELD_OUT and learned.task is not None:
        console.print(
            f"Fewer than {ENOUGH_HELD_OUT} images were held out, so the rejection of unknown images is approximate; "
            "use --hold-out to hold out more."
        )
    console.print(f"Wrote [bold]{sanitize(plan.model)}[/bold]. The images are no longer needed.")


def _accuracy_of_all(learned: "LearnedFolder") -> str:
    if learned.accuracy is None:
        return "not measured: no images were held out"
    known, selected = learned.accuracy
    images = format_count(learned.held_out, "image")
    return f"{known:.1%} with the task known, {selected:.1%} with the task selected among all ({images})"


def _print_confusion(confusion: "Confusion", of_which: str, model: Path) -> None:
    """Print the accuracy of each class, the least accurate first, and the pairs that are most often confused."""
    measured = sorted((each for each in confusion.classes if each.images), key=lambda each: each.right / each.images)
    if len(measured) < 2:
        return
    if all(each.right == each.images for each in measured):
        console.print(f"All held-out images {of_which} were recognised.", highlight=False)
        return
    table = Table("class", "right", "mistaken for", title=f"Held-out images {of_which}")
    for name, right, images in measured[:MOST_CLASSES]:
        others = sorted(confusion.counts[name].items(), key=lambda item: (-item[1], item[0]))
        mistaken = ", ".join(f"{sanitize(other)} ({count})" for other, count in others if other != name)
        table.add_row(sanitize(name), f"{right} of {images}", mistaken)
    console.print(table)
    if len(measured) > MOST_CLASSES:
        left = len(measured) - MOST_CLASSES
        console.print(f"The other {left} classes are at least as accurate; `cps inspect --json` has all of them.")
    pairs = [f"{sanitize(one)} and {sanitize(other)} ({n})" for one, other, n in confusion.pairs[:MOST_PAIRS]]
    console.print(f"Most often confused: {', '.join(pairs)}.", highlight=False)
    console.print(f"The whole matrix as a picture: cps inspect {sanitize(model)} --picture FILE.svg", highlight=False)
