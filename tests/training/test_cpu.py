"""The training step on a CPU: fused optimizers, the channels-last layout, and layers that stay in float32."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.network.classifier import Classifier
from cps.network.partition import named_tensors, set_tensors
from cps.runtime.devices import has_fast_bfloat16
from cps.training.cpu import speed_up
from cps.training.steps import EpochPlan, PlainSteps
from samples import conv_net, make_task


@pytest.mark.parametrize("setting", [cps.SGD(0.1), cps.Adam(), cps.AdamW()], ids=str)
def test_an_optimizer_updates_all_parameters_in_one_operation(setting):
    model = conv_net()
    optimizer = setting(model.parameters())
    speed_up(model, optimizer)
    assert optimizer.param_groups[0]["fused"] is True


def test_an_optimizer_that_was_told_how_to_update_is_left_alone():
    model = conv_net()
    optimizers = [
        torch.optim.Adam(model.parameters(), foreach=True),
        torch.optim.Adam(model.parameters(), differentiable=True),
        torch.optim.RMSprop(model.parameters()),
    ]
    for optimizer in optimizers:
        speed_up(model, optimizer)
        assert not optimizer.param_groups[0].get("fused")


@pytest.mark.parametrize("setting", [cps.SGD(0.1), cps.Adam(), cps.AdamW()], ids=str)
def test_a_state_of_another_layout_continues_as_if_training_had_not_stopped(setting):
    """A fused optimizer of torch reads memory without regard to layouts; model files and checkpoints keep none."""
    torch.manual_seed(0)
    model = Classifier(conv_net(), nn.Linear(12, 2))
    examples = TensorExamples(torch.randn(16, 2, 6, 6), torch.arange(16) % 2)
    plan = EpochPlan(torch.arange(16).split(8), torch.zeros(16, 0), [1.0] * 2, [1.0] * 2)
    fabric = cps.make_fabric(accelerator="cpu", precision="32-true")

    def train(model, state):
        steps = PlainSteps(model, cps.Training(1, setting), fabric, BatchTransform())
        steps.begin(model.train(), {}, state)
        steps.run(examples, plan)
        return steps

    whole = copy.deepcopy(model)
    steps = train(whole, None)
    resumed = copy.deepcopy(model)
    set_tensors(resumed, named_tensors(whole))
    steps.run(examples, plan)
    steps.release()
    state = train(model, None).optimizer_state()
    laid_out = {name: value for name, value in state["state"][0].items() if torch.is_tensor(value) and value.ndim == 4}
    assert laid_out  # the state of the first convolution
    assert not any(value.is_contiguous() for value in laid_out.values())
    as_in_a_file = {
        index: {name: value.contiguous() if torch.is_tensor(value) else value for name, value in entries.items()}
        for index, entries in state["state"].items()
    }
    train(resumed, {**state, "state": as_in_a_file}).release()
    for value, expected in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(value, expected)


def test_after_training_a_model_has_the_layout_that_it_had_before():
    model = conv_net()
    layouts = {name: value.stride() for name, value in named_tensors(model).items()}
    values = {name: value.clone() for name, value in named_tensors(model).items()}
    with speed_up(model, torch.optim.SGD(model.parameters())):
        assert {name: value.stride() for name, value in named_tensors(model).items()} != layouts
    assert {name: value.stride() for name, value in named_tensors(model).items()} == layouts
    assert all(torch.equal(value, values[name]) for name, value in named_tensors(model).items())


def test_gradients_reach_norm_layers_in_the_layout_of_their_input():
    """The gradient of a mean over pixels has another layout, which shortcuts would pass on to all blocks."""
    torch.manual_seed(0)
    model = cps.resnet32()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    layouts = []
    for norm in norms:
        norm.register_full_backward_hook(
            lambda _module, _before, after: layouts.append(after[0].is_contiguous(memory_format=torch.channels_last))
        )
    with speed_up(model, torch.optim.SGD(model.parameters())):
        model(images).square().sum().backward()
    assert len(layouts) == len(norms)
    assert all(layouts)
    model.zero_grad()
    layouts.clear()
    model(images).square().sum().backward()
    assert not all(layouts)  # the negative control


def test_layers_that_gain_nothing_by_bfloat16_compute_in_float32():
    large, small = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
    strided, depthwise = (nn.Conv2d(16, 16, 3, stride=stride, padding=1, groups=16) for stride in (2, 1))
    model = nn.ModuleList([large, small, strided, depthwise, nn.Linear(8, 8), nn.Linear(512, 512)])
    speed_up(model, torch.optim.SGD(model.parameters()))
    maps, rows = torch.randn(8, 16, 64, 64), torch.randn(16, 512)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [layer(maps) for layer in (large, strided, depthwise)]
        outputs += [small(maps[:1, :, :8, :8].bfloat16()), model[4](rows[:, :8]), model[5](rows)]
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError, match="shapes"):
            model[4](rows)  # two errors must not leave autocast disabled
        assert torch.is_autocast_enabled("cpu")
    low, full = torch.bfloat16, torch.float32
    assert [output.dtype for output in outputs] == [low, full, low, full, full, low]
    assert model[5](rows).dtype == full
    assert not torch.is_autocast_enabled("cpu")


def test_training_leaves_no_hooks_behind(make_learner):
    learner = make_learner()
    seen = []
    learner.on_epoch = lambda _: seen.append(_hooks(learner))
    learner.learn(make_task(0))
    assert max(seen) > 0
    assert _hooks(learner) == 0


def test_predictions_while_a_task_is_learned_are_those_of_before(make_learner):
    """The hooks are on the one backbone, which predictions of earlier tasks use too."""
    learner = make_learner(fabric=cps.make_fabric(accelerator="cpu", precision="bf16-mixed"))
    learner.learn(make_task(0))
    images, before, seen = make_task(0).test[0], learner.fingerprint(0), []
    logits = learner.network.full_outputs([images], 0).logits

    def predict(_):
        torch.testing.assert_close(learner.network.full_outputs([images], 0).logits, logits, rtol=0, atol=0)
        seen.append(learner.fingerprint(0))

    learner.on_epoch = predict
    learner.learn(make_task(10))
    assert seen == [before] * 4


def _hooks(learner):
    modules = list(learner.network.backbone.modules())
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)


def gradient_after_poison(layer, pixels, *, is_prepared):
    """Return the gradient of a layer's weight in bfloat16, where memory that was just freed holds NaN."""
    model = nn.Sequential(layer).to(memory_format=torch.channels_last)
    hooks = speed_up(model, torch.optim.SGD(model.parameters(), lr=0.1)) if is_prepared else nullcontext()
    poison = [torch.full((layer.weight.numel() // part,), torch.nan) for part in (1, 2, 1, 2)]
    del poison
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model(pixels).float().square().sum().backward()
    return layer.weight.grad


@pytest.mark.skipif(not has_fast_bfloat16(), reason="bfloat16 is emulated")
def test_weights_that_only_meet_padding_have_no_gradient():
    """The last stage of a ResNet on small images: oneDNN leaves the gradients of such weights uninitialised."""
    pixels = torch.randn(16, 256, 1, 1)
    found = {
        is_prepared: [
            gradient_after_poison(nn.Conv2d(256, 512, 3, 2, 1, bias=False), pixels, is_prepared=is_prepared)
            for _ in range(20)
        ]
        for is_prepared in (True, False)
    }
    assert all(gradient[:, :, 0].eq(0).all() for gradient in found[True])
    if all(gradient[:, :, 0].eq(0).all() for gradient in found[False]):  # the control
        pytest.xfail("this version of torch has no such gradients: remove _exceeds")
