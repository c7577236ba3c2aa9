"""A draft: the subnetwork of the task being learned, before it is sealed.

The draft trains inside the backbone itself, whose parameters hold the masked weights and the task's private
parameters. The shared network does not change until the draft is sealed, so abandoning a draft loses nothing.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cps.data.examples import ClassName
from cps.network.classifier import Classifier
from cps.network.freezing import Guard, Protected
from cps.network.mask_scores import SCORE_RANGE, initial_scores
from cps.network.masks import Masks, check_pruned, masks_like, pack, unpack
from cps.network.partition import Parts, named_tensors, set_tensors


class Draft:
    """An unfinished subnetwork: its masks shrink and its free weights are trained.

    Attributes: `classes`; `flips`, whether predictions will average over mirror images; `model`, the live classifier;
    `masks`, the connections that are on; `dense_weights`, the weights after dense training, to which pruned free
    weights return; `scores`, the mask scores if the task learns which sealed connections to use.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Linear,
        parts: Parts,
        *,
        classes: Sequence[ClassName],
        flips: bool,
        weights: Mapping[str, Tensor],
        taken: Masks,
        private: Mapping[str, Tensor],
        learns_masks: bool = False,
    ):
        self.classes, self.flips = tuple(classes), flips
        self.model = Classifier(backbone, head)
        self.masks = masks_like(taken, on=True)
        self.scores = initial_scores(self.masks) if learns_masks else {}
        self.dense_weights: dict[str, Tensor] | None = None
        self._parts = parts
        self._sealed, self._initial = weights, private
        self._taken = taken
        set_tensors(backbone, {**weights, **private})

    def weights(self) -> dict[str, Tensor]:
        """Return the live shared weights, zero where the masks are off."""
        live = named_tensors(self.model.backbone)
        return {name: live[name].detach() for name in self._parts.shared}

    def private(self) -> dict[str, Tensor]:
        """Return the live private tensors: norm layers, biases and everything else that is not shared."""
        live = named_tensors(self.model.backbone)
        return {name: live[name].detach() for name in self._parts.private}

    def set_private(self, values: Mapping[str, Tensor]) -> None:
        """Replace the private tensors, for instance by those of a sealed subnetwork."""
        set_tensors(self.model.backbone, {**self.weights(), **values})

    @torch.no_grad()
    def prune(self, masks: Masks) -> None:
        """Switch off the connections that are not in `masks`; masks can only shrink."""
        self.masks = {name: mask.clone() for name, mask in check_pruned(masks, self.masks).items()}
        for name, weight in self.weights().items():
            weight.masked_fill_(~self.masks[name], 0.0)

    def end_dense_training(self) -> None:
        """Record the dense weights, and switch off the sealed connections whose scores are not positive."""
        self.dense_weights = {name: weight.clone() for name, weight in self.weights().items()}
        if self.scores:
            chosen = {name: (scores > 0) | ~self._taken[name] for name, scores in self.scores.items()}
            self.prune({name: mask & chosen[name] for name, mask in self.masks.items()})

    @property
    def score_range(self) -> float:
        """How far the next phase of training may move the mask scores: only dense training moves them."""
        return SCORE_RANGE if self.dense_weights is None else 0.0

    def check_finite(self) -> None:
        """Raise `FloatingPointError` if training left NaN or infinity, which its last step may after a finite loss.

        Values that were infinite from the start, such as constants, are accepted.
        """
        start = {**self._sealed, **self._initial}
        live = {**self.weights(), **self.private()}
        broken = [name for name, value in live.items() if (start[name].isfinite() & ~value.isfinite()).any()]
        broken += [f"head.{name}" for name, value in self.model.head.named_parameters() if not value.isfinite().all()]
        if broken:
            raise FloatingPointError(
                f"training left '{broken[0]}' with NaN or infinite values; lower the learning rate"
            )

    def guard(self) -> Guard:
        """Return what training must not move: taken weights keep their sealed values, pruned ones stay zero."""
        return {
            name: Protected(self._taken[name], self._sealed[name], ~self.masks[name], self.scores.get(name))
            for name in self._parts.shared
        }

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold."""
        return {
            **named_tensors(self.model),
            **{f"mask/{name}": pack(mask) for name, mask in self.masks.items()},
            **{f"warm/{name}": value for name, value in (self.dense_weights or {}).items()},
            **{f"score/{name}": value for name, value in self.scores.items()},
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint, which also decides whether the draft learns mask scores."""
        set_tensors(self.model, state)
        live = self.weights()
        for name, mask in self.masks.items():
            mask.copy_(unpack(state[f"mask/{name}"], mask.shape))

        def stored(kind: str) -> dict[str, Tensor]:
            return {name: state[key].to(w.device) for name, w in live.items() if (key := f"{kind}/{name}") in state}

        self.scores, self.dense_weights = stored("score"), stored("warm") or None
