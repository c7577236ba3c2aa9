"""The fast paths of a GPU compute what the plain ones do; what needs no GPU is tested without one."""

import pytest
import torch
from torch import nn

import cps
from conftest import ACCELERATOR, conv_net, make_task
from cps.draft import Classifier
from cps.guard import Kept, _bind_at_once, bind
from cps.padding import copy_into, padded, resized_state

needs_gpu = pytest.mark.skipif(ACCELERATOR == "cpu", reason="needs a GPU")


def awkward():
    torch.manual_seed(0)
    return cps.resnet18(3, (18, 21, 25, 30))


def train(model, steps, pixels, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-2)
    model.train()
    for _ in range(steps):
        nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_a_padded_twin_trains_as_the_backbone_does_and_its_padding_stays_zero():
    backbone, pixels, labels = awkward().double(), torch.randn(8, 3, 8, 8).double(), torch.arange(8) % 2
    twin = padded(backbone, pixels)
    assert twin is not None
    assert {m.out_channels for m in twin.modules() if isinstance(m, nn.Conv2d)} == {24, 32}
    head = nn.Linear(30, 2).double()
    plain, wide = Classifier(backbone, head), Classifier(twin, nn.Linear(30, 2).double())
    wide.head.load_state_dict(head.state_dict())
    first, second = train(plain, 3, pixels, labels), train(wide, 3, pixels, labels)
    torch.testing.assert_close(wide.eval()(pixels), plain.eval()(pixels))
    trained = {name: value.clone() for name, value in backbone.named_parameters()}
    narrow = {name: value.shape for name, value in backbone.named_parameters()}
    for name, value in twin.inner.named_parameters():
        beyond = value.detach().clone()
        beyond[tuple(map(slice, narrow[name]))] = 0
        assert not beyond.any(), name
    copy_into(twin.inner, backbone)
    for name, value in backbone.named_parameters():
        torch.testing.assert_close(value, trained[name])
    state = resized_state(second.state_dict(), plain)
    for index, entries in first.state_dict()["state"].items():
        torch.testing.assert_close(state["state"][index], entries)
    back = resized_state(state, wide)["state"]
    assert all(torch.equal(v, second.state_dict()["state"][i][k]) for i, e in back.items() for k, v in e.items())


@pytest.mark.parametrize(
    "backbone",
    [cps.resnet32(3), conv_net(3), nn.Sequential(nn.Conv2d(3, 17, 3), nn.Flatten(), nn.Linear(17 * 36, 4))],
    ids=["nothing to pad", "few channels", "a layer that cannot be padded"],
)
def test_what_need_not_or_cannot_be_padded_is_left_alone(backbone):
    assert padded(backbone, torch.randn(2, 3, 8, 8)) is None


def test_a_module_that_counts_its_channels_is_not_padded():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 17, 3), nn.Conv2d(17, 18, 3)

        def forward(self, x):
            signal = self.first(x)
            return (self.second(signal) * signal.shape[1]).mean(dim=(2, 3))

    assert padded(Counts(), torch.randn(2, 3, 8, 8)) is None


def test_guarding_all_weights_at_once_does_what_guarding_each_does():
    draws = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draws) for name, shape in {"a": (4, 3, 3, 3), "b": (5, 4)}.items()}
    guard = {}
    for name, weight in weights.items():
        taken, off = (torch.rand(*weight.shape[:2], *[1] * (weight.ndim - 2), generator=draws) < 0.4 for _ in range(2))
        guard[name] = Kept(taken, torch.randn(weight.shape, generator=draws), off)
    one, other = ({name: weight.clone() for name, weight in weights.items()} for _ in range(2))
    bind(guard, one)()
    _bind_at_once(guard, other)()
    assert all(torch.equal(one[name], other[name]) for name in weights)
    moved = [name for name in weights if not torch.equal(one[name], weights[name])]
    assert moved == ["a", "b"]


@needs_gpu
def test_the_step_is_captured_and_the_same_seed_gives_the_same_bits(make_learner, monkeypatch):
    import cps.training

    loops = []
    original = cps.training._Loop.__init__
    monkeypatch.setattr(cps.training._Loop, "__init__", lambda self, *a: loops.append(self) or original(self, *a))
    training = cps.Training(4, cps.Adam(1e-2), cps.Cosine(), batch_size=8)

    def run():
        torch.manual_seed(0)
        backbone = nn.Sequential(awkward(), nn.Dropout(0.2))
        learner = make_learner(backbone, train=training, retrain=training, augment=cps.PadCrop(1), rounds=2)
        for first in (0, 10):
            learner.learn(make_task(first, shape=(3, 8, 8), images=37))
        return [learner.fingerprint(task) for task in range(2)]

    assert run() == run()
    assert all(loop.captured is not None and len(loop.captured._graphs) == 2 for loop in loops)


@needs_gpu
@pytest.mark.parametrize("optimizer", [cps.SGD(0.05), cps.Adam(1e-2), cps.AdamW(1e-2)], ids=str)
def test_the_captured_step_gives_what_the_plain_one_gives(make_learner, monkeypatch, optimizer):
    import cps.training

    training = cps.Training(3, optimizer, cps.Steps((1,), 0.5), batch_size=8)
    full = cps.make_fabric(accelerator=ACCELERATOR, precision="32-true")

    def run():
        # In double precision, as Adam turns the smallest difference of a small gradient into a whole step.
        backbone = awkward().double()
        learner = make_learner(backbone, train=training, retrain=training, augment=cps.Flip(), fabric=full)
        for first in (0, 10):
            learner.learn(make_task(first, shape=(3, 8, 8)))
        return learner.evidence(make_task(0, shape=(3, 8, 8)).test[0])[1].logits

    fast = run()
    monkeypatch.setattr(cps.training._Loop, "_can_be_captured", lambda self: False)
    torch.testing.assert_close(run(), fast, rtol=1e-3, atol=1e-3)
