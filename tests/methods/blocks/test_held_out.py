"""Images that are held out of training."""

import torch

from cps.data.examples import TensorExamples
from cps.methods.blocks.held_out import hold_out


def test_a_share_of_each_class_is_held_out_and_each_class_is_in_both_parts():
    labels = torch.tensor([0] * 10 + [1] * 2 + [2])
    examples = TensorExamples(torch.arange(13.0)[:, None], labels)
    kept, held = hold_out(examples, 0.3, torch.Generator().manual_seed(0))
    assert torch.bincount(held.labels()).tolist() == [3, 1, 1]
    assert torch.bincount(kept.labels()).tolist() == [7, 1, 1]
    both = sorted([*kept.images[:, 0].tolist(), *held.images[:, 0].tolist()])
    assert both == [*map(float, range(13)), 12.0]  # the single image of the last class is in both
