"""Restoring guarded weights: all at once in a flat vector gives the same as one by one."""

import torch
from torch import nn

from cps.network.freezing import FlatRestorer, Protected, make_restore
from cps.training.cuda.flat_parameters import FlatParameters


def test_restoring_a_flat_vector_does_the_same_as_restoring_each_weight():
    draws = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draws) for name, shape in {"a": (4, 3, 3, 3), "b": (5, 4)}.items()}
    guard = {}
    for name, weight in weights.items():
        taken, off = (torch.rand(*weight.shape[:2], *[1] * (weight.ndim - 2), generator=draws) < 0.4 for _ in range(2))
        guard[name] = Protected(taken, torch.randn(weight.shape, generator=draws), off)
    one, other = ({name: weight.clone() for name, weight in weights.items()} for _ in range(2))
    make_restore(guard, one)()
    flat = FlatParameters({name: nn.Parameter(value) for name, value in other.items()})
    other = flat.views(flat.vector.detach())
    restorer = FlatRestorer(flat.vector, flat.views)
    whole = Protected(torch.ones(1, dtype=torch.bool), torch.ones(4, 3, 3, 3), torch.zeros(1, dtype=torch.bool))
    shapes = {name: value.shape for name, value in weights.items()}
    restorer.set_guard({"a": whole}, shapes)
    restorer.set_guard(guard, shapes)  # replaces the first one
    restorer()
    assert all(torch.equal(one[name], other[name]) for name in weights)
    changed = [name for name in weights if not torch.equal(one[name], weights[name])]
    assert changed == ["a", "b"]


def test_a_guard_that_changes_in_place_restores_what_it_holds_now():
    weight, taken = torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool)
    guard = {"a": Protected(taken, torch.full((2, 2), 3.0), torch.zeros(2, 2, dtype=torch.bool))}
    restore = make_restore(guard, {"a": weight})
    restore()
    assert weight.tolist() == [[1, 1], [1, 1]]
    guard["a"].taken[0, 0] = True
    guard["a"].off[1] = True
    restore()
    assert weight.tolist() == [[3, 1], [0, 0]]
    weight.fill_(1.0)
    guard["a"].off[1, 1] = False
    guard["a"].sealed.fill_(2.0)
    restore()
    assert weight.tolist() == [[2, 1], [0, 1]]
