"""The loss of a head on fixed features."""

import torch
from torch import nn

import cps
from cps.methods.blocks.teacher import frozen
from cps.methods.expansion.head_loss import HeadLoss
from samples import conv_net


def test_the_logits_are_divided_and_only_the_head_has_gradients():
    torch.manual_seed(0)
    backbone, head = conv_net(), nn.Linear(12, 3)
    pixels, labels = torch.randn(6, 2, 6, 6), torch.arange(6) % 3
    with frozen(backbone) as fixed:
        loss = HeadLoss(head, fixed, 5.0).train()(pixels, labels, cps.CrossEntropy())
        loss.backward()
        torch.testing.assert_close(loss, nn.functional.cross_entropy(head(backbone(pixels)) / 5, labels))
    assert head.weight.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in backbone.parameters())
    assert backbone[1].num_batches_tracked == 0
