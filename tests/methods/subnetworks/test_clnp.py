"""CLNP: free neurons cannot disturb those in use, so one pass serves the heads of all tasks."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import cps
from cps.methods.subnetworks.clnp import CLNP, Activity, Sparse
from cps.network.classifier import Classifier
from samples import conv_net, make_task

LONG = cps.Training(10, cps.Adam(1e-2, weight_decay=0.0), batch_size=16)


class Residual(nn.Module):
    """Two convolutions with a shortcut, without norm layers and biases."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 60, 3, padding=1, bias=False)
        self.conv1 = nn.Conv2d(60, 40, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(40, 60, 3, padding=1, bias=False)

    def forward(self, images):
        signal = torch.relu(self.stem(images))
        return torch.relu(signal + self.conv2(torch.relu(self.conv1(signal)))).mean(dim=(2, 3))


def learned(fabric, tasks=3, **settings):
    torch.manual_seed(0)
    method = CLNP(Residual(), fabric=fabric, **{"train": LONG, "margin": 0.1, "shared_norms": True, **settings})
    for index in range(tasks):
        method.learn(make_task(10 * index, images=48))
    return method


def test_one_pass_serves_all_heads_whatever_free_neurons_compute(fabric):
    method = learned(fabric)
    network, images = method.network, make_task(0).test[0].to(method.device)
    used = {name: mask.flatten(1).any(dim=1) for name, mask in network.taken.items()}
    assert all(rows.any() for rows in used.values())
    assert not used["conv1.weight"].all()
    noisy = {name: weight.clone() for name, weight in network.weights.items()}
    for name, rows in used.items():
        noisy[name][~rows] = torch.randn_like(noisy[name][~rows])
    with torch.no_grad():
        features, among_noise = (
            functional_call(network.backbone, each, (images,)) for each in (network.weights, noisy)
        )
        assert not torch.equal(features, among_noise)
        for task, subnetwork in enumerate(network.subnetworks):
            head = subnetwork.head
            logits = nn.functional.linear(features, **head)
            assert torch.equal(logits, nn.functional.linear(among_noise, **head))
            torch.testing.assert_close(logits, network.full_outputs([images], task).logits)
        name, rows = next(iter(used.items()))
        noisy[name][rows] += 0.1
        changed = functional_call(network.backbone, noisy, (images,))
        assert not torch.equal(logits, nn.functional.linear(changed, **head))


def test_no_weight_leads_from_a_free_neuron_to_one_in_use(fabric):
    method = learned(fabric, tasks=2)
    weights = method.network.weights
    used = {name: mask.flatten(1).any(dim=1) for name, mask in method.network.taken.items()}
    for reader, source in (("conv1.weight", "stem.weight"), ("conv2.weight", "conv1.weight")):
        assert (weights[reader][used[reader]][:, ~used[source]] == 0).all()
        assert (weights[reader][used[reader]][:, used[source]] != 0).any()
        assert (weights[reader][~used[reader]] != 0).all()  # drawn again


def test_the_largest_threshold_within_the_margin_is_chosen(fabric, monkeypatch):
    shares = []
    for accuracies in ([0.9, 0.9, 0.9, 0.5, 0.9], [0.9] * 17):
        measured = iter(accuracies)
        monkeypatch.setattr(CLNP, "accuracy", lambda *_: next(measured))  # noqa: B023
        shares.append(learned(fabric, tasks=1, margin=0.01).network.free_share())
    assert shares[0] < shares[1]


def test_activity_is_relative_to_the_mean_of_a_layer():
    backbone = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        backbone[0].weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0]]))
        backbone[2].weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 1.0]]))
    batches = [torch.tensor([[2.0, 2.0, 2.0]]), torch.tensor([[-2.0, 2.0, -2.0]])]
    activity = Activity(backbone, ["0.weight", "2.weight"], batches)
    active = activity.active(0.5)  # hidden: means 1 and 6; features: means (|2-6| + |-6|) / 2 = 5 and 6
    assert active.inputs["0.weight"].all()
    assert activity.active(2.0).inputs["0.weight"].all()  # the images
    assert active.inputs["2.weight"].tolist() == [[False, True], [False, True]]
    assert active.features.tolist() == [True, True]
    assert activity.active(1.0).features.tolist() == [False, True]


def test_the_penalty_is_the_sum_of_absolute_weights(fabric):
    student = Classifier(conv_net(), nn.Linear(12, 2))
    pixels, labels = torch.randn(4, 2, 6, 6), torch.tensor([0, 1, 0, 1])
    plain, sparse = (Sparse(student, ["0.weight", "3.weight"], weight, freezes_norms=False) for weight in (0.0, 0.1))
    size = sum(student.backbone[index].weight.abs().sum() for index in (0, 3))
    loss = cps.CrossEntropy()
    torch.testing.assert_close(sparse(pixels, labels, loss), plain(pixels, labels, loss) + 0.1 * size)


@pytest.mark.parametrize(
    ("change", "match"),
    [({"validation": 1.0}, "validation must be"), ({"margin": -1}, "margin of CLNP must be 0 or more")],
)
def test_wrong_settings_raise(fabric, change, match):
    with pytest.raises(ValueError, match=match):
        CLNP(conv_net(), fabric=fabric, **change)
