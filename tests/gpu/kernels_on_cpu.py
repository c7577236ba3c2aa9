"""Compare a captured step that uses all custom kernels with plain steps, in float32 on the CPU.

A test runs this with TRITON_INTERPRET=1. Only the checks for a GPU are replaced, and where the learning rate is stored.
"""

import copy
from unittest import mock

import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.network.backbones import ResNet
from cps.network.classifier import Classifier
from cps.network.compact.channel_padding import pad_channels
from cps.network.freezing import Protected, make_restore
from cps.network.partition import put_channels_last
from cps.training.cuda import captured_step, convolution
from cps.training.cuda.accelerated_copy import AcceleratedCopy
from cps.training.cuda.fused_norms import fuse_norms
from cps.training.cuda.optimizer_step import OptimizerStep
from cps.training.steps import EpochPlan

OPTIMIZERS = (
    cps.SGD(0.05, weight_decay=1e-2),
    cps.Adam(1e-2, weight_decay=1e-2),
    cps.AdamW(1e-2, weight_decay=0.1),
)
FACTORS = (1.0, 0.5, 0.25)
ORDER = (torch.arange(4), torch.arange(4, 8), torch.arange(8, 10))


def fused_copy(backbone, pixels, **_):
    module = pad_channels(backbone, pixels, min_channels=1)
    module.inner = fuse_norms(module.inner)
    convolution.use_fast_convolutions(module.inner)
    put_channels_last(module)
    return AcceleratedCopy(module, module.inner, True)


use_custom_kernel = OptimizerStep.use_custom_kernel


def use_custom_kernel_with_rate_in_memory(optimizer_step):
    """Let kernels read the learning rate from memory, as on a GPU."""
    optimizer_step.optimizer.param_groups[0]["lr"] = torch.tensor(optimizer_step.rate)
    use_custom_kernel(optimizer_step)


def train_plainly(model, start, training, guard, images, labels):
    model.load_state_dict(start)
    model.train()
    optimizer = training.optimizer([value for value in model.parameters() if value.requires_grad])
    restore = make_restore(guard, dict(model.backbone.named_parameters()))
    for batch, factor in zip(ORDER, FACTORS, strict=True):
        optimizer.param_groups[0]["lr"] = training.optimizer.lr * factor
        model(images[batch], labels[batch], training.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        restore()
    return model.state_dict()


def check(optimizer):
    torch.manual_seed(0)
    images, labels = torch.randn(10, 3, 6, 6), torch.arange(10) % 4
    backbone = ResNet(3, (5, 7), 1, shortcuts="convolution", last_relu=True, fan="fan_in")
    backbone.blocks[0].conv1.weight.requires_grad_(False)
    backbone.blocks[1].norm1.weight.requires_grad_(False)
    model = Classifier(backbone, nn.Linear(7, 4))
    training = cps.Training(1, optimizer, batch_size=4)
    step = captured_step.CapturedStep(model, images[:4], training, BatchTransform(), is_bf16=False)
    assert len(step.flat.direct) == 5  # of six convolutions, one of them frozen
    assert step.optimizer_step.has_custom_kernel
    for task in range(2):  # the second one starts from the state that the first one left
        start = {name: value + 0.05 * torch.rand_like(value.float()) for name, value in model.state_dict().items()}
        start = {name: start[name].to(value.dtype) for name, value in model.state_dict().items()}
        weight = start["backbone.blocks.1.conv2.weight"]
        taken = torch.rand(*weight.shape[:2], 1, 1) < (0.5, 1.1)[task]
        guard = {"blocks.1.conv2.weight": Protected(taken, weight.clone(), torch.zeros_like(taken))}
        expected = train_plainly(copy.deepcopy(model), start, training, guard, images, labels)
        model.load_state_dict(start)
        step.begin(model, guard, None)
        step.run(TensorExamples(images, labels), EpochPlan(ORDER, torch.zeros(10, 0), FACTORS, [1.0] * 3))
        step.write_back()
        torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=1e-4, atol=1e-4)
        assert (model.state_dict()["head.weight"] - start["head.weight"]).abs().max() > 1e-2  # it was trained


if __name__ == "__main__":
    with (
        mock.patch.object(convolution, "is_cuda_autocast", return_value=True),
        mock.patch.object(convolution, "KERNEL_DTYPE", torch.float32),
        mock.patch.object(captured_step, "accelerated_copy", fused_copy),
        mock.patch.object(OptimizerStep, "use_custom_kernel", use_custom_kernel_with_rate_in_memory),
    ):
        for each in OPTIMIZERS:
            check(each)
    print("agrees")
