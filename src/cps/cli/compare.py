"""The command that compares methods: `cps compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
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
    from cps.experiments.aggregate import Table as TextTable
    from cps.experiments.compare import CompareProgress
    from cps.experiments.comparison import Comparison
    from cps.methods.blocks.memory import Memory

BUDGETS = ("equal", "own")


def compare(
    recipe: Annotated[
        str | None, typer.Argument(help="The experiment whose tasks are learned; cps bench --list shows all.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods separated by commas, or all; --list shows them. A closed form is always there.")
    ] = "all",
    orders: Annotated[
        str, typer.Option(help="A number of class orders, or seeds and names separated by commas, as in 1993,podnet-1.")
    ] = "1",
    budget: Annotated[
        str,
        typer.Option(
            help="equal: all methods see the same number of images, with the recipe's optimizer; own: every method is "
            "trained as it was published."
        ),
    ] = "equal",
    memory: Annotated[
        int | None,
        typer.Option(min=0, help="Images that methods with a memory may keep in all. Default: as published."),
    ] = None,
    memory_per_class: Annotated[
        int | None, typer.Option(min=0, help="The same as a number for each class, however many classes there are.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/compare-RECIPE.")] = None,
    data: DataFolder = None,
    weights: Weights = None,
    seed: Seed = 0,
    group_sizes: GroupSizes = None,
    epochs_scale: EpochsScale = 1.0,
    tasks: Tasks = None,
    accelerator: Accelerator = "auto",
    precision: Precision = None,
    show_list: Annotated[bool, typer.Option("--list", help="List all methods and exit.")] = False,
) -> None:
    """Compare methods: the same data, class orders, network and budget for all.

    It prints a table, and writes results.json, report.html, table.csv and
    table.tex. The command can be interrupted at any time: running it again
    resumes.
    """
    if show_list:
        _list_methods()
        return
    if recipe is None:
        raise ValueError("pass a recipe, such as digits; cps bench --list shows all")
    if budget not in BUDGETS:
        raise ValueError(f"--budget must be {' or '.join(BUDGETS)}, got '{budget}'")
    from cps.data.class_orders import parse_orders
    from cps.experiments.compare import Compare
    from cps.experiments.contestants import Setting, find_contestants
    from cps.experiments.report import write_comparison
    from cps.runtime.devices import make_fabric

    chosen = find_recipe(recipe, weights=weights, epochs_scale=epochs_scale)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    find_contestants(names)  # an unknown name is an error before anything is read
    folder = out or Path("runs") / f"compare-{recipe}"
    setting = Setting(
        chosen,
        make_fabric(accelerator=accelerator, precision=precision),
        budget,
        _memory(memory, memory_per_class),
        seed,
        weights,
    )
    with (
        explain_interrupt(lambda: any(folder.glob("order-*/*/run.json"))),
        NestedProgress(console, "methods in total", quiet=False) as progress,
    ):
        comparison = Compare(
            setting,
            names,
            parse_orders(orders),
            folder,
            data=data,
            tasks=tasks,
            group_sizes=parse_sizes(group_sizes),
            on_progress=lambda at: _show(progress, at),
        ).start()
    if comparison.results:
        write_comparison(folder, comparison)
        _print_comparison(comparison)
        console.print(f"\nWrote [bold]{sanitize(folder)}[/bold]: report.html, results.json, table.csv and table.tex")
    if comparison.failures:
        for failure in comparison.failures:
            warn(f"{failure.method} failed on order {failure.order}: {failure.error}")
        raise typer.Exit(1)


def _memory(total: int | None, per_class: int | None) -> "Memory | None":
    from cps.methods.blocks.memory import Memory

    if total is not None and per_class is not None:
        raise ValueError("pass either --memory or --memory-per-class, not both")
    if per_class is not None:
        return Memory(per_class=per_class)
    return None if total is None else Memory(total)


def _list_methods() -> None:
    from cps.experiments.contestants import CONTESTANTS

    width = max(map(len, CONTESTANTS))
    for name, contestant in CONTESTANTS.items():
        console.print(f"[bold]{name:<{width}}[/bold]  {sanitize(contestant.about)}", highlight=False, soft_wrap=True)


def _show(progress: NestedProgress, at: "CompareProgress") -> None:
    """Show the state of a comparison."""
    note = "" if at.loss is None else f"loss {at.loss:.4f}"
    whole = f"{at.method}, order {at.order}"
    part = f"task {at.task + 1} of {at.tasks}, {at.phase}" if at.tasks else at.phase
    done = at.run + (at.task / at.tasks if at.tasks else 0)
    progress.update(whole, done, at.runs, part, at.epoch, at.epochs, note)


def _print_comparison(comparison: "Comparison") -> None:
    from cps.experiments.comparison_tables import accuracy_table, cost_table

    _print_table(accuracy_table(comparison), "accuracy (%)")
    _print_table(cost_table(comparison), "cost")


def _print_table(content: "TextTable", title: str) -> None:
    """Print a table; without a terminal, as wide as it is."""
    head, rows = content
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if name in ("method", "assumes") else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(sanitize, row))
    if console.is_terminal:
        console.print(table)
    else:
        width = Measurement.get(console, console.options.update(max_width=1000), table).maximum
        Console(width=width, emoji=False).print(table)
