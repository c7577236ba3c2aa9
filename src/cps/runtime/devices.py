"""Devices: where work runs, through lightning-fabric: one CPU, one GPU, or many processes on many machines."""

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_fabric import Fabric

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")  # others cannot hold sealed weights, or those of a head


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
    with _quietly(lightning):
        fabric = lightning.Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            precision=precision or ("bf16-mixed" if _is_cuda(accelerator) else "32-true"),
            strategy="ddp_find_unused_parameters_true" if several else "auto",
            plugins=None if several else alone,
        )
        return ready(fabric)


@contextmanager
def _quietly(lightning: Any) -> Iterator[None]:
    """Keep to ourselves what lightning tells of every device: its advice is about settings that cps makes itself."""
    logger = logging.getLogger(f"{lightning.__name__}.utilities.rank_zero")

    def is_grave(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    logger.addFilter(is_grave)
    try:
        yield
    finally:
        logger.removeFilter(is_grave)


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
        raise ValueError(f"precision '{precision}' cannot be used; there are: {', '.join(PRECISIONS)}")


def _is_cuda(accelerator: str) -> bool:
    return accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available())


def ready(fabric: "Fabric") -> "Fabric":
    """Return the fabric launched; refuse a precision that would store weights in other numbers than theirs."""
    if precision_of(fabric) not in PRECISIONS:
        raise ValueError(f"precision {precision_of(fabric)} cannot be used; there are: {', '.join(PRECISIONS)}")
    if not fabric._launched:
        fabric.launch()
        if fabric.world_size > 1:
            atexit.register(_leave_the_others)
    return fabric


def _leave_the_others() -> None:
    """Take leave of the other processes; threads of torch that still wait for them would abort this one at its end."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def precision_of(fabric: "Fabric") -> str:
    """Return the name of the precision that training uses."""
    return str(fabric.strategy.precision.precision)


class _Switches:
    """Switches of the process, held for a while; of several threads that do so at once, the last puts them back."""

    def __init__(self, switches: Sequence[tuple[Any, str, Any]]):
        self._switches = switches
        self._lock, self._holders, self._before = threading.Lock(), 0, []

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if self._holders == 0:
                self._before = [getattr(owner, name) for owner, name, _ in self._switches]
                for owner, name, value in self._switches:
                    setattr(owner, name, value)
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    for (owner, name, _), value in zip(self._switches, self._before, strict=True):
                        setattr(owner, name, value)


_BACKENDS: Any = torch.backends
_SAME_BITS = _Switches([(_BACKENDS.cudnn, "benchmark", False), (_BACKENDS.cudnn, "deterministic", True)])
_FULL_PRECISION = _Switches(
    [(_BACKENDS.cudnn.conv, "fp32_precision", "ieee"), (_BACKENDS.cuda.matmul, "fp32_precision", "ieee")]
    if hasattr(_BACKENDS.cudnn, "conv")
    else [(_BACKENDS.cudnn, "allow_tf32", False), (_BACKENDS.cuda.matmul, "allow_tf32", False)]  # before torch 2.9
)


def deterministic_cudnn() -> AbstractContextManager[None]:
    """Use only such convolutions of cuDNN's as give the same bits each time."""
    return _SAME_BITS.held()


@contextmanager
def full_precision() -> Iterator[None]:
    """Let a GPU keep all bits of a float32 number, which it does not by default."""
    with _FULL_PRECISION.held(), deterministic_cudnn():
        yield


def cuda_device(device: torch.device) -> AbstractContextManager[Any]:
    """Let streams, graphs and kernels of ours be of this GPU; each thread has a current one of its own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Keep an autocast of the caller's away, and its cache of weights, which would go on with those before a step."""
    before = torch.is_autocast_enabled(device.type), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device.type, False)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, before[0])
        torch.set_autocast_cache_enabled(before[1])


def average_buffers(model: nn.Module, fabric: "Fabric") -> None:
    """Make running statistics equal on all ranks: each has seen other images since the last step."""
    if fabric.world_size == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.as_tensor(fabric.all_reduce(buffer.clone(), reduce_op="mean")))
        else:
            buffer.copy_(fabric.broadcast(buffer.cpu(), src=0))  # as a pickle knows its device


def as_float64(values: Tensor) -> Tensor:
    """Return values as float64, on the CPU where their device, an Apple GPU, has no such numbers."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def broadcast(tensors: dict[str, Tensor], fabric: "Fabric") -> dict[str, Tensor]:
    """Return what rank 0 has, on the device of each rank; they travel by the CPU, as a pickle knows its device."""
    if fabric.world_size == 1:
        return tensors
    found = fabric.broadcast({name: value.cpu() for name, value in tensors.items()})
    return {name: value.to(fabric.device) for name, value in found.items()}


def on_rank_zero(fabric: "Fabric", do: Callable[[], None]) -> None:
    """Let rank 0 do something for all, who wait; if it fails, all fail."""
    failure: Exception | None = None
    if fabric.is_global_zero:
        try:
            do()
        except Exception as error:
            failure = error
    if fabric.broadcast(failure is not None):
        raise failure or RuntimeError("rank 0 has failed; it says why")
    fabric.barrier()


def gather_rows(rows: Tensor, fabric: "Fabric") -> Tensor:
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
