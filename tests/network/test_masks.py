"""Masks: packing, masked weights, and the masks that a pruner may return."""

import pytest
import torch

from cps.network.masks import BITS, masked, pack, unpack
from samples import make_task


def test_masks_round_trip_through_packing():
    draws = torch.Generator().manual_seed(0)
    for shape in ((1,), (3, 5), (7, 3, 1, 1), (16, 16)):
        mask = torch.rand(shape, generator=draws) > 0.5
        assert torch.equal(unpack(pack(mask), shape), mask)
        assert pack(mask).numel() == -(-mask.numel() // 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_masked_weight_keeps_its_bits_and_layout_and_has_positive_zeros_elsewhere(dtype, layout):
    weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype, memory_format=layout)
    weight[0], weight[1], weight[2], weight[3] = -0.0, torch.inf, torch.nan, -1.0
    mask = torch.arange(24).reshape(6, 4, 1, 1) % 2 == 0
    found, expected = masked(weight, mask), torch.where(mask, weight, torch.zeros((), dtype=dtype))
    bits = BITS[found.element_size()]
    assert torch.equal(found.view(bits), expected.view(bits))
    assert not found.masked_select(~mask).signbit().any()
    assert found.masked_select(mask)[:9].signbit().all()
    assert found.stride() == weight.stride()


def test_a_pruner_that_omits_a_layer_raises(make_learner):
    class Omitting:
        def __call__(self, backbone, masks, batches):
            return {name: masks[name] for name in list(masks)[1:]}

    with pytest.raises(ValueError, match="every weight"):
        make_learner(pruner=Omitting()).learn(make_task(0))


@pytest.mark.parametrize(
    "mask_of",
    [lambda w, m: m & (w.abs() > 0.05), lambda w, m: m.float(), lambda w, m: m[:, :1], lambda w, m: None],
    ids=["one per weight", "floats", "too few", "None"],
)
def test_a_pruner_that_returns_masks_of_another_shape_or_type_raises(make_learner, mask_of):
    def prune(backbone, masks, batches):
        weights = dict(backbone.named_parameters())
        return {name: mask_of(weights[name].detach(), mask) for name, mask in masks.items()}

    with pytest.raises(ValueError, match=r"bool mask of shape \(8, 2, 1, 1\) for '0.weight'"):
        make_learner(pruner=prune).learn(make_task(0))
