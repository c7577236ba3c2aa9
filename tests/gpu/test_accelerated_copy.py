"""The gradients of custom kernels are compared with PyTorch's before they train."""

from contextlib import nullcontext

import pytest
import torch

from cps.training.cuda.accelerated_copy import accelerated_copy, check_gradients
from gpu.helpers import odd_resnet, small_step


@pytest.mark.parametrize("wrong", ["sign", "missing", "nan", "one layer"])
def test_wrong_gradients_of_custom_kernels_raise(wrong):
    torch.manual_seed(0)
    exact = {name: torch.randn(8, 8) for name in "abc"}
    noise = {"a": 0.4, "b": 0.1, "c": 0.02}  # the error of bf16: large in layers near the images, smaller later
    plain, custom = ({name: value + noise[name] * torch.randn(8, 8) for name, value in exact.items()} for _ in range(2))
    check_gradients(custom, plain, exact)  # the negative control
    if wrong == "missing":
        del custom["b"]
    else:
        custom["b"] = {"sign": -custom["b"], "nan": custom["b"] * torch.nan, "one layer": custom["b"] * 1.4}[wrong]
    with pytest.raises(RuntimeError, match="custom kernels do not agree"):
        check_gradients(custom, plain, exact)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_captured_step_compares_its_gradients_with_those_of_pytorch(is_wrong):
    step, model, _ = small_step(odd_resnet(), 30)
    images = torch.randn(8, 3, 8, 8)
    step.begin(model, {}, None)
    plain = accelerated_copy(model.backbone, images[:2], is_bf16=True, has_custom_kernels=False)
    if is_wrong:
        step.fast_backbone.blocks[0].conv1.register_full_backward_hook(lambda _, found, __: (-2 * found[0],))
    with pytest.raises(RuntimeError, match="do not agree .*stem") if is_wrong else nullcontext():
        step._check_gradients(step._with_head(plain), images)
