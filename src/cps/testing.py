"""Checks that every pruner and selector must pass, including your own: call them from your tests."""

import torch
from torch import Tensor, nn

from cps.network.backbones import SmallConvNet
from cps.network.masks import Masks, full_masks, is_subset
from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Subnetwork
from cps.pruning.base import Pruner
from cps.selection.base import GraphSelector, LazySelector, Selector
from cps.selection.groups import consecutive_groups


def check_pruner(pruner: Pruner) -> None:
    """Raise `AssertionError` if a pruner breaks a rule that the learner relies on."""
    for backbone, batches in _networks():
        masks = full_masks({n: p for n, p in backbone.named_parameters() if p.ndim > 1}, on=True)
        before = {name: value.clone() for name, value in backbone.state_dict().items()}
        first = pruner(backbone, dict(masks), batches)
        _require(isinstance(first, dict), f"a pruner must return masks by name, got {type(first).__name__}")
        _require(set(first) == set(masks), "a pruner must return a mask for every weight it was given")
        for name, mask in first.items():
            is_valid = mask.shape == masks[name].shape and mask.dtype == torch.bool
            _require(is_valid, f"the mask of '{name}' must be a bool tensor of shape {tuple(masks[name].shape)}")
        _require(is_subset(first, masks), "a pruner must only switch connections off")
        _require(any(bool(mask.any()) for mask in first.values()), "a pruner must keep at least one connection")
        _require(_are_equal(before, backbone.state_dict()), "a pruner must not change the backbone")
        _require(all(bool(mask.all()) for mask in masks.values()), "a pruner must not change the masks it is given")
        again = pruner(backbone, dict(masks), batches)
        _require(_are_equal(first, again), "a pruner must return the same masks for the same network and images")
        _apply_masks(backbone, first)
        second = pruner(backbone, dict(first), batches)
        _require(is_subset(second, first), "a second round must not switch connections on again")


def check_selector(selector: Selector) -> None:
    """Raise `AssertionError` if a selector breaks a rule that the learner relies on."""
    generator = torch.Generator().manual_seed(0)
    subnetworks = [_subnetwork(classes, generator) for classes in (2, 3, 2)]
    statistics = []
    for task, subnetwork in enumerate(subnetworks):
        evidence = _evidence(subnetworks[: task + 1], generator, images=40)
        kept = selector.observe(subnetwork, evidence, torch.arange(40) % len(subnetwork.classes), statistics)
        _require(
            all(isinstance(key, str) and isinstance(value, Tensor) for key, value in kept.items()),
            "`observe` must return a dict of tensors by name",
        )
        kept = {key: value.float() for key, value in kept.items()}  # as the learner and a model file do
        largest = max((value.numel() for value in kept.values()), default=0)
        _require(
            largest < 40 * 8 * (task + 1),
            "`observe` must return statistics of a task, not its images or their features",
        )
        statistics.append(kept)
    evidence = _evidence(subnetworks, generator, images=7)
    for size, groups in ((1, 7), (3, 3), (10, 1)):
        scores = selector(evidence, statistics, consecutive_groups(7, size))
        _require(tuple(scores.shape) == (groups, 3), f"scores must have shape (groups, tasks), got {scores.shape}")
        _require(bool(torch.isfinite(scores).all()), "scores must be finite")
        again = selector(evidence, statistics, consecutive_groups(7, size))
        _require(torch.equal(scores, again), "the same evidence must give the same scores")
    singles = selector(evidence, statistics, torch.arange(7))  # scores of groups of one image
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    shuffled = Evidence.of(
        [Outputs(*(part[order] for part in outputs)) for outputs in evidence],
        lambda space: evidence.features(space)[order],
    )
    are_same = torch.allclose(selector(shuffled, statistics, torch.arange(7)), singles[order], atol=1e-5)
    _require(are_same, "the score of a group must not depend on other groups or on the order of groups")
    if isinstance(selector, GraphSelector):
        exported = selector.score_images(evidence, selector.precompute(statistics))
        needed = selector.needed(evidence, statistics, torch.arange(7)) if isinstance(selector, LazySelector) else None
        ran = torch.ones_like(exported, dtype=torch.bool) if needed is None else needed
        are_close = torch.allclose(exported[ran], singles[ran], rtol=1e-3, atol=1e-4)
        _require(are_close, "`score_images` must return the scores of a call with groups of one")
    fewer = selector(evidence.first(2), statistics[:2], torch.arange(7))
    _require(tuple(fewer.shape) == (7, 2), "a selector must accept the evidence and statistics of the first tasks only")


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise AssertionError(rule)


def _networks() -> list[tuple[nn.Module, list[Tensor]]]:
    """Return small networks with batches of images for them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the CPU only: `fork_rng` restores no GPU here
        conv = SmallConvNet(channels=2, widths=(4, 6))
        dense = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6))
        return [(conv.eval(), [torch.randn(8, 2, 6, 6)]), (dense.eval(), [torch.randn(8, 5), torch.randn(4, 5)])]


def _subnetwork(classes: int, generator: torch.Generator) -> Subnetwork:
    head = {
        "weight": torch.randn(classes, 8, generator=generator),
        "bias": torch.randn(classes, generator=generator),
    }
    return Subnetwork(tuple(range(classes)), {}, {}, head)


def _evidence(subnetworks: list[Subnetwork], generator: torch.Generator, *, images: int) -> Evidence:
    outputs = []
    for subnetwork in subnetworks:
        features = torch.randn(images, 8, generator=generator)
        logits = features @ subnetwork.head["weight"].T + subnetwork.head["bias"]
        outputs.append(Outputs(features, logits))
    shared = torch.randn(images, 6, generator=generator)
    return Evidence.of(outputs, lambda space: shared)


def _are_equal(first: dict[str, Tensor] | Masks, second: dict[str, Tensor] | Masks) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def _apply_masks(backbone: nn.Module, masks: Masks) -> None:
    for name, parameter in backbone.named_parameters():
        if name in masks:
            parameter.masked_fill_(~masks[name], 0.0)
