"""Importances of parameters, compared with cases worked by hand and with autograd."""

import pytest
import torch
from torch import nn

from cps.data.examples import TensorExamples
from cps.methods.regularization import importance
from cps.methods.regularization.importance import (
    empirical_fisher,
    exact_fisher,
    image_batches,
    output_sensitivity,
    sample_gradients,
)
from cps.network.classifier import Classifier
from samples import conv_net

IMAGES = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(0))


def logistic(weight=0.0):
    """Return a model with p(class 0 | x) = sigmoid(weight x)."""
    model = Classifier(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model.backbone.weight.fill_(weight)
        model.head.weight.copy_(torch.tensor([[1.0], [0.0]]))
    return model.eval()


def convolutional():
    torch.manual_seed(0)
    return Classifier(conv_net(), nn.Linear(12, 3)).eval()


def test_the_fisher_of_two_images_with_opposite_gradients_is_one_as_worked_by_hand():
    """For x = 2 and p = 1/2 the gradients are 1 and -1; the square of their mean would be 0."""
    pixels, labels = torch.tensor([[2.0], [2.0]]), torch.tensor([0, 1])
    assert empirical_fisher(logistic(), pixels, labels).item() == pytest.approx(1)
    assert exact_fisher(logistic(), [pixels]).item() == pytest.approx(1)


def test_the_sensitivity_of_the_squared_output_is_as_worked_by_hand():
    """F(x) = w x with w = 3 and x = 2: |d F^2 / dw| = 2 w x^2 = 24; the norm that is not squared would give 2."""
    model = Classifier(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model.backbone.weight, 3.0)
    nn.init.constant_(model.head.weight, 1.0)
    assert output_sensitivity(model, [torch.tensor([[2.0]])]).item() == pytest.approx(24)
    assert output_sensitivity(model, [torch.tensor([[2.0], [-2.0]])]).item() == pytest.approx(24)
    assert output_sensitivity(model, [torch.tensor([[2.0]]), torch.tensor([[0.0]])]).item() == pytest.approx(12)


def test_gradients_of_a_batch_are_those_of_each_image_alone():
    model, labels = convolutional(), torch.arange(6) % 3
    found = sample_gradients(
        model, IMAGES, labels, lambda logits, label: logits.log_softmax(0).gather(0, label[None])[0]
    )
    for row, image, label in zip(found, IMAGES, labels, strict=True):
        value = model(image[None]).log_softmax(dim=1)[0, label]
        expected = torch.autograd.grad(value, list(model.backbone.parameters()))
        torch.testing.assert_close(row, torch.cat([each.flatten() for each in expected]), rtol=1e-4, atol=1e-6)


def test_the_exact_fisher_is_the_mean_over_labels_drawn_from_the_model():
    model, draws = convolutional(), torch.Generator().manual_seed(0)
    exact = exact_fisher(model, [IMAGES[:4], IMAGES[4:]])
    assert (exact >= 0).all()
    labels = model(IMAGES).softmax(dim=1).multinomial(300, replacement=True, generator=draws)
    sampled = empirical_fisher(model, IMAGES.repeat_interleave(300, dim=0), labels.flatten())
    torch.testing.assert_close(sampled.sum(), exact.sum(), rtol=0.05, atol=0)
    assert torch.corrcoef(torch.stack([sampled, exact]))[0, 1] > 0.99


def test_the_fisher_of_the_new_classes_does_not_see_the_old_ones():
    model = convolutional()
    alone = Classifier(model.backbone, nn.Linear(12, 2)).eval()
    with torch.no_grad():
        alone.head.weight.copy_(model.head.weight[1:])
        alone.head.bias.copy_(model.head.bias[1:])
    torch.testing.assert_close(exact_fisher(model, [IMAGES], first=1), exact_fisher(alone, [IMAGES]))


def test_importances_change_neither_parameters_nor_statistics_nor_gradients():
    model = convolutional()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exact_fisher(model, [IMAGES])
    output_sensitivity(model, [IMAGES])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_that_are_not_trained_have_no_importance():
    model = convolutional()
    model.backbone[0].requires_grad_(False)
    trained = sum(parameter.numel() for parameter in model.backbone.parameters() if parameter.requires_grad)
    assert exact_fisher(model, [IMAGES]).shape == (trained,)


def test_images_come_in_batches_that_bound_the_memory(monkeypatch):
    model = convolutional()
    size = sum(parameter.numel() for parameter in model.backbone.parameters())
    monkeypatch.setattr(importance, "MAX_VALUES", 2 * size)
    examples = TensorExamples(IMAGES, torch.zeros(6).long())
    batches = list(image_batches(model, examples, 5, lambda images: images + 1, torch.Generator().manual_seed(0)))
    assert [len(pixels) for pixels in batches] == [2, 2, 1]
    chosen = {next(i for i in range(6) if torch.equal(image, IMAGES[i] + 1)) for image in torch.cat(batches)}
    assert len(chosen) == 5
