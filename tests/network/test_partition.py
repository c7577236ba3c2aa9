"""Which tensors of a backbone are shared, which are private, and which backbones cannot be masked."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import cps
from cps.network.partition import copy_like, move_module
from samples import conv_net, make_task


def tied():
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 72), nn.Linear(72, 72))
    module[2].weight = module[1].weight
    return module


def old_weight_norm():
    with pytest.warns(FutureWarning):
        layer = weight_norm(nn.Conv1d(2, 4, 3))
    return nn.Sequential(nn.Flatten(2), layer, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 4))


def traced():
    return torch.jit.trace(conv_net().eval(), torch.zeros(2, 2, 6, 6))


INVALID = {
    "a tied weight": (tied, "'1.weight' and '2.weight' are one tied weight"),
    "a computed weight": (lambda: nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(72, 4))), "'1' computes"),
    "no shared weight": (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72)), "no Conv2d or Linear"),
    "a lazy layer": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), "lazy"),
    "complex weights": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 4, dtype=torch.complex64)), "complex64"),
    "TorchScript": (traced, "TorchScript"),
    "weight norm by a hook": (old_weight_norm, "'1' computes its weight"),
    "a compiled layer": (lambda: nn.Sequential(torch.compile(nn.Flatten()), nn.Linear(72, 4)), "layer '0' is compiled"),
    "DataParallel": (lambda: nn.DataParallel(conv_net()), "wrapped in DataParallel; pass its .module"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", INVALID)
def test_a_backbone_that_cannot_be_masked_raises(make_learner, what):
    make, message = INVALID[what]
    with pytest.raises(ValueError, match=message):
        make_learner(make()).learn(make_task(0))


def test_a_compiled_backbone_is_used_without_compilation(make_learner, tmp_path, caplog):
    torch.manual_seed(0)
    backbone = conv_net()
    with caplog.at_level("INFO", "cps"):
        compiled = make_learner(torch.compile(backbone))
    assert "its original module is used, without torch.compile" in caplog.text
    plain = make_learner(backbone)
    for learner in (compiled, plain):
        learner.learn(make_task(0))
    assert compiled.fingerprint(0) == plain.fingerprint(0)
    compiled.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", torch.compile(conv_net()), fabric=plain.fabric)
    assert loaded.fingerprint(0) == plain.fingerprint(0)


def test_layers_without_masks_are_private_and_a_warning_says_so(make_learner):
    class WithConv1d(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 16, 3)
            self.layer = nn.Linear(16, 4)

        def forward(self, images):
            return self.layer(self.conv(images.flatten(2)).mean(dim=2))

    with pytest.warns(UserWarning, match=r"'conv.weight', 96\); every task keeps its own copy"):
        learner = make_learner(WithConv1d())
    learner.learn(make_task(0))
    before = learner.fingerprint(0)
    learner.learn(make_task(10))
    assert learner.fingerprint(0) == before


def test_expanded_and_aliased_buffers_are_copied(make_learner, tmp_path):
    backbone = conv_net()
    backbone.register_buffer("wide", torch.zeros(1).expand(4))
    backbone.register_buffer("same", backbone.wide)
    learner = make_learner(backbone)
    own = dict(learner.network.backbone.named_buffers())["wide"]
    assert own.stride() == (1,)
    assert own.data_ptr() != backbone.wide.data_ptr()
    learner.learn(make_task(0), checkpoint=tmp_path / "checkpoint.safetensors")
    learner.save(tmp_path / "model.cps")


def test_the_memory_format_of_the_backbone_does_not_matter(make_learner, tmp_path):
    learner = make_learner(cps.resnet18(2, (4, 8, 12, 16)).to(memory_format=torch.channels_last))
    learner.learn(make_task(0, shape=(2, 8, 8)))
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", cps.resnet18(2, (4, 8, 12, 16)), fabric=learner.fabric)
    assert loaded.fingerprint(0) == learner.fingerprint(0)


@pytest.mark.filterwarnings("ignore:.*layers without masks")
def test_private_weights_in_another_layout_have_the_same_fingerprint_in_a_file(make_learner, tmp_path):
    def make():
        layers = nn.Conv2d(2, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    learner = make_learner(make())
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", make(), fabric=learner.fabric)
    assert loaded.fingerprint(0) == learner.fingerprint(0)


def test_a_backbone_in_half_precision_raises(make_learner):
    with pytest.raises(ValueError, match="'0.weight' is in half precision, which overflows"):
        make_learner(nn.Sequential(nn.Linear(8, 16), nn.ReLU()).half())


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (nn.Linear, r"must be an nn.Module, got .* \(the class itself; pass an instance\)"),
        ("small", r"for a backbone by name pass cps.Architecture\('small'\)"),
    ],
)
def test_a_backbone_must_be_a_module(backbone, message):
    with pytest.raises(TypeError, match=message):
        cps.Learner(backbone)


@pytest.mark.parametrize("shape", [(3, 2, 1, 1), (3, 1, 2, 2), (3, 2, 2, 2)])
def test_copy_like_gives_the_strides_of_the_pattern_even_for_1x1_kernels(shape):
    pattern = torch.randn(shape).to(memory_format=torch.channels_last, copy=True)
    value = torch.randn(shape)
    assert copy_like(pattern, value).stride() == pattern.stride()
    assert torch.equal(copy_like(pattern, value), value)


def test_buffers_that_are_the_same_tensor_stay_the_same_on_another_device():
    module = nn.Sequential(conv_net(), nn.Flatten())
    module.register_buffer("first", torch.zeros(4))
    module[1].register_buffer("second", module.first)
    move_module(module, torch.device("meta"))
    assert module.first is module[1].second
    assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"meta"}
