"""Write a subnetwork as a plain state dict."""

import json
import logging
from pathlib import Path

from safetensors.torch import save_file
from torch import fx

from cps.network.compact.extraction import Standalone
from cps.storage.atomic import atomic_write

log = logging.getLogger(__name__)


def write_state_dict(module: Standalone, path: Path, metadata: dict[str, str]) -> None:
    """Write a subnetwork's tensors as safetensors; `metadata` is extended by what is needed to rebuild the module.

    These are the views taken of an image (`looks`), the layers by name, and the code of the forward pass. The module is
    moved to the CPU.
    """
    tensors = {name: value.contiguous() for name, value in module.cpu().state_dict().items()}
    with atomic_write(path) as partial:
        save_file(tensors, partial, metadata | _describe_architecture(module))


def _describe_architecture(module: Standalone) -> dict[str, str]:
    layers = {name: repr(layer) for name, layer in module.named_modules() if next(layer.children(), None) is None}
    code = module.backbone.code if isinstance(module.backbone, fx.GraphModule) else ""
    if not code:
        log.warning("the backbone cannot be traced: the file holds the layers of your module and no forward code")
    return {
        "format": "pt",
        "looks": json.dumps(module.views),
        "layers": json.dumps(layers),
        "forward": str(code).strip(),
    }
