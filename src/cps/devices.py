"""Devices: where work runs, through lightning-fabric: one CPU, one GPU, or many processes on many machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_fabric import Fabric

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true")  # the last two are refused


def make_fabric(
    *,
    accelerator: str = "auto",
    devices: int = 1,
    precision: Any = None,
    nodes: int = 1,
) -> "Fabric":
    """Return a launched Fabric: one process, or one for each of several devices.

    `precision` is bf16-mixed on a GPU and 32-true elsewhere, unless given.
    """
    _check(accelerator, precision)
    lightning = _lightning_fabric()
    several = devices * nodes > 1
    # A single process needs no cluster; looking for one starts MPI where it is installed, for ten seconds.
    alone = lightning.plugins.environments.LightningEnvironment()
    fabric = lightning.Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        precision=precision or ("bf16-mixed" if _is_cuda(accelerator) else "32-true"),
        strategy="ddp_find_unused_parameters_true" if several else "auto",
        plugins=None if several else alone,
    )
    return ready(fabric)


def _check(accelerator: str, precision: Any) -> None:
    """Refuse what cannot be, in fewer words than lightning has."""
    known = ("auto", "cpu", "cuda", "gpu", "mps")
    if accelerator not in known:
        raise ValueError(f"there is no accelerator '{accelerator}'; there are: {', '.join(known)}")
    if accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
        raise ValueError("there is no GPU that torch could use here; take the accelerator cpu")
    if accelerator == "mps" and not torch.backends.mps.is_available():
        raise ValueError("there is no Apple GPU that torch could use here; take the accelerator cpu")
    if precision == "16-mixed" and not (_is_cuda(accelerator) or accelerator == "mps"):
        raise ValueError("precision 16-mixed needs a GPU; take bf16-mixed or 32-true")
    if isinstance(precision, str) and precision not in PRECISIONS:
        raise ValueError(f"there is no precision '{precision}'; there are: {', '.join(PRECISIONS[:3])}")


def _is_cuda(accelerator: str) -> bool:
    return accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available())


def ready(fabric: "Fabric") -> "Fabric":
    """Return the fabric launched; refuse a precision that would store weights in fewer bits than they have."""
    if precision_of(fabric) in ("bf16-true", "16-true"):
        raise ValueError(f"precision {precision_of(fabric)} cannot hold sealed weights; use bf16-mixed or 32-true")
    if not fabric._launched:
        fabric.launch()
    return fabric


def precision_of(fabric: "Fabric") -> str:
    """Return the name of the precision that training uses."""
    return str(fabric.strategy.precision.precision)


@contextmanager
def same_bits() -> Iterator[None]:
    """Use only such convolutions of cuDNN's as give the same bits each time."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@contextmanager
def full_precision() -> Iterator[None]:
    """Let a GPU keep all bits of a float32 number, which it does not by default."""
    backends: Any = torch.backends
    if hasattr(backends.cudnn, "conv"):
        switches = [(backends.cudnn.conv, "fp32_precision", "ieee"), (backends.cuda.matmul, "fp32_precision", "ieee")]
    else:  # before torch 2.9
        switches = [(backends.cudnn, "allow_tf32", False), (backends.cuda.matmul, "allow_tf32", False)]
    before = [getattr(owner, name) for owner, name, _ in switches]
    for owner, name, value in switches:
        setattr(owner, name, value)
    try:
        with same_bits():
            yield
    finally:
        for (owner, name, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


def agree_on_buffers(model: nn.Module, fabric: "Fabric") -> None:
    """Make running statistics equal on all ranks: each has seen other images since the last step."""
    if fabric.world_size == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.as_tensor(fabric.all_reduce(buffer.clone(), reduce_op="mean")))
        else:
            buffer.copy_(fabric.broadcast(buffer.clone(), src=0))


def agreed(tensors: dict[str, Tensor], fabric: "Fabric") -> dict[str, Tensor]:
    """Return what rank 0 has, on the device of each rank; they travel by the CPU, as a pickle knows its device."""
    if fabric.world_size == 1:
        return tensors
    found = fabric.broadcast({name: value.cpu() for name, value in tensors.items()})
    return {name: value.to(fabric.device) for name, value in found.items()}


def gathered(rows: Tensor, fabric: "Fabric") -> Tensor:
    """Return the rows of all ranks, one after the other; each may have another number of them."""
    numbers = torch.as_tensor(fabric.all_gather(torch.tensor(len(rows), device=rows.device))).tolist()
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    every = torch.as_tensor(fabric.all_gather(padded))
    return torch.cat([part[:number] for part, number in zip(every, numbers, strict=True)])


def _lightning_fabric() -> Any:
    try:
        import lightning_fabric
        import lightning_fabric.plugins.environments

        return lightning_fabric
    except ModuleNotFoundError:  # the `lightning` distribution has the same in another place
        import lightning.fabric  # pyright: ignore[reportMissingImports]
        import lightning.fabric.plugins.environments  # pyright: ignore[reportMissingImports]

        return lightning.fabric
