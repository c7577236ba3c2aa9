"""Compact networks on a CPU write over values that nothing else reads, and compute the same bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cps
from cps.network.compact.fx_tracing import TraceError, trace_module
from cps.network.compact.in_place import add_to, work_in_place
from zoo import BACKBONE_NAMES, BACKBONES


def traced(module):
    try:
        return trace_module(module.eval().requires_grad_(False))
    except TraceError as error:
        pytest.skip(str(error))


def written_over(graph):
    """Return the names of the additions and ReLUs that work in place."""
    nodes = graph.graph.nodes
    return {node.name for node in nodes if node.kwargs.get("inplace") or node.target is add_to}


@pytest.mark.parametrize("name", BACKBONE_NAMES)
@torch.no_grad()
def test_every_backbone_computes_the_same_bits(name):
    torch.manual_seed(0)
    graph, images = traced(BACKBONES[name]()), torch.rand(3, 2, 8, 8)
    expected, given = graph(images.clone()), images.clone()
    changed = work_in_place(copy.deepcopy(graph))
    for _ in range(2):
        assert torch.equal(changed(given), expected)
    assert torch.equal(given, images)


def test_every_block_of_a_resnet_adds_and_activates_in_place():
    names = written_over(work_in_place(traced(cps.resnet32())))
    assert len(names) == 1 + 15 * 2  # the first ReLU; in each block one more and the addition


class TwoReaders(nn.Module):
    """Reads the result of each of three layers twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(3))

    def forward(self, pixels):
        first, second, third = (layer(pixels) for layer in self.layers)
        active = F.relu(first)
        total = second + pixels
        alias = third.add_(pixels)
        return active * first + total * second + F.relu(alias) * third


@torch.no_grad()
def test_a_value_that_is_read_again_is_not_written_over(monkeypatch):
    torch.manual_seed(0)
    graph, images = traced(TwoReaders()), torch.randn(2, 2, 4, 4)
    expected = graph(images)
    changed = work_in_place(copy.deepcopy(graph))
    assert torch.equal(changed(images), expected)
    monkeypatch.setattr("cps.network.compact.in_place._is_disposable", lambda _graph, _value: True)
    assert not torch.equal(work_in_place(copy.deepcopy(graph))(images), expected)  # the negative control


@pytest.mark.parametrize(
    ("other", "is_in_place"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(3), False),
        (torch.ones(4, 2, 3), False),
        (torch.ones(2, 3, dtype=torch.float64), False),
        (1.0, False),
    ],
)
def test_a_sum_of_another_shape_or_type_takes_new_memory(other, is_in_place):
    summand = torch.zeros(2, 3)
    expected = summand + other
    found = add_to(summand, other)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert (found is summand) == is_in_place
