"""Run on one CPU, one GPU or many processes, through lightning-fabric; and the precision of what runs there."""

import atexit
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from cps.runtime.process_state import DETERMINISTIC_CUDNN, EXACT, FULL_PRECISION

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps")
PHOTO_SIDE = 64  # pixels of the shorter side, from which a CPU computes in bfloat16
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")  # the others would change the type of sealed weights and heads


def make_fabric(
    *,
    accelerator: str = "auto",
    devices: int = 1,
    precision: Any = None,
    nodes: int = 1,
) -> "Fabric":
    """Return a launched Fabric with one process per device.

    The default `precision` is bf16-mixed on a CUDA GPU and on a CPU that is fast in it, and 32-true elsewhere.
    """
    _check_options(accelerator, precision)
    precision = precision or _default_precision(accelerator)
    is_distributed = devices * nodes > 1
    if not is_distributed and _is_cpu(accelerator):
        return cast(Any, LazyFabric(precision))
    return _launched_fabric(accelerator, devices, precision, nodes)


def _launched_fabric(accelerator: str, devices: int, precision: Any, nodes: int) -> "Fabric":
    lightning = _lightning_fabric()
    is_distributed = devices * nodes > 1
    # A single process needs no cluster. Lightning's search for one starts MPI where it is installed, which takes 10 s.
    single_process = lightning.plugins.environments.LightningEnvironment()
    with _silence_info(lightning):
        fabric = lightning.Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            precision=precision,
            strategy="ddp_find_unused_parameters_true" if is_distributed else "auto",
            plugins=None if is_distributed else single_process,
        )
        return launch(fabric)


@contextmanager
def _silence_info(lightning: Any) -> Iterator[None]:
    """Hide lightning's info messages about the device: they advise on settings that cps makes itself."""
    logger = logging.getLogger(f"{lightning.__name__}.utilities.rank_zero")

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    logger.addFilter(is_warning)
    try:
        yield
    finally:
        logger.removeFilter(is_warning)


def _check_options(accelerator: str, precision: Any) -> None:
    """Raise `ValueError` for an accelerator or a precision that cannot be used here."""
    if accelerator not in ACCELERATORS:
        raise ValueError(f"unknown accelerator '{accelerator}'; choose from: {', '.join(ACCELERATORS)}")
    if accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
        raise ValueError(f"accelerator '{accelerator}' needs a GPU, but torch finds none; use accelerator 'cpu'")
    if accelerator == "mps" and not torch.backends.mps.is_available():
        raise ValueError("accelerator 'mps' needs an Apple GPU, but torch finds none; use accelerator 'cpu'")
    if precision == "16-mixed" and not (_is_cuda(accelerator) or accelerator == "mps"):
        raise ValueError("precision '16-mixed' needs a GPU; use 'bf16-mixed' or '32-true'")
    if isinstance(precision, str):
        _check_precision(precision)


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"unsupported precision '{precision}'; choose from: {', '.join(PRECISIONS)}")


def _is_cuda(accelerator: str) -> bool:
    return accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available())


def _is_cpu(accelerator: str) -> bool:
    has_mps = torch.backends.mps.is_available()
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available() and not has_mps)


def _default_precision(accelerator: str) -> str:
    is_fast = _is_cuda(accelerator) or (_is_cpu(accelerator) and has_fast_bfloat16())
    return "bf16-mixed" if is_fast else "32-true"


class LazyFabric:
    """A fabric for one process on the CPU that imports lightning, which takes longer than torch, when it must train."""

    device, world_size, global_rank, is_global_zero, _launched = torch.device("cpu"), 1, 0, True, True

    def __init__(self, precision: Any):
        self.precision = precision

    @cached_property
    def _fabric(self) -> "Fabric":
        return _launched_fabric("cpu", 1, self.precision, 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look for methods that a fabric need not have
            raise AttributeError(name)
        return getattr(self._fabric, name)


def launch(fabric: "Fabric") -> "Fabric":
    """Launch a fabric if it is not running yet, and return it.

    Raise `ValueError` if its precision would store weights in another type than theirs.
    """
    _check_precision(precision_of(fabric))
    if not fabric._launched:
        fabric.launch()
        if fabric.world_size > 1:
            atexit.register(_leave_process_group)
    return fabric


def _leave_process_group() -> None:
    """Leave the other processes; torch's threads that still wait for them would abort this process at its exit."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def precision_of(fabric: "Fabric") -> str:
    """Return the name of the precision that training uses."""
    return str(fabric.precision if isinstance(fabric, LazyFabric) else fabric.strategy.precision.precision)


def required_precision(module: nn.Module) -> str | None:
    """Return the only precision that a module can be trained in, or None if there are several."""
    has_float64 = any(parameter.dtype == torch.float64 for parameter in module.parameters())
    return "32-true" if has_float64 else None


def deterministic_cudnn() -> AbstractContextManager[None]:
    """Use only cuDNN convolutions that give the same bits every time."""
    return DETERMINISTIC_CUDNN.applied()


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute in full float32 on a GPU, instead of the shorter TF32 that torch may use."""
    with FULL_PRECISION.applied(), deterministic_cudnn():
        yield


@cache
def has_fast_bfloat16() -> bool:
    """Return True if this CPU has instructions for bfloat16, so that it computes faster in it."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return has_instructions and torch.backends.mkldnn.is_available()


def fast_photos(device: torch.device, shape: Sequence[int]) -> AbstractContextManager[Any]:
    """Return a context in which a CPU that is fast in bfloat16 computes in it, if images of this shape are photos."""
    is_photo = len(shape) == 3 and min(shape[1:]) >= PHOTO_SIDE
    if device.type != "cpu" or not is_photo or torch.compiler.is_compiling() or not has_fast_bfloat16() or EXACT.get():
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def exact_photos() -> Iterator[None]:
    """Compute photos in full precision on every CPU, as an exported graph does."""
    token = EXACT.set(True)
    try:
        yield
    finally:
        EXACT.reset(token)


def cuda_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one, so that our streams, graphs and kernels use it; each thread has its own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disable the caller's autocast, and its cache of cast weights, which would be stale after an optimizer step."""
    before = torch.is_autocast_enabled(device.type), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device.type, False)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, before[0])
        torch.set_autocast_cache_enabled(before[1])


def as_float64(values: Tensor) -> Tensor:
    """Return values as float64; on the CPU if they are on an Apple GPU, which has no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def average_buffers(model: nn.Module, fabric: "Fabric") -> None:
    """Average the running statistics of all ranks in place, since each rank has seen different images."""
    if fabric.world_size == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.as_tensor(fabric.all_reduce(buffer.clone(), reduce_op="mean")))
        else:
            buffer.copy_(fabric.broadcast(buffer.cpu(), src=0))  # a pickled tensor keeps its device, so send from CPU


def broadcast(tensors: dict[str, Tensor], fabric: "Fabric") -> dict[str, Tensor]:
    """Return the tensors of rank 0, on the device of each rank."""
    if fabric.world_size == 1:
        return tensors
    # A pickled tensor keeps its device, so they are sent from the CPU.
    received = fabric.broadcast({name: value.cpu() for name, value in tensors.items()})
    return {name: value.to(fabric.device) for name, value in received.items()}


def on_rank_zero(fabric: "Fabric", do: Callable[[], None]) -> None:
    """Call a function on rank 0 while the other ranks wait; if it raises, all ranks raise."""
    if fabric.world_size == 1:
        do()
        return
    failure: Exception | None = None
    if fabric.is_global_zero:
        try:
            do()
        except Exception as error:
            failure = error
    if fabric.broadcast(failure is not None):
        raise failure or RuntimeError("rank 0 failed; see its error message")
    fabric.barrier()


def gather_rows(rows: Tensor, fabric: "Fabric") -> Tensor:
    """Return the rows of two or more ranks, in the order of the ranks; their numbers of rows may differ."""
    numbers = torch.as_tensor(fabric.all_gather(torch.tensor(len(rows), device=rows.device))).tolist()
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = torch.as_tensor(fabric.all_gather(padded))
    return torch.cat([part[:number] for part, number in zip(gathered, numbers, strict=True)])


def _lightning_fabric() -> Any:
    try:
        import lightning_fabric
        import lightning_fabric.plugins.environments

        return lightning_fabric
    except ModuleNotFoundError:  # the `lightning` distribution has the same package under another name
        import lightning.fabric  # pyright: ignore[reportMissingImports]
        import lightning.fabric.plugins.environments  # pyright: ignore[reportMissingImports]

        return lightning.fabric
