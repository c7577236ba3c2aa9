"""How tensors lie in memory, on which device, and at which precision: none of it reaches an answer."""

import pytest
import torch
from torch import nn

import cps
from cps.network.backbone_checks import has_place_for
from cps.network.masks import BITS, masked
from cps.network.partition import copy_like, move
from samples import conv_net, make_task


class Transposed:
    """A pruner that leaves every connection on, in masks that lie in memory the other way round."""

    def __call__(self, backbone, masks, batches):
        return {name: mask.transpose(0, 1).contiguous().transpose(0, 1) for name, mask in masks.items()}


def test_a_pruners_layout_of_its_masks_does_not_change_the_layout_of_weights(make_learner, tmp_path):
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 8))
    learner = make_learner(backbone, pruner=Transposed())
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", backbone, pruner=Transposed(), fabric=learner.fabric)
    assert not learner.network.subnetworks[0].masks["1.weight"].is_contiguous()
    strides = [{name: v.stride() for name, v in each.network.tensors_of(0).items()} for each in (learner, loaded)]
    assert strides[0] == strides[1]
    assert loaded.fingerprint(0) == learner.fingerprint(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_masked_weight_has_its_own_bits_where_on_positive_zeros_elsewhere_and_its_layout(dtype, layout):
    weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype, memory_format=layout)
    weight[0], weight[1], weight[2], weight[3] = -0.0, torch.inf, torch.nan, -1.0
    mask = torch.arange(24).reshape(6, 4, 1, 1) % 2 == 0
    found, expected = masked(weight, mask), torch.where(mask, weight, torch.zeros((), dtype=dtype))
    bits = BITS[found.element_size()]
    assert torch.equal(found.view(bits), expected.view(bits))
    assert not found.masked_select(~mask).signbit().any()
    assert found.masked_select(mask)[:9].signbit().all()
    assert found.stride() == weight.stride()


@pytest.mark.parametrize("shape", [(3, 2, 1, 1), (3, 1, 2, 2), (3, 2, 2, 2)])
def test_what_is_sealed_lies_as_what_is_read_from_a_file_kernels_of_one_pixel_too(shape):
    read = torch.randn(shape).to(memory_format=torch.channels_last, copy=True)
    sealed = torch.randn(shape)
    assert copy_like(read, sealed).stride() == read.stride()
    assert torch.equal(copy_like(read, sealed), sealed)


def test_buffers_that_are_one_tensor_stay_one_on_another_device():
    module = nn.Sequential(conv_net(), nn.Flatten())
    module.register_buffer("first", torch.zeros(4))
    module[1].register_buffer("second", module.first)
    move(module, torch.device("meta"))
    assert module.first is module[1].second
    assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"meta"}


def test_a_table_has_no_place_for_noise_and_other_layers_have():
    noise = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.values = nn.Parameter(torch.randn(20, 8))

        def forward(self, words):
            return self.values[words.long() * 100].mean(dim=1)

    assert not has_place_for(Table(), noise)
    assert has_place_for(nn.Linear(5, 2), noise)
    assert has_place_for(nn.Linear(7, 2), noise), "what fails for another reason fails where it is used"
