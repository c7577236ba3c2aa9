"""Write a subnetwork as a plain state dict."""

import json
import logging
from pathlib import Path

from safetensors.torch import save_file
from torch import fx, nn

from cps.network.compact.extraction import Standalone
from cps.storage.atomic import atomic_write

log = logging.getLogger(__name__)


def write_state_dict(module: Standalone, path: Path, metadata: dict[str, str]) -> None:
    """Write a subnetwork's tensors as safetensors; `metadata` is extended by what is needed to rebuild the module.

    These are the views taken of an image (`looks`), the layers by name, and the code of the forward pass: of the
    backbone and, behind a trunk, that of the trunk and of the pretrained layers whose features the head also reads. The
    module is moved to the CPU.
    """
    tensors = {name: value.contiguous() for name, value in module.cpu().state_dict().items()}
    with atomic_write(path) as partial:
        save_file(tensors, partial, metadata | _describe_architecture(module))


def _describe_architecture(module: Standalone) -> dict[str, str]:
    layers = {name: repr(layer) for name, layer in module.named_modules() if next(layer.children(), None) is None}
    codes = {"forward": _code(module.backbone)}
    for name in ("trunk", "pretrained"):
        part = getattr(module, name)
        if part is not None and not isinstance(part, nn.Identity):
            codes[f"{name} forward"] = _code(part)
    if not all(codes.values()):
        log.warning("the backbone cannot be traced: the file holds the layers of your module and no forward code")
    return {"format": "pt", "looks": json.dumps(module.views), "layers": json.dumps(layers), **codes}


def _code(part: nn.Module) -> str:
    """Return the code of the forward pass of a traced module, or of the one in it whose features are normalised."""
    traced = part if isinstance(part, fx.GraphModule) else getattr(part, "backbone", part)
    return str(traced.code).strip() if isinstance(traced, fx.GraphModule) else ""
