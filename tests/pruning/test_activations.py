"""The activations that pruning measures."""

import torch
from torch import nn

import cps
from cps.pruning.activations import record_activations


def test_tokens_are_averaged():
    torch.manual_seed(0)
    layer = nn.Linear(5, 4)
    tokens = torch.randn(6, 3, 5)
    mean_input = record_activations(nn.Sequential(layer), ["0.weight"], [tokens]).calls["0.weight"][0].input
    torch.testing.assert_close(mean_input, tokens.abs().mean(dim=(0, 1)))


def test_tokens_folded_into_the_batch_are_averaged():
    layer = nn.Linear(5, 4)
    tokens = torch.randn(6, 3, 5)
    folded = (
        record_activations(nn.Sequential(nn.Flatten(0, 1), layer), ["1.weight"], [tokens]).calls["1.weight"][0].input
    )
    torch.testing.assert_close(folded, tokens.abs().mean(dim=(0, 1)))


def test_a_layer_called_twice_is_scored_on_both_signals():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.relu(self.layer(x)))

    torch.manual_seed(0)
    module, images = Twice(), torch.randn(6, 4)
    first, second = record_activations(module, ["layer.weight"], [images]).calls["layer.weight"]
    torch.testing.assert_close(first.input, images.abs().mean(0))
    torch.testing.assert_close(second.input, torch.relu(module.layer(images)).detach().abs().mean(0))


def test_a_last_batch_of_one_image_is_not_added_to_parameters_that_broadcast():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.places = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 3, 4))

        def forward(self, x):
            return (self.layer(x) + self.places).mean(dim=1)

    batches = list(torch.rand(5, 3, 4).split(2))
    assert record_activations(Places().eval(), ["layer.weight"], batches).additions == {}
    cps.NNrelief(0.9)(Places().eval(), {"layer.weight": torch.ones(4, 4, dtype=torch.bool)}, batches)
