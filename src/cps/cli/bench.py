"""The commands for experiments: `cps bench` runs one, `cps report` writes a page about several."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cps.cli.arguments import (
    Accelerator,
    DataFolder,
    EpochsScale,
    GroupSizes,
    Precision,
    Seed,
    Tasks,
    Weights,
    find_recipe,
    parse_sizes,
)
from cps.cli.terminal import NestedProgress, console, explain_interrupt, sanitize, warn

if TYPE_CHECKING:
    from cps.evaluation.tracker import Tracker
    from cps.experiments.recipes import Recipe
    from cps.experiments.results import Results
    from cps.experiments.run import RunProgress


def bench(
    recipe: Annotated[str | None, typer.Argument(help="The experiment to run; --list shows all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/RECIPE.")] = None,
    data: DataFolder = None,
    weights: Weights = None,
    order: Annotated[str | None, typer.Option(help="Class order: a seed or a name. Default: the recipe's.")] = None,
    seed: Seed = 0,
    group_sizes: GroupSizes = None,
    epochs_scale: EpochsScale = 1.0,
    tasks: Tasks = None,
    selector: Annotated[
        str | None, typer.Option(help="The selector that predicts. Default: the first of the recipe.")
    ] = None,
    flips: Annotated[bool, typer.Option(help="Also evaluate with mirror images.")] = False,
    bounds: Annotated[bool, typer.Option(help="Also run finetuning, joint training and a closed form.")] = True,
    log: Annotated[str | None, typer.Option(help="Also log losses and accuracies: csv, tensorboard or wandb.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Number of processes per machine, one for each device.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    accelerator: Accelerator = "auto",
    precision: Precision = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List all recipes, or the settings of one, and exit.")
    ] = False,
) -> None:
    """Run an experiment and write results.json, report.html and the model.

    The command can be interrupted at any time: running it again resumes from
    the last epoch.
    """
    if recipe is None or show_list:
        _list_recipes() if recipe is None else _print_recipe(find_recipe(recipe))
        return
    from cps.data.class_orders import parse_order
    from cps.evaluation.tracker import open_tracker
    from cps.experiments.run import Run
    from cps.runtime.devices import make_fabric

    chosen = find_recipe(recipe, weights=weights, epochs_scale=epochs_scale)
    if selector is not None:
        chosen = chosen.with_selector(selector)
    folder = out or Path("runs") / recipe
    fabric = make_fabric(accelerator=accelerator, devices=devices, precision=precision, nodes=nodes)
    saved = folder / "model.cps", folder / "checkpoint.safetensors"
    tracker = None if log is None or not fabric.is_global_zero else open_tracker(log, folder, recipe)
    with (
        explain_interrupt(lambda: any(file.exists() for file in saved)),
        NestedProgress(console, "epochs in total", quiet=not fabric.is_global_zero) as progress,
    ):
        run = Run(
            chosen,
            folder,
            fabric,
            seed=seed,
            order=chosen.order if order is None else parse_order(order),
            tasks=tasks,
            group_sizes=parse_sizes(group_sizes),
            data=data,
            weights=weights,
            bounds=bounds,
            flips=flips,
            on_progress=lambda at: _show(progress, at, tracker),
        )
        results = run.start()
    if tracker is not None:
        tracker.log_evaluation(results)
    if fabric.is_global_zero:
        _print_results(results)
        console.print(f"\nWrote [bold]{sanitize(folder)}[/bold]: report.html, results.json and model.cps")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or comparisons, or their results.json.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page about runs of cps bench and comparisons of cps compare, one or more of them."""
    from cps.experiments.comparison import is_comparison, read_comparison
    from cps.experiments.report import write_report
    from cps.experiments.results import read_results

    files = [path / "results.json" if path.is_dir() else path for path in runs]
    comparisons = [read_comparison(path) for path in files if is_comparison(path)]
    found = [read_results(path) for path in files if not is_comparison(path)]
    distinct = {json.dumps(results.encode(), sort_keys=True): results for results in found}
    if len(distinct) < len(found):
        warn(f"{len(found) - len(distinct)} of the runs are duplicates and are counted once")
    write_report(out, list(distinct.values()), comparisons)
    console.print(f"Wrote [bold]{sanitize(out)}[/bold]")


def _list_recipes() -> None:
    from cps.experiments.recipes import RECIPES

    for name, make in RECIPES.items():
        recipe = make()
        epochs = f"{recipe.train.epochs} + {recipe.rounds} x {recipe.retrain.epochs} epochs"
        cost = f"; {recipe.cost}" if recipe.cost else ""
        console.print(f"[bold]{name}[/bold]", f"    {recipe.about}", f"    {epochs}, {recipe.pruner}{cost}", sep="\n")


def _print_recipe(recipe: "Recipe") -> None:
    table = Table("setting", "value", title=recipe.about)
    sizes = recipe.sizes if isinstance(recipe.sizes, int) else ", ".join(map(str, recipe.sizes))
    settings = {"classes per task": sizes, **recipe.learner_settings(), "joint": recipe.joint}
    for name, value in settings.items():
        for part in value if isinstance(value, tuple) else [value]:
            table.add_row(name, sanitize(part))
    console.print(table)


def _show(progress: NestedProgress, at: "RunProgress", tracker: "Tracker | None") -> None:
    """Show the state of a run, and log the loss."""
    if tracker is not None and at.loss is not None:
        tracker.log_loss(at.phase, at.loss, at.done)
    note = "" if at.loss is None else f"loss {at.loss:.4f}"
    task = f"task {at.task + 1} of {at.tasks}"
    progress.update(task, at.done, at.total, at.phase, at.epoch, at.epochs, note)


def _print_results(results: "Results") -> None:
    from cps.experiments.aggregate import describe_group_size
    from cps.experiments.report import group_size_table

    head, rows = group_size_table(results)
    table = Table(head[0], *(name for name in head[1:]))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    forgetting = {"cps, task known": results.task_il.BWT}
    by_size = results.default_metrics
    forgetting |= {f"cps, {describe_group_size(size)}": by_size[size].BWT for size in (1, 20) if size in by_size}
    if results.bounds.finetuning is not None:
        forgetting["finetuning"] = results.bounds.finetuning.BWT
    console.print("forgetting in points (BWT): " + "; ".join(f"{name} {bwt:.1f}" for name, bwt in forgetting.items()))
