"""Fused batch norm layers compute the same, and only code that is safe to trace is fused."""

import copy

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.network.backbones import large_resnet18, resnet18_third
from cps.network.classifier import Classifier
from cps.training.cuda.accelerated_copy import check_gradients
from cps.training.cuda.captured_step import CapturedStep
from cps.training.cuda.fused_norms import FusedBatchNorm, _is_traceable, fuse_norms
from gpu.helpers import needs_gpu, plan_of
from samples import ACCELERATOR


@pytest.mark.parametrize(
    "make", [cps.resnet18, cps.resnet32, resnet18_third, large_resnet18, lambda: cps.SmallConvNet(3)]
)
def test_every_layer_of_our_own_backbones_is_known_to_be_traceable(make):
    """`TRACEABLE` compares the names of modules as text, so moving the backbones must not turn the fast path off."""
    assert all(_is_traceable(layer) for layer in make().modules())


@pytest.mark.parametrize(
    ("make", "size", "norms", "additions", "relus", "pairs"),
    [
        (resnet18_third, 16, 20, 8, 17, 8),
        (cps.resnet32, 8, 31, 15, 16, 15),
        (large_resnet18, 64, 20, 8, 17, 7),  # a pooling layer reads the stem
        (lambda: cps.SmallConvNet(3), 8, 3, 0, 3, 0),
    ],
)
def test_fused_norms_compute_the_same_under_the_same_names(make, size, norms, additions, relus, pairs):
    backbone, images = make(), torch.randn(4, 3, size, size)
    fused = fuse_norms(copy.deepcopy(backbone))
    calls = [node for node in fused.graph.nodes if node.target in dict(fused.named_modules())]
    calls = [node for node in calls if isinstance(fused.get_submodule(node.target), FusedBatchNorm)]
    assert len(calls) == norms
    assert sum(node.args[1:2] not in ((), (None,)) for node in calls) == additions
    assert sum(node.args[2:3] == (True,) for node in calls) == relus
    assert sum(node.args[3:] == (True,) for node in calls) == pairs
    for mode in (True, False):
        torch.testing.assert_close(fused.train(mode)(images), backbone.train(mode)(images))
    ours, theirs = fused.state_dict(), backbone.state_dict()
    assert list(ours) == list(theirs)
    torch.testing.assert_close(dict(ours), dict(theirs))  # including the running statistics


def test_norms_are_fused_only_where_tracing_is_safe():
    """Code that branches at random would branch once, when it is traced, and never again."""

    class Random(nn.Sequential):
        def forward(self, images):
            return super().forward(images) if torch.rand(()) < 0.5 else images

    layers = [nn.BatchNorm2d(3), nn.ReLU()]
    assert fuse_norms(nn.Sequential(*layers)) is not None
    hooked = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    hooked[0].register_forward_hook(lambda layer, inputs, output: output + 1)
    assert fuse_norms(hooked) is None
    unused = large_resnet18()
    unused.extra = nn.Linear(2, 2)  # the graph would not have this name
    assert fuse_norms(unused) is None
    shared = nn.Conv2d(3, 3, 1)
    assert fuse_norms(nn.Sequential(shared, nn.BatchNorm2d(3), shared)) is None  # its gradient is a sum of two
    assert fuse_norms(Random(*layers)) is None
    assert fuse_norms(nn.Sequential(nn.BatchNorm2d(3, momentum=None))) is None


def test_a_fused_norm_raises_for_one_value_per_channel_as_pytorch_does(monkeypatch):
    monkeypatch.setattr("cps.training.cuda.convolution.is_cuda_autocast", lambda signal: True)
    norm = fuse_norms(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.randn(1, 3, 1, 1))


@needs_gpu
def test_fused_norms_train_as_plain_ones_do():
    """In bf16, so only nearly: no further from full precision than plain ones, within a factor."""
    torch.manual_seed(0)
    device = torch.device(ACCELERATOR)
    images, labels = torch.randn(32, 3, 16, 16, device=device), torch.arange(32, device=device) % 4
    model = Classifier(resnet18_third().to(device), nn.Linear(170, 4).to(device))
    initial, losses, moved = copy.deepcopy(model.state_dict()), [], []
    for has_custom_kernels, is_bf16 in ((True, True), (False, True), (False, False)):
        training = cps.Training(1, cps.SGD(0.01), batch_size=32)
        options = {"is_bf16": is_bf16, "has_custom_kernels": has_custom_kernels}
        step = CapturedStep(model, images, training, BatchTransform(), **options)
        assert (step.bf16_weights is not None) == has_custom_kernels
        model.load_state_dict(initial)
        step.begin(model, {}, None)
        plan = plan_of([torch.arange(32)] * 8)
        losses.append(float(step.run(TensorExamples(images.repeat(8, 1, 1, 1), labels.repeat(8)), plan)))
        step.write_back()
        moved.append({name: value.detach() - initial[name] for name, value in model.named_parameters()})
        assert int(model.backbone.norm.num_batches_tracked) == 8
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    check_gradients(*moved)
