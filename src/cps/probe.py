"""A first look: two images through a backbone, to refuse what could not be learned before training starts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cps.activity import layer_of
from cps.capture import first_line


@torch.no_grad()
def count_features(backbone: nn.Module, names: Sequence[str], pixels: Tensor) -> int:
    """Return how many features the backbone gives; raise `ValueError` if it cannot be used on such images.

    Every shared layer must run: a weight that no signal reaches cannot be scored for pruning.
    """
    ran: set[str] = set()
    handles = [layer_of(backbone, name).register_forward_hook(lambda *_, name=name: ran.add(name)) for name in names]
    backbone.eval()
    try:
        features, again = backbone(pixels.clone()), backbone(pixels.clone())
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"the backbone cannot process images of shape {tuple(pixels.shape[1:])}: {first_line(error)}{_hint(pixels)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    idle = [name for name in names if name not in ran]
    if idle:
        layer = idle[0].removesuffix("weight").removesuffix(".")
        raise ValueError(f"layer '{layer}' did not run when an image passed the backbone; remove it")
    if not isinstance(features, Tensor):
        raise ValueError(f"the backbone must return one tensor of features, got {type(features).__name__}")
    if features.ndim != 2 or len(features) != len(pixels):
        raise ValueError(
            f"the backbone must return features of shape (N, d), got {tuple(features.shape)} for "
            f"{len(pixels)} images; end it with a pooling and a flattening layer"
        )
    if not torch.isfinite(features).all():
        raise ValueError("the backbone returns NaN or infinite features; its weights may be damaged")
    if not torch.equal(features, again):
        raise ValueError(
            "the backbone gives the same images other features each time, in eval mode too; a dropout that stays on or "
            "a state outside its buffers would make it forget"
        )
    return features.shape[1]


def _hint(pixels: Tensor) -> str:
    if pixels.ndim == 4 and pixels.shape[-1] in (1, 3) and pixels.shape[1] not in (1, 3):
        return " (the images look channels-last; images.permute(0, 3, 1, 2) makes them channels-first)"
    return ""
