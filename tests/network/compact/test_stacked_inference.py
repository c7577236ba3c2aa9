"""Stacked subnetworks give the outputs of each alone, and run one by one where stacking is not possible."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import cps
from cps.network.compact import stacked_inference
from cps.network.compact.cache import CompactSubnetwork
from cps.network.compact.fx_tracing import trace_module
from cps.network.compact.stacked_inference import FEWEST_NETWORKS, MOST_IMAGES, StackedInference
from cps.network.subnetwork import Subnetwork
from samples import ACCELERATOR, make_task

pytestmark = pytest.mark.skipif(ACCELERATOR != "cpu", reason="networks are stacked on a CPU only")
SIZES = [(2 + index % 5, 3 + index % 3, 1 + index % 4) for index in range(12)]  # channels, channels, images


class DepthwiseNet(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, first, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(first, first, 3, padding=1, groups=first),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.Conv2d(first, second, 1),
        )
        self.last = nn.Conv2d(second, 5, 3, stride=2)

    def forward(self, images):
        return self.last(self.layers(images) + 1).mean(dim=(2, 3))


class NetOfOneImage(nn.Module):
    """A network that looks at a value of its input, which a stack cannot."""

    def __init__(self, channels):
        super().__init__()
        self.layer = nn.Conv2d(2, channels, 3)

    def forward(self, images):
        return self.layer(images).mean(dim=(2, 3)) * images.max().item()


def make_branch(network, *, features=5, classes=2, rotations=1, flips=False):
    head = {"weight": torch.randn(classes * rotations, features), "bias": torch.randn(classes * rotations)}
    subnetwork = Subnetwork(tuple(range(classes)), {}, {}, head, flips=flips)
    return CompactSubnetwork(trace_module(network.eval()), subnetwork, nullcontext)


def make_branches(**settings):
    torch.manual_seed(0)
    return {
        10 * index: make_branch(DepthwiseNet(first, second), classes=2 + index % 2, **settings)
        for index, (first, second, _) in enumerate(SIZES)
    }


def draw_pixels(branches):
    return {task: torch.randn(images, 2, 6, 6) for task, (*_, images) in zip(branches, SIZES, strict=True)}


def make_stack():
    return StackedInference(lambda: torch.randn(2, 2, 6, 6))


def alone(branch, pixels):
    return branch.outputs(branch.view_features(pixels))


def assert_same(found, branches, pixels):
    for task, outputs in found.items():
        for part, expected in zip(outputs, alone(branches[task], pixels[task]), strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)


def test_stacked_branches_of_several_widths_give_the_outputs_of_each_alone():
    branches = make_branches()
    pixels, stack = draw_pixels(branches), make_stack()
    for _ in range(2):  # the second time with weights that were kept
        found = stack.outputs(branches, pixels)
        assert set(found) == set(branches)
        assert_same(found, branches, pixels)
    assert not torch.allclose(found[0].logits, found[60].logits)  # images and weights belong to the task


def test_rotated_and_flipped_views_are_averaged():
    branches = make_branches(rotations=4, flips=True)
    pixels = {task: torch.randn(1, 2, 6, 6) for task in branches}
    stack = make_stack()
    assert stack.outputs(branches, pixels) == {}  # eight views are more than the images of a stack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked_inference, "MOST_IMAGES", 8)
        found = stack.outputs(branches, pixels)
    assert set(found) == set(branches)
    assert_same(found, branches, pixels)


def test_wider_branches_widen_the_stack():
    branches = make_branches()
    pixels, stack = draw_pixels(branches), make_stack()
    stack.outputs(branches, pixels)
    wide = make_branch(DepthwiseNet(9, 11), classes=4)
    assert stack.outputs({task: branches[task] for task in list(branches)[:8]} | {5: wide}, pixels | {5: pixels[0]})
    branches, pixels = branches | {5: wide}, pixels | {5: torch.randn(2, 2, 6, 6)}
    assert_same(stack.outputs(branches, pixels), branches, pixels)


def test_few_branches_many_images_large_and_other_networks_are_left_to_run_alone(monkeypatch):
    branches = make_branches()
    pixels, stack = draw_pixels(branches), make_stack()
    assert stack.outputs({task: branches[task] for task in list(branches)[: FEWEST_NETWORKS - 1]}, pixels) == {}
    pixels[0] = torch.randn(MOST_IMAGES + 1, 2, 6, 6)
    assert set(stack.outputs(branches, pixels)) == set(branches) - {0}
    branches[10] = make_branch(NetOfOneImage(5))
    assert set(stack.outputs(branches, pixels)) >= set(branches) - {0, 10}
    assert 7 not in stack.outputs(branches | {7: branches[10]}, pixels | {7: pixels[10]})
    monkeypatch.setattr(stacked_inference, "MOST_PARAMETERS", 1)
    assert make_stack().outputs(branches, pixels) == {}


def test_networks_that_cannot_be_stacked_run_alone(caplog):
    caplog.set_level("INFO")
    branches = {task: make_branch(NetOfOneImage(5)) for task in range(9)}
    pixels = {task: torch.randn(1, 2, 6, 6) for task in branches}
    stack = make_stack()
    assert stack.outputs(branches, pixels) == {}
    assert "small networks run one by one" in caplog.text
    assert stack.outputs(branches, pixels) == {}


def test_a_stack_that_changes_outputs_is_not_used(caplog, monkeypatch):
    caplog.set_level("INFO")
    branches = make_branches()
    run = StackedInference._run
    change = {0: lambda outputs: outputs._replace(logits=outputs.logits + 0.1)}
    monkeypatch.setattr(
        StackedInference,
        "_run",
        lambda *given: {task: change.get(task, lambda same: same)(each) for task, each in run(*given).items()},
    )
    assert make_stack().outputs(branches, draw_pixels(branches)) == {}
    assert "they compute other outputs" in caplog.text


def test_padded_weights_are_kept_for_the_last_branches_only(monkeypatch):
    branches = make_branches()
    pixels, stack = draw_pixels(branches), make_stack()
    stack.outputs(branches, pixels)
    assert len(stack._padded) == len(branches)
    size = sum(value.numel() for value in stack._padded[0].values())
    monkeypatch.setattr(stacked_inference, "KEPT_NUMBERS", 5 * size)
    stack = make_stack()
    assert_same(stack.outputs(branches, pixels), branches, pixels)
    assert len(stack._padded) == 5


def test_images_of_many_tasks_get_the_same_classes_together_as_alone(make_learner):
    learner = make_learner(selectors=(cps.Fusion(cps.SharedSpace(cps.RandomReLU(20)), cascade_tasks=1),))
    firsts = range(0, 20, 2)
    for first in firsts:
        learner.learn(make_task(first))
    images = torch.cat([make_task(first).test[0][:2] for first in firsts])
    together = learner.predict(images)
    assert learner.network._compact._stacked._padded  # that they were stacked
    one_by_one = [learner.predict(image[None]) for image in images]
    assert together.classes == [each.classes[0] for each in one_by_one]
    torch.testing.assert_close(together.confidence, torch.cat([each.confidence for each in one_by_one]))
    known = learner.predict(images[:1], task=0)
    learner.predict(images)
    assert torch.equal(known.confidence, learner.predict(images[:1], task=0).confidence)
