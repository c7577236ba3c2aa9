"""Coordinates of layers in which inputs and gradients are not correlated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cps.methods.regularization.eigenbasis import Basis, layer_bases, rotated
from cps.methods.regularization.importance import flat_parameters
from cps.network.classifier import Classifier
from samples import conv_net

IMAGES = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(0))


def off_diagonal(moment):
    """Return the part of a second moment that is not on the diagonal."""
    return ((moment - moment.diagonal().diag()).norm() / moment.norm()).item()


def moments_at(model, layer):
    """Return the second moments at a layer by plain autograd: one image and one class at a time."""
    inputs, outputs, caught = 0.0, 0.0, {}
    handle = layer.register_forward_hook(lambda module, given, output: caught.update(x=given[0], y=output))
    for image in IMAGES:
        for label in range(3):
            log_probabilities = model(image[None]).log_softmax(dim=1)[0]
            (gradient,) = torch.autograd.grad(log_probabilities[label], caught["y"])
            rows = [
                value.detach().flatten(2)[0].T if value.ndim > 2 else value.detach()
                for value in (caught["x"], gradient)
            ]
            inputs = inputs + rows[0].T @ rows[0] / 3
            outputs = outputs + log_probabilities[label].exp().item() * rows[1].T @ rows[1]
    handle.remove()
    return inputs, outputs


def classifier(backbone):
    torch.manual_seed(0)
    return Classifier(backbone, nn.Linear(12, 3)).eval()


@pytest.mark.parametrize(
    ("make", "name"),
    [(conv_net, "3"), (lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 20), nn.ReLU(inplace=True), nn.Linear(20, 12)), "1")],
)  # fmt: skip
def test_inputs_and_gradients_are_not_correlated_in_the_new_coordinates(make, name):
    torch.manual_seed(0)
    model = classifier(make())
    basis = layer_bases(model, [IMAGES[:4], IMAGES[4:]])[f"{name}.weight"]
    for module in model.modules():
        module.inplace = False  # in the reference, outputs must not be overwritten
    inputs, outputs = moments_at(model, model.backbone.get_submodule(name))
    for moment, vectors in ((inputs, basis.inputs), (outputs, basis.outputs)):
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(len(vectors)), atol=1e-5, rtol=0)
        assert off_diagonal(moment) > 0.2
        assert off_diagonal(vectors.T @ moment @ vectors) < 1e-4
    assert off_diagonal(basis.outputs @ outputs @ basis.outputs.T) > 0.2  # the transposed rotation of the released code


def test_rotated_weights_give_the_same_outputs_between_rotated_inputs_and_outputs():
    backbone = conv_net()
    torch.manual_seed(0)
    bases = {"3.weight": Basis(*(torch.linalg.qr(torch.randn(size, size))[0] for size in (8, 12)))}
    flat = flat_parameters(backbone).detach()
    turned = rotated(flat, backbone, bases)
    first = sum(value.numel() for value in [*backbone[0].parameters(), *backbone[1].parameters()])
    weight = turned[first : first + backbone[3].weight.numel()].reshape(12, 8, 3, 3)
    maps = torch.randn(2, 8, 6, 6)
    through = F.conv2d(torch.einsum("nihw,iq->nqhw", maps, bases["3.weight"].inputs), weight, stride=2, padding=1)
    expected = F.conv2d(maps, backbone[3].weight, stride=2, padding=1)
    torch.testing.assert_close(
        torch.einsum("nphw,op->nohw", through, bases["3.weight"].outputs), expected, atol=1e-5, rtol=0
    )
    assert torch.equal(turned[:first], flat[:first])
    torch.testing.assert_close(turned.norm(), flat.norm())
    torch.testing.assert_close(
        rotated(torch.stack([flat, 2 * flat]), backbone, bases), torch.stack([turned, 2 * turned])
    )


def test_grouped_convolutions_and_layers_that_are_not_trained_have_no_basis():
    backbone = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(16, 12))
    backbone[3].requires_grad_(False)
    assert set(layer_bases(classifier(backbone), [IMAGES])) == {"0.weight"}
