"""Export one task or all tasks of a learner to a file.

One task becomes an ONNX graph (images -> logits) or a plain state dict. All tasks with a selector become one ONNX graph
that needs no task. The file's metadata holds the class names, the tasks and the format of the images.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import cps
from cps.data.decode import ImageFormat
from cps.data.images import square_size
from cps.data.normalize import PIXEL_RANGE, is_pixel_range
from cps.export.onnx import write_onnx
from cps.export.state_dict import write_state_dict
from cps.learner import Learner
from cps.network.cost import measure_cost
from cps.network.shared import SharedNetwork
from cps.selection.all_tasks import AllTasksModule
from cps.selection.base import GraphSelector

CHECK_IMAGES = 5  # images of noise on which a written graph is compared with torch
PREPARED = (
    "as in cps predict: JPEG decoded at reduced size (PIL draft), EXIF orientation applied, RGB with transparency on "
    "white, short side resized to `scaled` pixels and centre square cropped (PIL ImageOps.fit, bilinear), its centre "
    "cropped to the image's size, divided by 255"
)


@dataclass(frozen=True)
class Export:
    """A written file and what the exported module costs.

    `bytes` is the size of the file, `operations` the number of floating point operations for one image. `difference`
    is the largest between onnxruntime and torch on noise, or None if onnxruntime is not installed.
    """

    path: Path
    bytes: int
    parameters: int
    operations: int
    difference: float | None = None


def export_task(learner: Learner, task: int, path: str | Path) -> Export:
    """Write one subnetwork as an ONNX graph (images -> logits), or as a state dict if `path` ends in .safetensors."""
    module, path = learner.extract(task), Path(path)
    metadata = {"classes": json.dumps(module.classes), "task": str(task + 1), **_common_metadata(learner)}
    if path.suffix != ".safetensors":
        return _export_onnx(learner.network, module, ["logits"], metadata, path)
    cost = measure_cost(module, learner.network)
    write_state_dict(module, path, metadata)
    return Export(path, path.stat().st_size, cost.parameters, cost.operations)


def export_all(learner: Learner, path: str | Path, *, selector: GraphSelector | None = None) -> Export:
    """Write all subnetworks and a selector (default: the learner's first) as one ONNX graph that needs no task."""
    module = AllTasksModule(learner.network, selector or learner.config.selectors[0])
    task_classes = [subnetwork.classes for subnetwork in learner.network.subnetworks]
    metadata = {
        "classes": json.dumps(module.classes),
        "tasks": json.dumps([{"task": index + 1, "classes": names} for index, names in enumerate(task_classes)]),
        "selector": module.selector.name,
        **_common_metadata(learner),
    }
    return _export_onnx(
        learner.network, module, ["class", "task", "confidence", "scores", "class_scores"], metadata, Path(path)
    )


def _export_onnx(
    network: SharedNetwork, module: nn.Module, outputs: list[str], metadata: dict[str, str], path: Path
) -> Export:
    cost = measure_cost(module, network)
    difference = write_onnx(module, path, _noise(network), output_names=outputs, metadata=metadata)
    return Export(path, path.stat().st_size, cost.parameters, cost.operations, difference)


def _noise(network: SharedNetwork) -> Tensor:
    """Return images of noise in the range of the training images."""
    low, high = network.input_range or PIXEL_RANGE
    shape = list(network.input_shape or ())
    return low + (high - low) * torch.rand(CHECK_IMAGES, *shape, generator=torch.Generator().manual_seed(0))


def _common_metadata(learner: Learner) -> dict[str, str]:
    """Return the metadata of every exported file: the format of the images, and the version of cps."""
    network, margin = learner.network, learner.architecture.margin if learner.architecture else 0.0
    shape = list(network.input_shape or ())
    image: dict[str, object] = {"shape": shape}
    if len(shape) == 3:
        image["layout"] = "channels, height, width"
    low, high = network.input_range or PIXEL_RANGE
    image["values"] = (
        "floats from 0 to 1" if is_pixel_range(low, high) else f"floats as in training, about {low:g} to {high:g}"
    )
    if square_size(shape) and is_pixel_range(low, high):  # pictures, as the commands read them from files
        image |= {"prepared": PREPARED, "scaled": ImageFormat(shape[-1], margin).scaled}
    return {"image": json.dumps(image), "made_by": f"cps {cps.__version__}"}
