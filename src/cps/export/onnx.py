"""Exporting: subnetworks as files for programs that know nothing of cps.

One task becomes an ONNX graph (images -> logits) or a plain state dict; all tasks with their selector become one ONNX
graph that names the class by itself. Class names, tasks and the form of the images travel in the file's metadata.
"""

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn

import cps
from cps.data.images import side_of
from cps.data.normalize import PIXELS, are_pixels
from cps.learner import Learner
from cps.network.compact.extraction import Standalone
from cps.network.cost import cost_of
from cps.runtime.cuda_graphs import first_line
from cps.selection.base import GraphSelector, Statistics, best_task
from cps.storage.container import atomic_write

log = logging.getLogger(__name__)

IMAGES = 5  # of noise, that a written graph is tried on
ROUNDING = 1e-3  # of the largest output; a graph that differs by more computes something else
PREPARED = (
    "as cps predict does: JPEG decoded at a fraction (PIL draft), turned as EXIF says, RGB with white where it is "
    "transparent, short side scaled and middle square cut (PIL ImageOps.fit, bilinear), divided by 255"
)


@dataclass(frozen=True)
class Export:
    """A file that was written, and what it costs.

    `difference` is the largest between onnxruntime and torch, on noise; None where onnxruntime was not there to check.
    """

    path: Path
    bytes: int
    parameters: int
    operations: int
    difference: float | None = None


class AllTasks(nn.Module):
    """All subnetworks and a selector in one module.

    Images, as floats from 0 to 1, -> class (an index into the classes of all tasks in a row), task from 0, confidence
    (the class's softmax share in that task), scores (N, tasks).
    """

    def __init__(self, learner: Learner, selector: GraphSelector):
        super().__init__()
        subnetworks = learner.network.subnetworks
        self.parts = nn.ModuleList(learner.extract(task) for task in range(len(subnetworks)))
        self.selector = selector
        statistics = selector.ready(learner.network.statistics(selector.name))
        self.keys = [list(kept) for kept in statistics]
        for task, kept in enumerate(statistics):
            for number, value in enumerate(kept.values()):
                self.register_buffer(f"statistic_{task}_{number}", value)
        sizes = [len(subnetwork.classes) for subnetwork in subnetworks]
        self.first = [sum(sizes[:task]) for task in range(len(sizes))]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return class, task, confidence and scores."""
        evidence = [part.outputs(images) for part in self.parts]  # pyright: ignore[reportCallIssue]
        scores = self.selector.alone(evidence, self._statistics())  # (N, tasks)
        task = best_task(scores)
        shares, places = [], []
        for first, outputs in zip(self.first, evidence, strict=True):
            share, place = outputs.logits.softmax(dim=1).max(dim=1)
            shares.append(share)
            places.append(place + first)
        chosen = task[:, None]
        confidence = torch.stack(shares, dim=1).gather(1, chosen)[:, 0]
        return torch.stack(places, dim=1).gather(1, chosen)[:, 0], task, confidence, scores

    def _statistics(self) -> list[Statistics]:
        return [
            {key: self.get_buffer(f"statistic_{task}_{number}") for number, key in enumerate(keys)}
            for task, keys in enumerate(self.keys)
        ]


def export_task(learner: Learner, task: int, path: str | Path) -> Export:
    """Write one subnetwork: an ONNX graph (images -> logits), or a state dict if `path` ends in .safetensors."""
    path = Path(path)
    module = learner.extract(task)
    about = {"classes": json.dumps(module.classes), "task": str(task + 1), **_about(learner)}
    if path.suffix == ".safetensors":
        cost = cost_of(module, learner.network)
        with atomic_write(path) as partial:
            save_file({n: v.contiguous() for n, v in module.cpu().state_dict().items()}, partial, about | _plan(module))
        return Export(path, path.stat().st_size, cost["parameters"], cost["operations"])
    return _export_onnx(learner, module, ["logits"], about, path)


def export_all(learner: Learner, path: str | Path, *, selector: GraphSelector | None = None) -> Export:
    """Write all subnetworks and a selector, else the learner's first, as one ONNX graph that needs no task."""
    chosen = selector or learner.selectors[0]
    if not learner.network.subnetworks:
        raise RuntimeError("nothing has been learned yet; there is nothing to export")
    if not isinstance(chosen, GraphSelector):
        raise ValueError(
            f"the selector {chosen.name} cannot be put into a graph without 'alone' and 'ready'; choose another, "
            "such as MaxOutput, or export the tasks one by one"
        )
    groups = [subnetwork.classes for subnetwork in learner.network.subnetworks]
    about = {
        "classes": json.dumps([name for names in groups for name in names]),
        "tasks": json.dumps([{"task": index + 1, "classes": names} for index, names in enumerate(groups)]),
        "selector": chosen.name,
        **_about(learner),
    }
    try:
        module = AllTasks(learner, chosen)
        module(torch.zeros(1, *(learner.network.input_shape or ()), device=learner.network.device))
    except KeyError as error:
        raise ValueError(f"{chosen.name} has kept no {error} about some task; choose another selector") from None
    return _export_onnx(learner, module, ["class", "task", "confidence", "scores"], about, Path(path))


def _about(learner: Learner) -> dict[str, str]:
    """Return what every exported file says about itself."""
    shape = learner.network.input_shape or ()
    image: dict[str, object] = {"shape": shape}
    if len(shape) == 3:
        image["layout"] = "channels, height, width"
    low, high = learner.network.input_range or PIXELS
    image["values"] = (
        "floats from 0 to 1" if are_pixels(low, high) else f"floats as learned, such as {low:g} to {high:g}"
    )
    if side_of(shape) and are_pixels(low, high):  # what the commands learn from files
        image["prepared"] = PREPARED
    return {"image": json.dumps(image), "made_by": f"cps {cps.__version__}"}


def _plan(module: Standalone) -> dict[str, str]:
    """Return the layers of a subnetwork and the code that joins them, for whoever builds it anew elsewhere."""
    layers = {name: repr(layer) for name, layer in module.named_modules() if next(layer.children(), None) is None}
    code = module.backbone.code if isinstance(module.backbone, fx.GraphModule) else ""
    if not code:
        log.warning("the backbone cannot be traced: the file has its layers as they are in your module, and no forward")
    about = {"looks": json.dumps(module.views), "layers": json.dumps(layers), "forward": str(code).strip()}
    return {"format": "pt", **about}


def _export_onnx(learner: Learner, module: nn.Module, outputs: list[str], about: dict[str, str], path: Path) -> Export:
    """Write a module as a graph with a batch axis of any length, checked before it takes its place."""
    if path.suffix != ".onnx":
        raise ValueError(f"expected a file that ends in .onnx, or in .safetensors for one task, got '{path.name}'")
    if importlib.util.find_spec("onnxscript") is None or importlib.util.find_spec("onnx") is None:
        raise RuntimeError('to write ONNX, install what it needs: pip install "continual-prune-and-select[export]"')
    cost = cost_of(module, learner.network)
    low, high = learner.network.input_range or PIXELS
    noise = torch.rand(IMAGES, *(learner.network.input_shape or ()), generator=torch.Generator().manual_seed(0))
    images = low + (high - low) * noise
    module = module.cpu().eval()
    with atomic_write(path) as partial:
        _write_onnx(module, images, outputs, about, partial)
        difference = _difference(partial, module, images)
    return Export(path, path.stat().st_size, cost["parameters"], cost["operations"], difference)


def _write_onnx(module: nn.Module, images: Tensor, outputs: list[str], about: dict[str, str], path: Path) -> None:
    with warnings.catch_warnings(), _quiet("torch", "torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")  # of deprecated parts of torch that its own exporter uses
        try:
            program = torch.onnx.export(
                module, (images,), dynamo=True, verbose=False, input_names=["images"], output_names=outputs,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )  # fmt: skip
        except Exception as error:  # whatever a module's forward does
            raise RuntimeError(
                f"the backbone cannot be written as a graph, as where its forward depends on values "
                f"({first_line(error.__cause__ or error)}); export the tasks one by one to .safetensors"
            ) from error
    assert program is not None
    shape = program.model.graph.inputs[0].shape
    if shape is not None and isinstance(shape[0], int):
        raise RuntimeError("the backbone fixes the number of images; in its forward use x.shape[0] instead of len(x)")
    program.model.metadata_props.update(about)
    program.save(path, external_data=False)


def _difference(path: Path, module: nn.Module, images: Tensor) -> float | None:
    """Return the largest difference of what onnxruntime and torch compute, for one image and for several."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    largest = 0.0
    for batch in (images, images[:1]):
        found = [torch.from_numpy(value) for value in session.run(None, {"images": batch.numpy()})]
        with torch.no_grad():
            expected = module(batch)
        for ours, theirs in zip(found, [expected] if isinstance(expected, Tensor) else expected, strict=True):
            gap = float((ours.double() - theirs.double()).abs().max())
            if not gap <= ROUNDING * max(1.0, float(theirs.double().abs().max())):
                raise RuntimeError(
                    f"onnxruntime computes something else than torch (it differs by {gap:.3g}); not written"
                )
            largest = max(largest, gap)
    return largest


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Let loggers of other libraries say errors only, for a while."""
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)
