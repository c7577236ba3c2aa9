"""The command that writes a model for programs without cps: `cps export`."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cps.cli.arguments import Loader, check_task_number, get_loader
from cps.cli.terminal import console, errors, sanitize

if TYPE_CHECKING:
    from cps.export.tasks import Export
    from cps.learner import Learner
    from cps.selection.base import GraphSelector


def export(
    model: Annotated[Path, typer.Argument(help="The model file.")],
    to: Annotated[Path, typer.Option(help="The file to write: .onnx, or .safetensors for one task.")],
    task: Annotated[int | None, typer.Option(min=1, help="The task to export, numbered from 1.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Export all tasks and the task selection as one graph.")
    ] = False,
    selector: Annotated[
        str | None, typer.Option(help="The selector of the graph of all tasks. Default: the model's first.")
    ] = None,
    loader: Loader = None,
) -> None:
    """Export one task or all tasks to a file that works without cps: ONNX, or a plain state dict."""
    if (task is None) != everything:
        raise typer.BadParameter("give either --task, or --all for all tasks in one graph")
    if task is not None and selector is not None:
        raise typer.BadParameter("--selector needs --all; a single task has no selector")
    from cps.export.tasks import export_all, export_task
    from cps.runtime.devices import make_fabric

    learner = get_loader(loader)(model, fabric=make_fabric(accelerator="cpu"))
    with redirect_stderr(io.StringIO()) as output:  # torch prints long graphs if an export fails
        if task is None:
            exported = export_all(learner, to, selector=_find_selector(learner, selector))
            content = f"all {len(learner.classes)} tasks"
        else:
            check_task_number(task, learner.network)
            exported = export_task(learner, task - 1, to)
            content = f"task {task} ({', '.join(map(str, learner.classes[task - 1]))})"
    errors.print(sanitize(output.getvalue()), end="", soft_wrap=True, highlight=False)
    _print_export(exported, content)


def _find_selector(learner: "Learner", name: str | None) -> "GraphSelector | None":
    """Return the selector of that name; `export_all` raises if a graph cannot contain it."""
    if name is None:
        return None
    known = {selector.name: selector for selector in learner.config.selectors}
    if name not in known:
        raise ValueError(f"the model has no selector '{name}'; choose from: {', '.join(known)}")
    return known[name]  # pyright: ignore[reportReturnType]


def _print_export(exported: "Export", content: str) -> None:
    console.print(f"Wrote [bold]{sanitize(exported.path)}[/bold]: {sanitize(content)}", soft_wrap=True)
    console.print(
        f"{exported.bytes / 1024:,.0f} KiB, {exported.parameters:,} parameters, "
        f"{exported.operations / 1e6:,.1f} million operations per image",
        highlight=False,
    )
    if exported.difference is not None:
        console.print(f"onnxruntime and torch differ by at most {exported.difference:.1e}, on noise", highlight=False)
    elif exported.path.suffix == ".onnx":
        console.print("not checked: install onnxruntime to compare the graph with torch", highlight=False)
