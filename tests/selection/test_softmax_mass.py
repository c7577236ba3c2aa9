"""The selector of heads that are trained for all classes together."""

import pytest
import torch

import cps
from cps.network.outputs import Evidence, Outputs
from cps.selection.softmax_mass import SoftmaxMass


def scores_of(*logits, groups):
    features = torch.zeros(len(logits[0]), 1)
    evidence = Evidence.of([Outputs(features, torch.tensor(part)) for part in logits])
    return SoftmaxMass()(evidence, [{}, {}], torch.tensor(groups))


def test_it_keeps_the_contract_of_selectors():
    cps.check_selector(SoftmaxMass())


def test_the_score_of_a_task_is_the_log_of_its_part_of_the_softmax():
    scores = scores_of([[2.0, 0.0]], [[1.0, -1.0, 0.5]], groups=[0])
    probabilities = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5]).softmax(dim=0)
    expected = torch.stack([probabilities[:2].sum(), probabilities[2:].sum()]).log()
    torch.testing.assert_close(scores[0], expected)
    assert scores.exp().sum().item() == pytest.approx(1)


def test_two_probable_classes_outweigh_the_largest_one():
    """For single images the largest logit decides between classes, and this selector between tasks."""
    one, two = [[1.0, -9.0]], [[0.9, 0.9]]
    assert scores_of(one, two, groups=[0]).argmax().item() == 1
    evidence = Evidence.of([Outputs(torch.zeros(1, 1), torch.tensor(part)) for part in (one, two)])
    assert cps.MaxOutput()(evidence, [{}, {}], torch.tensor([0])).argmax().item() == 0


def test_a_group_adds_up_what_its_images_say():
    alone = scores_of([[0.0], [0.0], [5.0]], [[1.0], [1.0], [0.0]], groups=[0, 1, 2])
    together = scores_of([[0.0], [0.0], [5.0]], [[1.0], [1.0], [0.0]], groups=[0, 0, 0])
    assert alone.argmax(dim=1).tolist() == [1, 1, 0]
    torch.testing.assert_close(together[0], alone.mean(dim=0))
    assert together.argmax().item() == 0
