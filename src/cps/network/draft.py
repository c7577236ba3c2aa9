"""A draft: the subnetwork of the task being learned, before it is sealed.

The draft trains inside the backbone itself: its parameters hold the masked weights and the task's private
parts. Nothing of the shared network changes until the draft is sealed, so giving up on it loses nothing.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cps.data.examples import ClassName
from cps.network.classifier import Classifier
from cps.network.freezing import Guard, Kept
from cps.network.mask_scores import REACH, first_scores
from cps.network.masks import Masks, check_pruned, full_masks, pack, unpack
from cps.network.partition import Parts, named_tensors, set_tensors


class Draft:
    """A subnetwork in the making: its masks shrink and its free weights move.

    Attributes: `classes`; `mirrors`, whether mirror images are looked at too; `model`, the live classifier;
    `masks`, the connections that are on; `warm`, the weights after dense training, which pruned free weights go
    back to; `scores`, of all connections where the task learns which sealed ones to use.
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
        is_choosing: bool = False,
    ):
        self.classes, self.flips = tuple(classes), flips
        self.model = Classifier(backbone, head)
        self.masks = full_masks(weights, on=True)
        self.scores = first_scores(self.masks) if is_choosing else {}
        self.warm: dict[str, Tensor] | None = None
        self._parts = parts
        self._sealed, self._start = weights, private
        self._taken = taken
        set_tensors(backbone, {**weights, **private})

    def weights(self) -> dict[str, Tensor]:
        """Return the live shared weights, zero where the masks are off."""
        live = named_tensors(self.model.backbone)
        return {name: live[name].detach() for name in self._parts.shared}

    def private(self) -> dict[str, Tensor]:
        """Return the live private parts: norm layers, biases, whatever is not shared."""
        live = named_tensors(self.model.backbone)
        return {name: live[name].detach() for name in self._parts.private}

    @torch.no_grad()
    def narrow(self, masks: Masks) -> None:
        """Switch off the connections that are not in `masks`; masks only ever shrink."""
        self.masks = {name: mask.clone() for name, mask in check_pruned(masks, self.masks).items()}
        for name, weight in self.weights().items():
            weight.masked_fill_(~self.masks[name], 0.0)

    def end_dense_training(self) -> None:
        """Remember the weights, for the connections that pruning will free; sealed ones not chosen go off."""
        self.warm = {name: weight.clone() for name, weight in self.weights().items()}
        if self.scores:
            chosen = {name: (scores > 0) | ~self._taken[name] for name, scores in self.scores.items()}
            self.narrow({name: mask & chosen[name] for name, mask in self.masks.items()})

    @property
    def reach(self) -> float:
        """How far a phase may move the scores: as far as they go in dense training, then no more."""
        return REACH if self.warm is None else 0.0

    def check_finite(self) -> None:
        """Refuse what training has ruined, as its last step may after a sound loss; constants may be infinite."""
        start = {**self._sealed, **self._start}
        live = {**self.weights(), **self.private()}
        ruined = [name for name, value in live.items() if (start[name].isfinite() & ~value.isfinite()).any()]
        ruined += [f"head.{name}" for name, value in self.model.head.named_parameters() if not value.isfinite().all()]
        if ruined:
            raise FloatingPointError(
                f"training left '{ruined[0]}' with NaN or infinite values; lower the learning rate"
            )

    def guard(self) -> Guard:
        """Return what may not move: taken weights stay at their sealed values, pruned ones at zero."""
        return {
            name: Kept(self._taken[name], self._sealed[name], ~self.masks[name], self.scores.get(name))
            for name in self._parts.shared
        }

    def state(self) -> dict[str, Tensor]:
        """Return all that a checkpoint must hold of a draft."""
        return {
            **named_tensors(self.model),
            **{f"mask/{name}": pack(mask) for name, mask in self.masks.items()},
            **{f"warm/{name}": value for name, value in (self.warm or {}).items()},
            **{f"score/{name}": value for name, value in self.scores.items()},
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up a draft where `state` left it, which also says whether it chooses among sealed weights."""
        set_tensors(self.model, state)
        live = self.weights()
        for name, mask in self.masks.items():
            mask.copy_(unpack(state[f"mask/{name}"], mask.shape))

        def held(kind: str) -> dict[str, Tensor]:
            return {name: state[key].to(w.device) for name, w in live.items() if (key := f"{kind}/{name}") in state}

        self.scores, self.warm = held("score"), held("warm") or None
