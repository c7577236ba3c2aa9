"""Fast convolutions: their kernels compute what PyTorch computes, and are used where they are faster."""

import pytest
import torch

from cps.training.cuda.convolution import _prefers_custom_kernel
from gpu.helpers import run_interpreted

SCRIPT = """
import torch
from cps.training.cuda.conv_kernels import convolve, input_gradient, weight_gradient_parts
from cps.training.cuda.strided_conv_kernels import strided_input_gradient
torch.manual_seed(0)
last = {"memory_format": torch.channels_last}
cases = [(8, 24, 8, 3, 1), (24, 48, 7, 3, 2), (24, 48, 8, 3, 2), (40, 88, 6, 1, 2), (9, 33, 9, 5, 1), (8, 70, 9, 5, 3)]
for channels, outputs, size, kernel, stride in cases:
    images = torch.randn(3, channels, size, size).to(**last).requires_grad_()
    weight = torch.randn(outputs, channels, kernel, kernel).to(**last).requires_grad_()
    out = torch.nn.functional.conv2d(images, weight, None, stride, kernel // 2)
    gradient = torch.randn_like(out).contiguous(**last)
    out.backward(gradient)
    close = lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    close(convolve(images.detach(), weight.detach(), stride, kernel // 2), out.detach())
    close(weight_gradient_parts(images.detach(), gradient, kernel, stride, kernel // 2).sum(0), weight.grad)
    if stride == 1:
        close(input_gradient(gradient, weight.detach(), kernel // 2), images.grad)
    elif size % stride == 0:
        close(strided_input_gradient(gradient, weight.detach(), (size, size), stride, kernel // 2), images.grad)
print("agrees")
"""


@pytest.mark.slow
def test_convolution_kernels_and_their_gradients_match_pytorch():
    run_interpreted(SCRIPT)


@pytest.mark.parametrize(("channels", "kernel", "stride", "expected"), [
    (64, 1, 2, True), (63, 1, 1, True), (63, 3, 2, True), (64, 1, 1, False), (64, 3, 2, False), (200, 3, 1, False),
    (512, 1, 2, False),
])  # fmt: skip
def test_custom_kernels_are_used_where_they_are_faster(channels, kernel, stride, expected):
    signal = torch.empty(1, device="meta").expand(128, channels, 32, 32)
    weight = torch.empty(channels, channels, kernel, kernel, device="meta")
    assert _prefers_custom_kernel(weight, stride, signal) == expected
    assert not _prefers_custom_kernel(weight, stride, signal[:1].expand(2**20, -1, -1, -1))  # beyond 32-bit offsets
