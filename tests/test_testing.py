"""`check_pruner` and `check_selector`: our pruners and selectors pass, and faulty ones raise with the reason."""

import pytest
import torch

import cps
from samples import Energy, EveryOther

PRUNERS = [
    cps.NNrelief(0.9),
    cps.NNrelief(1.0),
    cps.NNrelief(0.5),
    cps.Magnitude(0.5),
    cps.Magnitude(1.0),
    EveryOther(),
]
SELECTORS = [
    cps.MaxOutput(),
    cps.ImportanceSignature(2),
    cps.ImportanceSignature(1),
    cps.Oracle(1),
    Energy(),
    cps.Cascade(),
]


@pytest.mark.parametrize("pruner", PRUNERS, ids=str)
def test_every_pruner_passes(pruner):
    cps.check_pruner(pruner)


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: s.name)
def test_every_selector_passes(selector):
    cps.check_selector(selector)


def test_a_pruner_that_switches_connections_on_again_fails():
    class SwitchesOn:
        def __call__(self, backbone, masks, batches):
            return {
                n: torch.ones_like(m) if not m.all() else m & (torch.arange(m.numel()).reshape(m.shape) > 0)
                for n, m in masks.items()
            }

    with pytest.raises(AssertionError, match="switch connections on again"):
        cps.check_pruner(SwitchesOn())


def test_a_pruner_that_changes_the_backbone_fails():
    class ChangesBackbone(cps.Magnitude):
        def __call__(self, backbone, masks, batches):
            with torch.no_grad():
                next(backbone.parameters()).add_(1.0)
            return super().__call__(backbone, masks, batches)

    with pytest.raises(AssertionError, match="must not change the backbone"):
        cps.check_pruner(ChangesBackbone())


def test_a_pruner_that_returns_no_masks_fails():
    with pytest.raises(AssertionError, match="must return masks by name, got NoneType"):
        cps.check_pruner(lambda *_: None)


def test_a_selector_that_keeps_features_fails():
    class KeepsFeatures(cps.MaxOutput):
        def observe(self, subnetwork, evidence, labels, earlier):
            return {"all": evidence[-1].features}

    with pytest.raises(AssertionError, match="not its images"):
        cps.check_selector(KeepsFeatures())


def test_a_selector_that_mixes_groups_fails():
    class MixesGroups(cps.MaxOutput):
        def __call__(self, evidence, statistics, groups):
            return super().__call__(evidence, statistics, groups).cumsum(dim=0)

    with pytest.raises(AssertionError, match="other groups"):
        cps.check_selector(MixesGroups())


def test_a_selector_whose_score_images_disagrees_fails():
    class Negated(cps.MaxOutput):
        def __call__(self, evidence, statistics, groups):
            return -super().__call__(evidence, statistics, groups)

    with pytest.raises(AssertionError, match="`score_images` must return the scores"):
        cps.check_selector(Negated())
