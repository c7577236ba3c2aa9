"""Flat parameters: gradients are gathered into one vector."""

import pytest
import torch
from torch import nn

from cps.training.cuda.flat_parameters import FlatParameters


def test_layers_can_write_their_gradients_directly_into_the_flat_gradient():
    flat = FlatParameters({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2, 5))})
    flat.parameters["b"].grad = torch.full((2, 5), 3.0)
    with pytest.raises(AssertionError, match="no gradient reached a"):
        flat.gather_gradients()
    flat.direct.add("a")
    flat.views(flat.vector.grad)["a"].fill_(2.0)
    flat.parameters["b"].grad = torch.full((2, 5), 3.0)
    flat.gather_gradients()
    gradients = flat.gradients()
    assert gradients["a"].tolist() == [2.0] * 3
    assert gradients["b"].tolist() == [[3.0] * 5] * 2
    assert float(flat.vector.grad.sum()) == 36.0  # and zeros in the gaps between them


def test_parameters_are_views_of_the_vector_at_aligned_offsets_in_their_own_memory_format():
    weight = nn.Parameter(torch.randn(2, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    values = {"bias": nn.Parameter(torch.randn(5)), "weight": weight}
    expected = {name: value.detach().clone() for name, value in values.items()}
    flat = FlatParameters(values)
    for name, value in values.items():
        assert torch.equal(value, expected[name])
        assert (value.data_ptr() - flat.vector.data_ptr()) % 16 == 0
    assert weight.is_contiguous(memory_format=torch.channels_last)
    flat.vector.detach().zero_()
    assert not any(value.any() for value in values.values())


def test_an_optimizer_state_is_split_by_parameter_and_loaded_again():
    flat = FlatParameters({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2, 5))})
    state = {"step": torch.tensor(4.0), "exp_avg": torch.arange(flat.vector.numel()).float()}
    by_name = {name: {k: v.clone() for k, v in entry.items()} for name, entry in flat.state_by_name(state).items()}
    assert by_name["a"]["exp_avg"].tolist() == [0.0, 1.0, 2.0]
    assert by_name["b"]["exp_avg"].shape == (2, 5)
    other = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(flat.vector.numel())}
    flat.load_state(other, by_name)
    again = flat.state_by_name(other)
    assert all(torch.equal(again[name][key], value) for name in by_name for key, value in by_name[name].items())
