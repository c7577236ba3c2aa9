"""Selection by the smallest entropy."""

import math

import pytest
import torch

import cps
from cps.network.outputs import Evidence, Outputs
from cps.selection.entropy import Entropy, entropy


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([4.0, 0.0, 0.0], 0.177), ([1.0, 0.0, 0.0], 0.975), ([0.0, 0.0], math.log(2)), ([1000.0, 0.0], 0.0)],
)
def test_entropies_by_hand(logits, expected):
    assert entropy(torch.tensor([logits])).item() == pytest.approx(expected, abs=5e-4)


def test_it_is_a_selector():
    cps.check_selector(Entropy())


def test_a_group_belongs_to_the_task_with_the_smallest_mean_entropy():
    sure, unsure = torch.tensor([[4.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    features = torch.zeros(3, 1)
    evidence = Evidence.of([
        Outputs(features, torch.cat([sure, unsure, unsure])), Outputs(features, torch.cat([unsure, sure, sure])),
    ])  # fmt: skip
    assert Entropy()(evidence, [{}, {}], torch.arange(3)).argmax(dim=1).tolist() == [0, 1, 1]
    assert Entropy()(evidence, [{}, {}], torch.zeros(3, dtype=torch.long)).argmax(dim=1).tolist() == [1]
