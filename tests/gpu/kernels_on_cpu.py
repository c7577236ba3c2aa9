"""An engine with all of our own kernels, run by Triton's interpreter on the CPU in 32 bits, against plain steps.

Started by a test with TRITON_INTERPRET=1. Only what asks for a GPU is replaced: the gates, and where the rate is.
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
from cps.network.compact.channel_padding import padded
from cps.network.freezing import Kept, bind
from cps.network.partition import put_channels_last
from cps.training.cuda import captured_step as engine
from cps.training.cuda import convolution
from cps.training.cuda.accelerated_copy import AcceleratedCopy
from cps.training.cuda.device_batches import EpochPlan
from cps.training.cuda.fused_norms import joined
from cps.training.cuda.optimizer_step import Update

OPTIMIZERS = (
    cps.SGD(0.05, weight_decay=1e-2),
    cps.Adam(1e-2, weight_decay=1e-2),
    cps.AdamW(1e-2, weight_decay=0.1),
)
FACTORS = (1.0, 0.5, 0.25)
ORDER = (torch.arange(4), torch.arange(4, 8), torch.arange(8, 10))


def joined_twin(backbone, pixels, **_):
    whole = padded(backbone, pixels, least=1)
    whole.inner = joined(whole.inner)
    convolution.quicken(whole.inner)
    put_channels_last(whole)
    return AcceleratedCopy(whole, whole.inner, True)


work_in_one = Update.work_in_one


def with_a_rate_in_memory(update):
    """As on a GPU, from where kernels read it."""
    update.optimizer.param_groups[0]["lr"] = torch.tensor(update.rate)
    work_in_one(update)


def by_plain_steps(model, start, training, guard, images, labels):
    model.load_state_dict(start)
    model.train()
    optimizer = training.optimizer([value for value in model.parameters() if value.requires_grad])
    protect = bind(guard, dict(model.backbone.named_parameters()))
    for batch, factor in zip(ORDER, FACTORS, strict=True):
        optimizer.param_groups[0]["lr"] = training.optimizer.lr * factor
        model(images[batch], labels[batch], training.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        protect()
    return model.state_dict()


def check(optimizer):
    torch.manual_seed(0)
    images, labels = torch.randn(10, 3, 6, 6), torch.arange(10) % 4
    backbone = ResNet(3, (5, 7), 1, shortcuts="convolution", last_relu=True, fan="fan_in")
    backbone.blocks[0].conv1.weight.requires_grad_(False)
    backbone.blocks[1].norm1.weight.requires_grad_(False)
    model = Classifier(backbone, nn.Linear(7, 4))
    training = cps.Training(1, optimizer, batch_size=4)
    built = engine.CapturedStep(model, images[:4], training, BatchTransform(), is_bf16=False, is_long=False)
    assert len(built.flat.written) == 5  # of six convolutions, one of them frozen
    assert built.update._in_one is not None
    for task in range(2):  # the second on what the first has left
        start = {name: value + 0.05 * torch.rand_like(value.float()) for name, value in model.state_dict().items()}
        start = {name: start[name].to(value.dtype) for name, value in model.state_dict().items()}
        weight = start["backbone.blocks.1.conv2.weight"]
        taken = torch.rand(*weight.shape[:2], 1, 1) < (0.5, 1.1)[task]
        guard = {"blocks.1.conv2.weight": Kept(taken, weight.clone(), torch.zeros_like(taken))}
        expected = by_plain_steps(copy.deepcopy(model), start, training, guard, images, labels)
        model.load_state_dict(start)
        built.begin(model, guard, None)
        built.run(TensorExamples(images, labels), EpochPlan(ORDER, torch.zeros(10, 0), FACTORS, [1.0] * 3))
        built.settle()
        torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=1e-4, atol=1e-4)
        assert (model.state_dict()["head.weight"] - start["head.weight"]).abs().max() > 1e-2  # something was learned


if __name__ == "__main__":
    with (
        mock.patch.object(convolution, "runs_in_bf16", return_value=True),
        mock.patch.object(convolution, "KERNEL_TYPE", torch.float32),
        mock.patch.object(engine, "accelerated_copy", joined_twin),
        mock.patch.object(Update, "work_in_one", with_a_rate_in_memory),
    ):
        for each in OPTIMIZERS:
            check(each)
    print("agrees")
