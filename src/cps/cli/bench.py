"""The commands for experiments: `cps bench` runs one, `cps report` writes a page about several."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cps.cli.terminal import ProgressLines, console, explain_interrupt, make_progress_bars, sanitize, warn

if TYPE_CHECKING:
    from cps.experiments.recipes import Recipe
    from cps.experiments.results import Results
    from cps.experiments.run import RunProgress


def bench(
    recipe: Annotated[str | None, typer.Argument(help="The experiment to run; --list shows all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/RECIPE.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data set, if the recipe needs one.")] = None,
    weights: Annotated[Path | None, typer.Option(help="File with pretrained weights, if the recipe uses them.")] = None,
    order: Annotated[int | None, typer.Option(min=0, help="Seed of the class order. Default: the recipe's.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything else.")] = 0,
    group_sizes: Annotated[str | None, typer.Option(help="Group sizes to evaluate, for example 1,5,20.")] = None,
    epochs_scale: Annotated[float, typer.Option(help="Factor for the number of epochs, for a short trial.")] = 1.0,
    tasks: Annotated[int | None, typer.Option(min=1, help="Number of tasks to learn, for a short trial.")] = None,
    selector: Annotated[
        str | None, typer.Option(help="The selector that predicts. Default: the first of the recipe.")
    ] = None,
    flips: Annotated[bool, typer.Option(help="Also evaluate with mirror images.")] = False,
    bounds: Annotated[bool, typer.Option(help="Also run finetuning, joint training and a closed form.")] = True,
    devices: Annotated[int, typer.Option(min=1, help="Number of processes per machine, one for each device.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    precision: Annotated[
        str | None,
        typer.Option(help="32-true, bf16-mixed or 16-mixed. Default: bf16-mixed on a GPU, 32-true on a CPU."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List all recipes, or the settings of one, and exit.")
    ] = False,
) -> None:
    """Run an experiment and write results.json, report.html and the model.

    The command can be interrupted at any time: running it again resumes from
    the last epoch.
    """
    if recipe is None or show_list:
        _list_recipes() if recipe is None else _print_recipe(_find_recipe(recipe))
        return
    from cps.experiments.run import Run
    from cps.runtime.devices import make_fabric

    if not 0 < epochs_scale < 1000:
        raise ValueError(f"--epochs-scale must be above 0 and below 1000, got {epochs_scale}")
    chosen = _find_recipe(recipe).with_scaled_epochs(epochs_scale)
    if weights is not None and chosen.pretrained is None:
        raise ValueError(f"the recipe '{recipe}' starts from random weights; run it without --weights")
    if selector is not None:
        chosen = chosen.with_selector(selector)
    folder = out or Path("runs") / recipe
    fabric = make_fabric(accelerator=accelerator, devices=devices, precision=precision, nodes=nodes)
    saved = folder / "model.cps", folder / "checkpoint.safetensors"
    with (
        explain_interrupt(lambda: any(file.exists() for file in saved)),
        _RunProgressBars(quiet=not fabric.is_global_zero) as on_progress,
    ):
        run = Run(
            chosen,
            folder,
            fabric,
            seed=seed,
            order=chosen.order if order is None else order,
            tasks=tasks,
            group_sizes=_parse_sizes(group_sizes),
            data=data,
            weights=weights,
            bounds=bounds,
            flips=flips,
            on_progress=on_progress,
        )
        results = run.start()
    if fabric.is_global_zero:
        _print_results(results)
        console.print(f"\nWrote [bold]{sanitize(folder)}[/bold]: report.html, results.json and model.cps")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their results.json.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page about one or more runs."""
    from cps.experiments.report import write_report
    from cps.experiments.results import read_results

    found = [read_results(path / "results.json" if path.is_dir() else path) for path in runs]
    distinct = {json.dumps(results.encode(), sort_keys=True): results for results in found}
    if len(distinct) < len(runs):
        warn(f"{len(runs) - len(distinct)} of the runs are duplicates and are counted once")
    write_report(out, list(distinct.values()))
    console.print(f"Wrote [bold]{sanitize(out)}[/bold]")


def _find_recipe(name: str) -> "Recipe":
    from cps.experiments.recipes import RECIPES

    if name not in RECIPES:
        raise ValueError(f"unknown recipe '{name}'; choose from: {', '.join(RECIPES)}")
    return RECIPES[name]()


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


def _parse_sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--group-sizes must be integers separated by commas, such as 1,5,20, got '{text}'") from None
    if min(sizes) < 1:
        raise ValueError(f"--group-sizes must be at least 1, got {min(sizes)}")
    return sorted(set(sizes))


class _RunProgressBars:
    """Progress of a run: one bar for all tasks and one for the current phase; lines if there is no terminal."""

    def __init__(self, *, quiet: bool):
        self.lines = None if console.is_terminal or quiet else ProgressLines(console)
        self.progress = make_progress_bars(console, quiet=quiet or self.lines is not None)

    def __enter__(self) -> "Callable[[RunProgress], None]":
        self.progress.start()
        self.whole = self.progress.add_task("starting", note="epochs in total", total=None)
        self.phase = self.progress.add_task("", note="", total=None)
        return self._update

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.lines is not None:
            self.lines.end()

    def _update(self, at: "RunProgress") -> None:
        task = f"task {at.task + 1} of {at.tasks}"
        note = "" if at.loss is None else f"loss {at.loss:.4f}"
        if self.lines is not None:
            self.lines.update(f"{task}, {at.phase}" if at.total else at.phase, at.epoch, at.epochs, note)
            return
        if at.total:
            self.progress.update(self.whole, description=task, completed=at.done, total=at.total)
        self.progress.update(self.phase, description=at.phase, completed=at.epoch, total=at.epochs, note=note)


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
