"""The batch norm kernels compute what PyTorch computes."""

import pytest

from gpu.helpers import run_interpreted

SCRIPT = """
import torch
import cps.training.cuda.norms
from torch.nn.functional import batch_norm, relu
from cps.training.cuda.fused_norms import FusedBatchNorm, _Normalize
from cps.training.cuda.norms import RunningStatistics, normalize, normalize_backward
torch.manual_seed(0)
norms = cps.training.cuda.norms
cases = [(5, 24, 9, True, True), (3, 88, 4, True, False), (40, 16, 8, False, True), (24, 64, 8, False, False)]
for number, channels, size, has_relu, has_shortcut, norms.MAX_PARTS in [(*case, p) for p in (132, 3) for case in cases]:
    values = lambda: torch.randn(number, channels, size, size).contiguous(memory_format=torch.channels_last)
    signal = (3 * values() + 20 * torch.randn(channels)[:, None, None]).requires_grad_()
    shortcut = values().requires_grad_() if has_shortcut else None
    weight, bias = torch.randn(2, channels).requires_grad_().unbind()
    weight.retain_grad(), bias.retain_grad()
    mean, variance = torch.randn(channels), torch.rand(channels)
    ours = RunningStatistics(mean.clone(), variance.clone(), torch.tensor(4), 0.1)
    assert norms.MAX_PARTS != 3 or number < 5 or norms._Tiling.choose(signal).steps > 1
    counters = torch.zeros(channels, dtype=torch.int32)
    total = batch_norm(signal, mean, variance, weight, bias, training=True)
    total = total + shortcut if has_shortcut else total
    total = relu(total) if has_relu else total
    gradient = values()
    total.backward(gradient)
    close = lambda ours, theirs: torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        done = normalize(signal, weight, bias, ours, counters, 1e-5, shortcut=shortcut, has_relu=has_relu)
        close(done.result, total)
        close(ours.mean, mean), close(ours.variance, variance), close(ours.batches, torch.tensor(5))
        options = {"has_shortcut": has_shortcut, "has_relu": has_relu}
        found = normalize_backward([gradient], done, signal, weight, bias, counters, **options)
        halves = normalize_backward([gradient / 4, 3 * gradient / 4], done, signal, weight, bias, counters, **options)
    expected = signal.grad, weight.grad, bias.grad, shortcut.grad if has_shortcut else None
    assert (found[3] is not None) == has_shortcut
    for one, half, other in zip(found, halves, expected):
        one is None or (close(one, other), close(half, other))
    layer = FusedBatchNorm(channels)
    layer.weight.data, layer.bias.data, layer.num_batches_tracked = weight.detach(), bias.detach(), torch.tensor(4)
    again = [None if value is None else value.detach().requires_grad_() for value in (signal, shortcut)]
    both = _Normalize.apply(*again, layer.weight, layer.bias, layer, has_relu, True)
    torch.autograd.backward(both, [0.25 * gradient, 0.75 * gradient])
    for one, other in zip((again[0].grad, layer.weight.grad, layer.bias.grad), expected):
        close(one, other)
    assert not has_shortcut or close(again[1].grad, shortcut.grad) is None
    broken = signal.detach().index_fill(1, torch.tensor([1]), torch.nan)
    done = normalize(broken, weight, bias, ours, counters, 1e-5, shortcut=shortcut, has_relu=has_relu)
    assert done.result[:, 1].isnan().all() and not done.result[:, 0].isnan().any()
print("agrees")
"""


@pytest.mark.slow
def test_norm_kernels_and_their_gradients_match_pytorch():
    """Means are far from zero, and there are several parts, steps and blocks of channels, some of them partial."""
    run_interpreted(SCRIPT)
