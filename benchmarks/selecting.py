"""What selecting among many subnetworks costs, against one pass of the dense network.

The masks are those of a real run (`cifar100-10`, order 1993, the paper's settings, see results/masks.safetensors);
weights and norms are random, which changes no time.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cps
from benchmarks.timing import compare, row
from benchmarks.training import PAPER
from cps.capture import Captured
from cps.masks import pack, unpack
from cps.network import SharedNetwork
from cps.subnetwork import Subnetwork

if TYPE_CHECKING:
    from lightning_fabric import Fabric

MASKS = Path(__file__).parent / "results" / "masks.safetensors"


def selecting(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare the evidence of ten subnetworks, and of twenty, with one dense pass, and with ten."""
    device = fabric.device
    ten, twenty = paper_network(10, device), paper_network(20, device)
    pairs = 3 if device.type == "cpu" else 50
    rows = []
    for batch in (1, 20, 128):
        images = torch.rand(batch, 3, 32, 32, device=device)
        naive = partial(_naive, ten, images)
        dense = partial(_dense, ten.backbone.eval(), images)
        limit = 4.0 if device.type == "cpu" else 2.0
        many = f"{batch} image{'s' if batch > 1 else ''}"

        def line(what: str, first: Callable, second: Callable, limit: float | None = None) -> None:
            rows.append(row(what, *compare(first, second, device, pairs=pairs), limit))

        evidence = partial(_evidence, ten, images)
        line(f"evidence of 10 subnetworks, {many}, against one dense pass", evidence, dense, limit)
        line(f"the same against the fastest dense pass ({_kind(device)})", evidence, _fastest(ten, images))
        if batch < 128:
            line(f"ten masked passes, {many}, against one dense pass", naive, dense)
        line(
            f"evidence of 20 subnetworks, {many}, against that of 10", partial(_evidence, twenty, images), evidence, 2.0
        )
    return rows


def paper_network(tasks: int, device: torch.device) -> SharedNetwork:
    """Return a network with the masks of a real run; beyond ten tasks they are used again."""
    torch.manual_seed(0)
    network = SharedNetwork(cps.resnet18(3, PAPER))
    packed = load_file(MASKS)
    for task in range(tasks):
        masks = {
            name: unpack(packed[f"{task % 10}/{name}"], taken.shape).clone() for name, taken in network.taken.items()
        }
        head = {"weight": torch.randn(10, PAPER[-1]), "bias": torch.randn(10)}
        private = {name: value.clone() for name, value in network.initial.items()}
        network.subnetworks.append(Subnetwork(tuple(range(10 * task, 10 * task + 10)), masks, private, head))
    network.input_shape = (3, 32, 32)
    network.to(device)
    return network


def keep_masks(model: Path) -> None:
    """Write the masks of a `cifar100-10` run where the benchmark finds them."""
    network = cps.load(model, cps.resnet18(3, PAPER), fabric=cps.make_fabric(accelerator="cpu")).network
    masks = {
        f"{task}/{name}": pack(mask)
        for task, subnetwork in enumerate(network.subnetworks)
        for name, mask in subnetwork.masks.items()
    }
    save_file(masks, MASKS)


def _evidence(network: SharedNetwork, images: Tensor) -> None:
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
