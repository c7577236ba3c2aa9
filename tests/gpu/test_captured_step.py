"""A captured step trains as plain steps do, one classifier after the other."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.data.normalize import Prepare
from cps.network.classifier import Classifier
from cps.network.freezing import Protected, make_restore
from cps.runtime.devices import full_precision
from cps.runtime.process_state import RNG_LOCK
from cps.training.cuda import convolution
from cps.training.cuda.accelerated_copy import check_gradients
from cps.training.cuda.captured_step import CapturedStep
from cps.training.steps import EpochPlan
from gpu.helpers import needs_gpu, odd_resnet, plan_of, run_interpreted, small_step
from samples import ACCELERATOR, conv_net, make_task

OPTIMIZERS = [cps.SGD(0.05), cps.Adam(1e-2), cps.AdamW(1e-2)]
VARIANTS = [(optimizer, False) for optimizer in OPTIMIZERS] + [
    pytest.param(optimizer, True, marks=needs_gpu) for optimizer in (cps.SGD(0.05), cps.Adam(1e-3))
]


@pytest.mark.slow
def test_a_captured_step_with_custom_kernels_trains_as_plain_steps_do():
    run_interpreted((Path(__file__).parent / "kernels_on_cpu.py").read_text())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile
@pytest.mark.parametrize(("optimizer", "is_compiled"), VARIANTS)
def test_a_captured_step_trains_as_plain_steps_do_and_keeps_nothing_of_the_last_classifier(optimizer, is_compiled):
    """On a GPU the later steps replay a graph."""
    torch.manual_seed(0)
    device = torch.device(ACCELERATOR)
    training = cps.Training(1, optimizer, batch_size=8)
    images, labels = torch.randn(8, 3, 8, 8, device=device).double(), torch.arange(8, device=device) % 2
    uniform = torch.rand(8, 1).to(device)
    backbone = odd_resnet().double().to(device)
    initial = copy.deepcopy(backbone.state_dict())
    taken, off = ((torch.rand(18, 3, 1, 1) < share).to(device) for share in (0.5, 0.3))
    guard = {"stem.weight": Protected(taken, initial["stem.weight"].clone(), off)}
    heads = [nn.Linear(30, 2).double().to(device) for _ in range(2)]
    transform = BatchTransform(Prepare(dtype=torch.float64), cps.Flip())
    first = Classifier(backbone, heads[0])
    step = CapturedStep(first, images, training, transform, is_bf16=False, can_compile=is_compiled)
    assert step.is_compiled == is_compiled
    examples = TensorExamples(images.repeat(3, 1, 1, 1), labels.repeat(3))
    factors = (1.0, 0.5, 0.5, 0.1, 0.1, 0.1)

    def train_captured(head):
        backbone.load_state_dict(initial)
        model = Classifier(backbone, copy.deepcopy(head))
        step.begin(model, guard, None)
        for epoch in range(2):  # each has three steps on the same images
            order = [torch.arange(8)] * 3
            step.run(examples, plan_of(order, uniform.repeat(3, 1), factors[3 * epoch : 3 * epoch + 3]))
        optimizer_state = step.optimizer_state()["state"]
        return copy.deepcopy(model.state_dict()), optimizer_state

    def train_plainly(head):
        backbone.load_state_dict(initial)
        model = Classifier(backbone, copy.deepcopy(head)).train()
        made = optimizer(model.parameters())
        restore = make_restore(guard, dict(backbone.named_parameters()))
        for factor in factors:
            made.param_groups[0]["lr"] = optimizer.lr * factor
            nn.functional.cross_entropy(model(cps.Flip()(images, uniform)), labels).backward()
            made.step()
            made.zero_grad()
            restore()
        return model.state_dict(), made.state_dict()["state"]

    tolerance = 5e-3 if is_compiled else 1e-3  # compiled, Adam corrects its bias in float32
    for head in heads:  # the second one uses what the first one left
        for ours, plain in zip(train_captured(head), train_plainly(head), strict=True):
            torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance, check_device=False)


def test_a_captured_step_trains_as_plain_steps_do_with_another_loss():
    torch.manual_seed(0)
    device, loss = torch.device(ACCELERATOR), cps.Contrastive(weight=1.0)
    images, labels = torch.randn(16, 2, 6, 6, device=device).double(), torch.arange(16, device=device) % 3
    backbone, head = conv_net().double().to(device), nn.Linear(12, 3).double().to(device)
    initial = copy.deepcopy(backbone.state_dict())
    model = Classifier(backbone, copy.deepcopy(head))
    training = cps.Training(1, cps.Adam(1e-2), batch_size=16, loss=loss)
    transform = BatchTransform(Prepare(dtype=torch.float64))
    step = CapturedStep(model, images, training, transform, is_bf16=False)
    backbone.load_state_dict(initial)
    step.begin(model, {}, None)
    examples = TensorExamples(images.repeat(3, 1, 1, 1), labels.repeat(3))
    step.run(examples, plan_of([torch.arange(16)] * 3))
    step.write_back()
    found = {name: value.clone() for name, value in backbone.state_dict().items()}
    backbone.load_state_dict(initial)
    plain = Classifier(backbone, copy.deepcopy(head)).train()
    optimizer = cps.Adam(1e-2)(plain.parameters())
    for _ in range(3):
        loss(plain.backbone(images), plain(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in backbone.state_dict().items():
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3)


@full_precision()
def test_a_captured_step_updates_mask_scores_as_plain_steps_do():
    torch.manual_seed(0)
    device, optimizer = torch.device(ACCELERATOR), cps.Adam(1e-2)
    images, labels = torch.randn(16, 2, 6, 6, device=device), torch.arange(16, device=device) % 2
    backbone, head = conv_net().to(device), nn.Linear(12, 2).to(device)
    initial = copy.deepcopy(backbone.state_dict())

    def guard():
        draws = torch.Generator().manual_seed(1)
        kept = {}
        for name in ("0.weight", "3.weight"):
            shape = (*initial[name].shape[:2], 1, 1)
            taken, off = ((torch.rand(shape, generator=draws) < share).to(device) for share in (0.9, 0.1))
            kept[name] = Protected(taken, initial[name].clone(), off, torch.ones(shape, device=device))
        return kept

    training = cps.Training(1, optimizer, batch_size=16)
    model = Classifier(backbone, copy.deepcopy(head))
    names = ["0.weight", "3.weight"]
    step = CapturedStep(model, images, training, BatchTransform(), is_bf16=False, scored=names)
    ours = guard()
    backbone.load_state_dict(initial)
    step.begin(model, ours, None)
    factors = [1.0, 1.0, 0.5, 0.5, 0.25]
    plan = EpochPlan([torch.arange(16)] * 5, torch.zeros(80, 0), factors, [1.0] * 5, score_step=0.8)
    step.run(TensorExamples(images.repeat(5, 1, 1, 1), labels.repeat(5)), plan)
    step.write_back()
    found = {name: value.clone() for name, value in backbone.state_dict().items()}

    backbone.load_state_dict(initial)
    plain, theirs = Classifier(backbone, copy.deepcopy(head)).train(), guard()
    made, restore = optimizer(plain.parameters()), make_restore(theirs, dict(backbone.named_parameters()))
    for factor in factors:
        made.param_groups[0]["lr"] = optimizer.lr * factor
        nn.functional.cross_entropy(plain(images), labels).backward()
        made.step()
        restore(0.8 * factor)
        made.zero_grad()
    for name in names:
        torch.testing.assert_close(ours[name].scores, theirs[name].scores, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[name], backbone.state_dict()[name], rtol=1e-3, atol=1e-3)
        assert (theirs[name].scores <= 0).any()


def test_release_waits_for_the_side_stream_in_turn_with_other_threads(monkeypatch):
    step, _, _ = small_step(odd_resnet(), 30)
    is_locked = []
    monkeypatch.setattr(type(step._side_stream), "join", lambda _: is_locked.append(RNG_LOCK._is_owned()))
    step.release()
    assert is_locked == [True]


def test_one_captured_step_trains_tasks_of_any_number_of_images():
    """Full batches, smaller ones, a single batch, and the first number again; no task affects the next."""
    step, model, _ = small_step(odd_resnet(), 30)
    initial = copy.deepcopy(model.state_dict())
    found = {}
    for task, number in enumerate((20, 5, 16, 20)):
        draws = torch.Generator().manual_seed(number)
        images, labels = torch.randn(number, 3, 8, 8, generator=draws), torch.arange(number) % 2
        model.load_state_dict(initial)
        step.begin(model, {}, None)
        loss = float(step.run(TensorExamples(images, labels), plan_of(torch.arange(number).split(8))))
        step.write_back()
        step.release()
        found[task] = loss, copy.deepcopy(model.state_dict())
    assert found[0][0] == found[3][0]
    assert all(torch.equal(value, found[3][1][name]) for name, value in found[0][1].items())
    assert found[1][0] != found[2][0]


def test_padding_stays_zero_without_a_guard_if_an_activation_maps_zero_to_another_value():
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Sigmoid(), nn.Conv2d(5, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    step, model, take_step = small_step(backbone, 6)
    assert step.fast_backbone[0].out_channels == 8
    step.begin(model, {}, None)
    for _ in range(20):
        take_step()
    step.write_back()
    images = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(step.fast_model.eval()(images), model.eval()(images), rtol=1e-4, atol=1e-5)


def test_a_step_that_fails_half_way_leaves_no_gradient_behind():
    step, model, take_step = small_step(conv_net(3), 12)
    initial = copy.deepcopy(model.state_dict())

    def train():
        model.load_state_dict(initial)
        step.begin(model, {}, None)
        take_step()
        step.write_back()
        return copy.deepcopy(model.state_dict())

    def stop(_gradient):
        raise RuntimeError("stopped")

    expected = train()
    handle = step.fast_backbone[0].weight.register_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        take_step()
    handle.remove()
    assert step.fast_model.head.weight.grad is not None  # the negative control: there is a gradient to clear
    torch.testing.assert_close(train(), expected)


def test_an_empty_optimizer_state_can_be_loaded_and_the_saved_one_is_that_of_a_plain_optimizer():
    step, model, take_step = small_step(conv_net(3), 12)
    step.begin(model, {}, {"state": {}, "param_groups": []})
    take_step()
    groups = step.optimizer_state()["param_groups"][0]
    assert isinstance(groups["lr"], float)
    assert not groups.get("capturable")


@needs_gpu
def test_the_step_is_captured_and_the_same_seed_gives_the_same_bits(make_learner):
    training = cps.Training(4, cps.Adam(1e-2), cps.Cosine(), batch_size=8)

    def run():
        torch.manual_seed(0)
        backbone = nn.Sequential(odd_resnet(), nn.Dropout(0.2))
        learner = make_learner(backbone, train=training, retrain=training, augment=cps.PadCrop(1), rounds=2)
        steps = set()
        for first in (0, 10):
            learner.learn(make_task(first, shape=(3, 8, 8), images=37))
            steps.add(learner._trainer._step_cache.steps)
        (step,) = steps  # one for all phases and tasks
        sizes = [len(captured._graphs) for captured in step._steps.values()]
        assert sizes == [1] * 4  # before the first batch, full batches, the last full one, the smaller last one
        assert not step._batches._images.any()  # no image is kept
        assert not any(pixels.any() for pixels, _ in step._batches._prepared.values())
        learner.learn(make_task(20, shape=(3, 8, 8), images=29))  # another number of images: steps are captured again
        assert learner._trainer._step_cache.steps is step
        assert [len(captured._graphs) for captured in step._steps.values()] == [1] * 4
        return [learner.fingerprint(task) for task in range(2)]

    assert run() == run()


class Untraceable(nn.Sequential):
    """Code of an unknown module, so its norms are not fused."""


@needs_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile
@pytest.mark.parametrize("is_compiled", [False, True], ids=["captured", "compiled"])
def test_in_bf16_the_same_seed_gives_the_same_bits_and_gradients_are_those_of_cudnn(monkeypatch, is_compiled):
    if is_compiled:
        monkeypatch.setattr("cps.training.cuda.LONG_TRAINING", 1)
    training = cps.Training(2, cps.SGD(0.05), batch_size=16)

    def run(precision=None):
        torch.manual_seed(0)
        fabric = cps.make_fabric(accelerator=ACCELERATOR, precision=precision)
        backbone = Untraceable(odd_resnet()) if is_compiled else odd_resnet()
        learner = cps.Learner(backbone, train=training, retrain=training, rounds=1, fabric=fabric)
        learner.learn(make_task(0, shape=(3, 16, 16), images=64))
        assert learner._trainer._step_cache.steps.is_compiled == is_compiled
        return learner.fingerprint(0), learner.network.subnetworks[0].head

    first, again = run(), run()
    assert first[0] == again[0]
    monkeypatch.setattr(convolution, "MAX_CHANNEL_PRODUCT", 0)
    plain, exact = run(), run("32-true")
    assert plain[0] != first[0]  # other kernels, other bits
    check_gradients(first[1], plain[1], exact[1])
