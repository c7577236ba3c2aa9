"""The command of whoever takes a model elsewhere: `cps export` writes ONNX and state dicts."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cps.cli.loaders import Loader, loader_of
from cps.cli.terminal import console, errors, shown

if TYPE_CHECKING:
    from cps.export.onnx import Export
    from cps.learner import Learner
    from cps.selection.base import GraphSelector


def export(
    model: Annotated[Path, typer.Argument(help="The model file.")],
    to: Annotated[Path, typer.Option(help="The file to write: .onnx, or .safetensors for one task.")],
    task: Annotated[int | None, typer.Option(min=1, help="Which task, from 1.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All tasks, and the selection, as one graph.")] = False,
    selector: Annotated[str | None, typer.Option(help="The selector of that graph. Else the model's first.")] = None,
    loader: Loader = None,
) -> None:
    """Write one task, or all, as a file that needs no cps: ONNX, or a plain state dict."""
    if (task is None) != everything:
        raise typer.BadParameter("say which task with --task, or --all for all of them in one graph")
    if task is not None and selector is not None:
        raise typer.BadParameter("one task needs no --selector; that is for --all")
    from cps.export.onnx import export_all, export_task
    from cps.network.input_checks import check_task_number
    from cps.runtime.devices import make_fabric

    learner = loader_of(loader)(model, fabric=make_fabric(accelerator="cpu"))
    with redirect_stderr(io.StringIO()) as said:  # torch prints graphs at length where one cannot be made
        if task is None:
            done = export_all(learner, to, selector=_selector(learner, selector))
            what = f"all {len(learner.classes)} tasks"
        else:
            check_task_number(task, learner.network)
            done = export_task(learner, task - 1, to)
            what = f"task {task} ({', '.join(map(str, learner.classes[task - 1]))})"
    errors.print(shown(said.getvalue()), end="", soft_wrap=True, highlight=False)
    _show(done, what)


def _selector(learner: "Learner", name: str | None) -> "GraphSelector | None":
    """Return the selector of that name, if one was asked for; `export_all` refuses what a graph cannot hold."""
    if name is None:
        return None
    known = {selector.name: selector for selector in learner.selectors}
    if name not in known:
        raise ValueError(f"the model keeps nothing for a selector '{name}'; there are: {', '.join(known)}")
    return known[name]  # pyright: ignore[reportReturnType]


def _show(done: "Export", what: str) -> None:
    console.print(f"Wrote [bold]{shown(done.path)}[/bold]: {shown(what)}", soft_wrap=True)
    console.print(
        f"{done.bytes / 1024:,.0f} KiB, {done.parameters:,} parameters, "
        f"{done.operations / 1e6:,.1f} million operations for one image",
        highlight=False,
    )
    if done.difference is not None:
        console.print(f"onnxruntime and torch differ by {done.difference:.1e} at most, on noise", highlight=False)
    elif done.path.suffix == ".onnx":
        console.print("not checked: pip install onnxruntime to have the graph compared with torch", highlight=False)
