"""The cost of running many subnetworks, compared with one pass of the dense network.

The masks come from two real runs (`cifar100-10` and `cifar100-20`, order 1993, the paper's settings) and are in
results/masks-10.safetensors and masks-20.safetensors. Weights and norms are random, which does not change the time.
`python -m benchmarks.prediction MODEL` replaces the masks by those of another run.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cps
from benchmarks import RESULTS
from benchmarks.timing import compare, make_row, time_row
from benchmarks.training import WIDTHS
from cps.network.cost import measure_costs
from cps.network.masks import Masks, pack, unpack
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Subnetwork
from cps.runtime.cuda_graphs import CapturedFunction

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def benchmark_prediction(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare the outputs of ten and twenty subnetworks with one dense pass and with ten masked passes."""
    device = fabric.device
    ten, twenty, half = paper_network(10, device), paper_network(20, device), paper_network(20, device, tasks=10)
    pairs = 3 if device.type == "cpu" else 50
    rows = [*_operation_rows(ten, "10 subnetworks"), *_operation_rows(twenty, "20 subnetworks")]
    for batch in (1, 20, 128):
        images = torch.rand(batch, 3, 32, 32, device=device)
        masked = partial(_run_masked, ten, images)
        dense = partial(_run_dense, ten.backbone.eval(), images)
        limit = 4.0 if device.type == "cpu" else 2.0
        images_text = f"{batch} image{'s' if batch > 1 else ''}"

        def add_row(label: str, first: Callable, second: Callable, limit: float | None = None) -> None:
            rows.append(time_row(label, *compare(first, second, device, pairs=pairs), limit))

        evidence = partial(run_all, ten, images)
        add_row(f"evidence of 10 subnetworks, {images_text}, against one dense pass", evidence, dense, limit)
        add_row(
            f"the same against the fastest dense pass ({_describe_dense(device)})",
            evidence,
            fastest_dense(ten, images),
        )
        features = partial(ten.features, [images], cps.RandomPatches())
        add_row(f"features of 125 random patches, {images_text}, against one dense pass", features, dense, 1.0)
        if batch < 128:
            add_row(f"ten masked passes, {images_text}, against one dense pass", masked, dense)
        add_row(
            f"evidence of 20 subnetworks, {images_text}, against that of the first 10",
            partial(run_all, twenty, images),
            partial(run_all, half, images),
            2.0,
        )
    return rows


def paper_network(run: int, device: torch.device, *, tasks: int | None = None) -> SharedNetwork:
    """Return a network with the masks of a real run of `run` tasks, or of its first `tasks`."""
    torch.manual_seed(0)
    network = SharedNetwork(cps.resnet18(3, WIDTHS))
    packed = load_file(_masks_file(run))
    for task in range(tasks or run):
        masks = {name: unpack(packed[f"{task}/{name}"], taken.shape).clone() for name, taken in network.taken.items()}
        add_subnetwork(network, masks, 100 // run)
    network.to(device)
    return network


def add_subnetwork(
    network: SharedNetwork, masks: Masks, classes: int, *, num_rotations: int = 1, flips: bool = False
) -> None:
    """Add a subnetwork for images of the size of CIFAR, with the given masks and a random head."""
    shape = (3, 32, 32)
    first, outputs = classes * len(network.subnetworks), classes * num_rotations
    features = network.backbone(torch.zeros(1, *shape)).shape[1]
    head = {"weight": torch.randn(outputs, features), "bias": torch.randn(outputs)}
    private = {name: value.clone() for name, value in network.initial.items()}
    names = tuple(range(first, first + classes))
    network.set_input(shape, (0.0, 1.0))
    with network.transaction() as state:
        added = Subnetwork(names, masks, private, head, flips=flips)
        network.set_state(state._replace(input_shape=shape, subnetworks=[*state.subnetworks, added]))


def store_masks(model: Path) -> None:
    """Write the masks of a run of `cifar100-10` or `cifar100-20` to the file that the benchmark reads."""
    network = cps.load(model, cps.resnet18(3, WIDTHS), fabric=cps.make_fabric(accelerator="cpu")).network
    masks = {
        f"{task}/{name}": pack(mask)
        for task, subnetwork in enumerate(network.subnetworks)
        for name, mask in subnetwork.masks.items()
    }
    save_file(masks, _masks_file(len(network.subnetworks)))


def _masks_file(tasks: int) -> Path:
    return RESULTS / f"masks-{tasks}.safetensors"


def _operation_rows(network: SharedNetwork, which: str) -> list[dict[str, Any]]:
    """Compare the operations for one image: with dead channels removed, and counting only active kernels."""
    dense, each = measure_costs(network)
    left, active = sum(cost.operations for cost in each), _active_operations(network)
    names: dict[str, float] = {
        f"operations of {which}, dead channels removed, against one dense pass": left,
        f"the same, counting only active kernels, {which}": active,
    }
    total = dense.operations
    return [make_row(label, f"{n / 1e6:.0f} M", f"{total / 1e6:.0f} M", n / total) for label, n in names.items()]


@torch.no_grad()
def _active_operations(network: SharedNetwork) -> float:
    """Return two operations for each weight of an active kernel, at each pixel it is applied to."""
    pixels: dict[str, int] = {}

    def record(name: str) -> Callable[[Any, Any, Tensor], None]:
        return lambda layer, inputs, output: pixels.__setitem__(f"{name}.weight", output[0, 0].numel())

    layers = {name: layer for name, layer in network.backbone.named_modules() if isinstance(layer, nn.Conv2d)}
    handles = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    network.backbone(torch.zeros(1, 3, 32, 32, device=network.device))
    for handle in handles:
        handle.remove()
    sizes = {f"{name}.weight": layer.weight[0, 0].numel() for name, layer in layers.items()}
    masks = [subnetwork.masks for subnetwork in network.subnetworks]
    return sum(2.0 * int(own[name].sum()) * size * pixels[name] for own in masks for name, size in sizes.items())


def run_all(network: SharedNetwork, images: Tensor) -> None:
    """Run all subnetworks."""
    list(network.evidence([images]))


def _run_masked(network: SharedNetwork, images: Tensor) -> None:
    for task in range(len(network.subnetworks)):
        network.full_outputs([images], task)


@torch.no_grad()
def _run_dense(backbone: nn.Module, images: Tensor) -> Tensor:
    return backbone(images)


def fastest_dense(network: SharedNetwork, images: Tensor) -> Callable[[], object]:
    """Return a dense pass with the same techniques that we use: channels last, and a CUDA graph on a GPU."""
    backbone = copy.deepcopy(network.backbone).eval().to(memory_format=torch.channels_last)  # pyright: ignore
    images = images.contiguous(memory_format=torch.channels_last)
    if not images.is_cuda:
        return partial(_run_dense, backbone, images)
    captured = CapturedFunction(lambda pixels: [_run_dense(backbone, pixels)])
    return partial(captured, images)


def _describe_dense(device: torch.device) -> str:
    return "channels last" if device.type == "cpu" else "channels last, captured"


if __name__ == "__main__":
    store_masks(Path(sys.argv[1]))
