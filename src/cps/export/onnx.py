"""Write a module as an ONNX graph and compare it with torch."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from cps.runtime.devices import exact_photos
from cps.runtime.extras import install_command, is_installed
from cps.runtime.text import first_line
from cps.storage.atomic import atomic_write

TOLERANCE = 1e-3  # of the largest output: onnxruntime and torch may differ by this much


def write_onnx(
    module: nn.Module, path: Path, images: Tensor, *, output_names: Sequence[str], metadata: dict[str, str]
) -> float | None:
    """Write a module as an ONNX graph with any batch size.

    Return the largest difference between onnxruntime and torch on `images`, or None if onnxruntime is not installed.
    The file is put in place only after this check; RuntimeError is raised if they differ by more than rounding. The
    module is moved to the CPU.
    """
    if path.suffix != ".onnx":
        raise ValueError(f"the file must end in .onnx, or in .safetensors for one task, got '{path.name}'")
    if not (is_installed("onnxscript") and is_installed("onnx")):
        raise RuntimeError(f"ONNX export needs more packages: {install_command('export')}")
    module = module.cpu().eval()
    with atomic_write(path) as partial:
        _save_graph(module, images, output_names, metadata, partial)
        return _compare_with_torch(partial, module, images)


def _save_graph(
    module: nn.Module, images: Tensor, output_names: Sequence[str], metadata: dict[str, str], path: Path
) -> None:
    with warnings.catch_warnings(), _only_errors_logged("torch", "torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")  # torch's exporter uses deprecated parts of torch
        try:
            program = torch.onnx.export(
                module, (images,), dynamo=True, verbose=False, input_names=["images"], output_names=output_names,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )  # fmt: skip
        except Exception as error:  # a module's forward may raise anything
            raise RuntimeError(
                f"the backbone cannot be exported as a graph, for example because its forward depends on tensor values "
                f"({first_line(error.__cause__ or error)}); export the tasks one by one to .safetensors"
            ) from error
    assert program is not None
    shape = program.model.graph.inputs[0].shape
    if shape is not None and isinstance(shape[0], int):
        raise RuntimeError("the backbone fixes the batch size; in its forward use x.shape[0] instead of len(x)")
    program.model.metadata_props.update(metadata)
    program.save(path, external_data=False)


def _compare_with_torch(path: Path, module: nn.Module, images: Tensor) -> float | None:
    """Return the largest difference between onnxruntime and torch, for one image and for several."""
    if not is_installed("onnxruntime"):
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    largest = 0.0
    for batch in (images, images[:1]):
        found = [torch.from_numpy(value) for value in session.run(None, {"images": batch.numpy()})]
        with torch.no_grad(), exact_photos():
            expected = module(batch)
        for theirs, ours in zip(found, [expected] if isinstance(expected, Tensor) else expected, strict=True):
            difference = float((theirs.double() - ours.double()).abs().max())
            if not difference <= TOLERANCE * max(1.0, float(ours.double().abs().max())):
                raise RuntimeError(
                    f"onnxruntime and torch compute different outputs (by {difference:.3g}); the file was not written"
                )
            largest = max(largest, difference)
    return largest


@contextmanager
def _only_errors_logged(*names: str) -> Iterator[None]:
    """Let loggers of other libraries log errors only."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
