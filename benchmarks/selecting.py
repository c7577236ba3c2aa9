"""What selecting among many subnetworks costs, against one pass of the dense network.

The masks are those of two real runs (`cifar100-10` and `cifar100-20`, order 1993, the paper's settings, see
results/masks-10.safetensors and masks-20.safetensors); weights and norms are random, which changes no time.
`python -m benchmarks.selecting MODEL` keeps the masks of another run of these in their place.
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
from benchmarks.records import RESULTS
from benchmarks.timing import compare, entry, row
from benchmarks.training import WIDTHS
from cps.network.cost import describe_costs
from cps.network.masks import Masks, pack, unpack
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Subnetwork
from cps.runtime.cuda_graphs import Captured

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def selecting(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare the evidence of ten subnetworks, and of twenty, with one dense pass, and with ten."""
    device = fabric.device
    ten, twenty, half = paper_network(10, device), paper_network(20, device), paper_network(20, device, tasks=10)
    pairs = 3 if device.type == "cpu" else 50
    rows = [*_operations(ten, "10 subnetworks"), *_operations(twenty, "20 subnetworks")]
    for batch in (1, 20, 128):
        images = torch.rand(batch, 3, 32, 32, device=device)
        naive = partial(_naive, ten, images)
        dense = partial(_dense, ten.backbone.eval(), images)
        limit = 4.0 if device.type == "cpu" else 2.0
        many = f"{batch} image{'s' if batch > 1 else ''}"

        def line(what: str, first: Callable, second: Callable, limit: float | None = None) -> None:
            rows.append(row(what, *compare(first, second, device, pairs=pairs), limit))

        evidence = partial(evidence_of, ten, images)
        line(f"evidence of 10 subnetworks, {many}, against one dense pass", evidence, dense, limit)
        line(f"the same against the fastest dense pass ({_kind(device)})", evidence, _fastest(ten, images))
        if batch < 128:
            line(f"ten masked passes, {many}, against one dense pass", naive, dense)
        line(
            f"evidence of 20 subnetworks, {many}, against that of the first 10",
            partial(evidence_of, twenty, images),
            partial(evidence_of, half, images),
            2.0,
        )
    return rows


def paper_network(run: int, device: torch.device, *, tasks: int | None = None) -> SharedNetwork:
    """Return a network with the masks of a real run of so many tasks, or of its first ones."""
    torch.manual_seed(0)
    network = SharedNetwork(cps.resnet18(3, WIDTHS))
    packed = load_file(_file(run))
    for task in range(tasks or run):
        masks = {name: unpack(packed[f"{task}/{name}"], taken.shape).clone() for name, taken in network.taken.items()}
        add_subnetwork(network, masks, 100 // run)
    network.to(device)
    return network


def add_subnetwork(
    network: SharedNetwork, masks: Masks, classes: int, *, num_rotations: int = 1, flips: bool = False
) -> None:
    """Add a subnetwork of CIFAR's images with these masks and a random head."""
    network.input_shape = (3, 32, 32)
    first, outputs = classes * len(network.subnetworks), classes * num_rotations
    features = network.backbone(torch.zeros(1, *network.input_shape)).shape[1]
    head = {"weight": torch.randn(outputs, features), "bias": torch.randn(outputs)}
    private = {name: value.clone() for name, value in network.initial.items()}
    names = tuple(range(first, first + classes))
    network.subnetworks.append(Subnetwork(names, masks, private, head, flips=flips))


def keep_masks(model: Path) -> None:
    """Write the masks of a run of `cifar100-10` or `cifar100-20` where the benchmark finds them."""
    network = cps.load(model, cps.resnet18(3, WIDTHS), fabric=cps.make_fabric(accelerator="cpu")).network
    masks = {
        f"{task}/{name}": pack(mask)
        for task, subnetwork in enumerate(network.subnetworks)
        for name, mask in subnetwork.masks.items()
    }
    save_file(masks, _file(len(network.subnetworks)))


def _file(tasks: int) -> Path:
    return RESULTS / f"masks-{tasks}.safetensors"


def _operations(network: SharedNetwork, which: str) -> list[dict[str, Any]]:
    """Compare the operations for one image: of channels that are left, and of kernels that are on."""
    dense, each = describe_costs(network)
    left, on = sum(cost["operations"] for cost in each), _operations_of_kernels(network)
    names: dict[str, float] = {
        f"operations of {which}, dead channels removed, against one dense pass": left,
        f"the same, counting only the kernels that are on of {which}": on,
    }
    whole = dense["operations"]
    return [entry(what, f"{n / 1e6:.0f} M", f"{whole / 1e6:.0f} M", n / whole) for what, n in names.items()]


@torch.no_grad()
def _operations_of_kernels(network: SharedNetwork) -> float:
    """Return two operations for each weight of a kernel that is on, at each pixel it is applied to."""
    pixels: dict[str, int] = {}

    def note(name: str) -> Callable[[Any, Any, Tensor], None]:
        return lambda layer, inputs, output: pixels.__setitem__(f"{name}.weight", output[0, 0].numel())

    layers = {name: layer for name, layer in network.backbone.named_modules() if isinstance(layer, nn.Conv2d)}
    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    network.backbone(torch.zeros(1, 3, 32, 32, device=network.device))
    for handle in handles:
        handle.remove()
    sizes = {f"{name}.weight": layer.weight[0, 0].numel() for name, layer in layers.items()}
    masks = [subnetwork.masks for subnetwork in network.subnetworks]
    return sum(2.0 * int(own[name].sum()) * size * pixels[name] for own in masks for name, size in sizes.items())


def evidence_of(network: SharedNetwork, images: Tensor) -> None:
    """Ask all subnetworks."""
    list(network.evidence([images]))


def _naive(network: SharedNetwork, images: Tensor) -> None:
    for task in range(len(network.subnetworks)):
        network.whole_outputs([images], task)


@torch.no_grad()
def _dense(backbone: nn.Module, images: Tensor) -> Tensor:
    return backbone(images)


def _fastest(network: SharedNetwork, images: Tensor) -> Callable[[], object]:
    """Return a dense pass with all that we use ourselves: channels last, and a graph on a GPU."""
    backbone = copy.deepcopy(network.backbone).eval().to(memory_format=torch.channels_last)  # pyright: ignore
    images = images.contiguous(memory_format=torch.channels_last)
    if not images.is_cuda:
        return partial(_dense, backbone, images)
    captured = Captured(lambda pixels: [_dense(backbone, pixels)])
    return partial(captured, images)


def _kind(device: torch.device) -> str:
    return "channels last" if device.type == "cpu" else "channels last, captured"


if __name__ == "__main__":
    keep_masks(Path(sys.argv[1]))
