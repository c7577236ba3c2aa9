"""The commands of researchers: `cps bench` runs an experiment, `cps report` makes its page again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cps.cli.terminal import Lines, bars, console, going_on, shown, warn

if TYPE_CHECKING:
    from cps.experiments.recipes import Recipe
    from cps.experiments.run import Tick


def bench(
    recipe: Annotated[str | None, typer.Argument(help="Which experiment; see --list.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Else runs/RECIPE.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data, where a recipe needs one.")] = None,
    weights: Annotated[Path | None, typer.Option(help="File of pretrained weights, where a recipe asks.")] = None,
    order: Annotated[int | None, typer.Option(min=0, help="Seed of the class order. Else the recipe's.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything else.")] = 0,
    group_sizes: Annotated[str | None, typer.Option(help="Group sizes to measure, as 1,5,20.")] = None,
    epochs_scale: Annotated[float, typer.Option(help="Times the epochs, for a short trial; at least one.")] = 1.0,
    tasks: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks, for a short trial.")] = None,
    selector: Annotated[str | None, typer.Option(help="The selector that predicts. Else the recipe's first.")] = None,
    flips: Annotated[bool, typer.Option(help="Measure with mirror images, too.")] = False,
    bounds: Annotated[bool, typer.Option(help="Run finetuning and joint training beside it.")] = True,
    devices: Annotated[int, typer.Option(min=1, help="Processes, each with a device of its own.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines, each with so many devices.")] = 1,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="32-true, bf16-mixed or 16-mixed. Else bf16-mixed on a GPU.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the recipes, or one's settings, and stop.")] = False,
) -> None:
    """Run an experiment and write results.json, report.html and the model.

    Stopped or killed, it goes on from its last epoch when the same command is given again.
    """
    if recipe is None or show_list:
        _list_recipes() if recipe is None else _show_recipe(_recipe(recipe))
        return
    from cps.experiments.run import Run
    from cps.runtime.devices import make_fabric

    if not 0 < epochs_scale < 1000:
        raise ValueError(f"--epochs-scale must be above 0 and below 1000, got {epochs_scale}")
    chosen = _recipe(recipe).scaled(epochs_scale)
    if weights is not None and chosen.pretrained is None:
        raise ValueError(f"the recipe '{recipe}' takes no --weights; it starts from drawn ones")
    if selector is not None:
        chosen = chosen.selecting_by(selector)
    folder = out or Path("runs") / recipe
    fabric = make_fabric(accelerator=accelerator, devices=devices, precision=precision, nodes=nodes)
    kept = folder / "model.cps", folder / "checkpoint.safetensors"
    with going_on(lambda: any(file.exists() for file in kept)), _Bars(quiet=not fabric.is_global_zero) as watch:
        run = Run(
            chosen,
            folder,
            fabric,
            seed=seed,
            order=chosen.order if order is None else order,
            tasks=tasks,
            group_sizes=_numbers(group_sizes),
            data=data,
            weights=weights,
            bounds=bounds,
            flips=flips,
            watch=watch,
        )
        results = run.start()
    if fabric.is_global_zero:
        _show(results)
        console.print(f"\nWrote [bold]{shown(folder)}[/bold]: report.html, results.json and model.cps")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their results.json.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one page about one or more runs."""
    from cps.experiments.report import write_report

    found = [_results(path / "results.json" if path.is_dir() else path) for path in runs]
    different = {json.dumps(results, sort_keys=True): results for results in found}
    if len(different) < len(runs):
        warn(f"{len(runs) - len(different)} of these runs are given more than once, and count once")
    write_report(out, list(different.values()))
    console.print(f"Wrote [bold]{shown(out)}[/bold]")


def _recipe(name: str) -> "Recipe":
    from cps.experiments.recipes import RECIPES

    if name not in RECIPES:
        raise ValueError(f"there is no recipe '{name}'; there are: {', '.join(RECIPES)}")
    return RECIPES[name]()


def _list_recipes() -> None:
    from cps.experiments.recipes import RECIPES

    for name, make in RECIPES.items():
        recipe = make()
        epochs = f"{recipe.train.epochs} + {recipe.rounds} x {recipe.retrain.epochs} epochs"
        cost = f"; {recipe.cost}" if recipe.cost else ""
        console.print(f"[bold]{name}[/bold]", f"    {recipe.about}", f"    {epochs}, {recipe.pruner}{cost}", sep="\n")


def _show_recipe(recipe: "Recipe") -> None:
    table = Table("setting", "value", title=recipe.about)
    sizes = recipe.sizes if isinstance(recipe.sizes, int) else ", ".join(map(str, recipe.sizes))
    settings = {"classes in a task": sizes, **recipe.learner_settings(), "joint": recipe.joint}
    for name, value in settings.items():
        for part in value if isinstance(value, tuple) else [value]:
            table.add_row(name, shown(part))
    console.print(table)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--group-sizes takes whole numbers with commas, as 1,5,20, got '{text}'") from None
    if min(numbers) < 1:
        raise ValueError("--group-sizes must be at least 1")
    return sorted(set(numbers))


def _results(file: Path) -> dict[str, Any]:
    """Return the results in a file; refuse one that is none."""
    try:
        results = json.loads(file.read_text())
        if {"recipe", "class_il", "task_il", "classes_per_task", "default_selector"} <= set(results):
            return results
    except FileNotFoundError:
        raise ValueError(f"there is no run at '{file}'") from None
    except (ValueError, TypeError):
        pass
    raise ValueError(f"'{file}' holds no results of a run")


class _Bars:
    """Progress bars: one for the whole of the tasks, one for the epochs of the phase; or lines, without a terminal."""

    def __init__(self, *, quiet: bool):
        self.lines = None if console.is_terminal or quiet else Lines(console)
        self.progress = bars(console, quiet=quiet or self.lines is not None)

    def __enter__(self) -> "Callable[[Tick], None]":
        self.progress.start()
        self.whole = self.progress.add_task("starting", note="epochs in all", total=None)
        self.phase = self.progress.add_task("", note="", total=None)
        return self._advance

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.lines is not None:
            self.lines.end()

    def _advance(self, tick: "Tick") -> None:
        task = f"task {tick.task + 1} of {tick.tasks}"
        note = "" if tick.loss is None else f"loss {tick.loss:.4f}"
        if self.lines is not None:
            self.lines.show(f"{task}, {tick.phase}" if tick.total else tick.phase, tick.epoch, tick.epochs, note)
            return
        if tick.total:
            self.progress.update(self.whole, description=task, completed=tick.done, total=tick.total)
        self.progress.update(self.phase, description=tick.phase, completed=tick.epoch, total=tick.epochs, note=note)


def _show(results: dict[str, Any]) -> None:
    from cps.experiments.aggregate import in_words
    from cps.experiments.report import group_table

    head, rows = group_table(results)
    table = Table(head[0], *(name for name in head[1:]))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    forgotten = {"cps, task known": results["task_il"]["BWT"]}
    by_size = results["class_il"][results["default_selector"]]
    forgotten |= {f"cps, {in_words(size)}": by_size[size]["BWT"] for size in ("1", "20") if size in by_size}
    if "finetuning" in results["bounds"]:
        forgotten["finetuning"] = results["bounds"]["finetuning"]["BWT"]
    console.print("points forgotten (BWT): " + "; ".join(f"{who} {points:.1f}" for who, points in forgotten.items()))
