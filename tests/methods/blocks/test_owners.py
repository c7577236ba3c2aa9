"""Owners of weights."""

import pytest
import torch

from cps.methods.blocks.owners import find_owners, masks_of, owner_bytes, smallest_weights


@pytest.mark.parametrize(
    ("weights", "share", "pruned"),
    [
        ([0.1, 0.2, 0.3, 0.4], 0.5, [True, True, False, False]),
        ([-0.4, 0.1, -0.2, 0.3], 0.5, [False, True, True, False]),
        ([0.1, 0.2, 0.2, 0.4], 0.5, [True, True, True, False]),  # all at the limit go
        ([0.1, 0.2, 0.3, 0.4], 0.0, [False] * 4),
        ([0.1, 0.2, 0.3, 0.4], 1.0, [True] * 4),
    ],
)
def test_the_smallest_weights_are_those_up_to_the_kth(weights, share, pruned):
    found = smallest_weights(torch.tensor(weights), torch.ones(4, dtype=torch.bool), share)
    assert found.tolist() == pruned


def test_only_weights_among_the_given_ones_are_found():
    among = torch.tensor([False, True, True, False])
    assert smallest_weights(torch.tensor([0.1, 0.3, 0.2, 0.0]), among, 0.5).tolist() == [False, False, True, False]


def test_owners_partition_a_layer_and_give_back_the_masks():
    first = torch.tensor([[True, False], [False, False]])
    second = first | torch.tensor([[False, True], [False, False]])
    owners = find_owners([{"w": first}, {"w": second}])
    assert owners["w"].tolist() == [[1, 2], [0, 0]]
    assert torch.equal(masks_of(owners, 0)["w"], first)
    assert torch.equal(masks_of(owners, 1)["w"], second)
    assert owner_bytes(owners, 2) == 1  # two bits for each of four weights
    assert owner_bytes(owners, 4) == 2
