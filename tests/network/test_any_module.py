"""The library works on any module, and refuses what it cannot handle by name."""

from contextlib import nullcontext

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

import cps
from cps.network.draft import Draft
from cps.runtime.devices import full_precision
from samples import ACCELERATOR, ROUNDING, conv_net, make_task


class VisionTransformer(nn.Module):
    """A small transformer with plain linear layers: patches, two blocks, a class token."""

    def __init__(self, dim=16, tokens=4):
        super().__init__()
        self.patches = nn.Conv2d(2, dim, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(0.02 * torch.randn(1, tokens + 1, dim))
        self.blocks = nn.ModuleList([TransformerBlock(dim) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], dim=1) + self.places
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)[:, 0]


class TransformerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        attention = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2) / 4, dim=-1)
        x = x + self.out(attention @ self.value(y))
        return x + self.mlp(self.norm2(x))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16))


def torchvision_resnet18():
    module = torchvision.models.resnet18()
    module.conv1 = nn.Conv2d(2, 64, 3, padding=1, bias=False)
    module.fc = nn.Identity()
    return module


def mobilenet():
    module = torchvision.models.mobilenet_v3_small()
    module.features[0][0] = nn.Conv2d(2, 16, 3, stride=2, padding=1, bias=False)
    return module


def transformer_of_torch():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(2, 16, 4, stride=4)
            self.encoder = layer

        def forward(self, images):
            return self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(dim=1)

    return Encoder()


BACKBONES = {
    "mlp": mlp,
    "plain cnn with biases": conv_net,
    "resnet18(1/3)": lambda: cps.resnet18(2, widths=(4, 8, 12, 16)),
    "resnet32": lambda: cps.resnet32(2),
    "torchvision resnet18": torchvision_resnet18,
    "mobilenet_v3_small": mobilenet,
    "vision transformer": VisionTransformer,
    "torch's transformer": transformer_of_torch,
}


@pytest.mark.filterwarnings("ignore:.*layers without masks")
@pytest.mark.parametrize("name", BACKBONES)
def test_every_kind_of_backbone_learns_prunes_and_never_forgets(make_learner, tmp_path, name):
    torch.manual_seed(0)
    backbone = BACKBONES[name]()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    quick = cps.Training(1, cps.Adam(1e-3), batch_size=16)
    learner = make_learner(backbone, train=quick, retrain=quick)
    tasks = [make_task(10 * index, shape=(2, 8, 8)) for index in range(2)]
    first = learner.learn(tasks[0])
    assert any(not mask.all() for mask in first.masks.values())
    fingerprint = learner.fingerprint(0)
    learner.learn(tasks[1])
    assert learner.fingerprint(0) == fingerprint
    learner.save(tmp_path / "model.cps")
    torch.manual_seed(1)
    loaded = cps.load(tmp_path / "model.cps", BACKBONES[name](), fabric=learner.fabric)
    assert loaded.fingerprint(0) == fingerprint
    assert loaded.predict(tasks[1].test[0]).classes == learner.predict(tasks[1].test[0]).classes
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


def test_depthwise_filters_keep_their_only_input(make_learner):
    class Separable(nn.Module):
        def __init__(self):
            super().__init__()
            self.pointwise = nn.Conv2d(2, 6, 1)
            self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)

        def forward(self, images):
            return torch.relu(self.depthwise(torch.relu(self.pointwise(images)))).flatten(1)

    learner = make_learner(Separable(), pruner=cps.NNrelief(0.6), rounds=3)
    masks = learner.learn(make_task(0)).masks
    assert masks["depthwise.weight"].any()


def tied():
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 72), nn.Linear(72, 72))
    module[2].weight = module[1].weight
    return module


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(72, 8), nn.Linear(72, 8)

    def forward(self, images):
        return self.used(images.flatten(1))


def old_weight_norm():
    with pytest.warns(FutureWarning):
        layer = weight_norm(nn.Conv1d(2, 4, 3))
    return nn.Sequential(nn.Flatten(2), layer, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 4))


def traced():
    return torch.jit.trace(conv_net().eval(), torch.zeros(2, 2, 6, 6))


REFUSED = {
    "a tied weight": (tied, "'1.weight' and '2.weight' are one tied weight"),
    "a layer that never runs": (Unused, "layer 'spare' did not run"),
    "a computed weight": (lambda: nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(72, 4))), "'1' computes"),
    "no shared weight": (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72)), "no Conv2d or Linear"),
    "a lazy layer": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), "lazy"),
    "complex weights": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 4, dtype=torch.complex64)), "complex64"),
    "features that are maps": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3)), r"features of shape \(N, d\)"),
    "several outputs": (lambda: Several(), "one tensor of features"),
    "compiled TorchScript": (traced, "TorchScript"),
    "the wrong channel count": (lambda: conv_net(5), r"cannot process images of shape \(2, 6, 6\)"),
    "a weight that is normed the old way": (old_weight_norm, "'1' computes its weight"),
    "a wrapper of several GPUs": (lambda: nn.DataParallel(conv_net()), "wrapped in DataParallel; pass its .module"),
    "a parameter in a plain list": (lambda: Listed(), "the backbone reads 'scale' by another way than its attribute"),
    "a buffer made when it runs": (lambda: Late(), "the backbone makes 'ramp' when it runs"),
    "an embedding of floats": (lambda: nn.Sequential(nn.Flatten(), nn.Embedding(9, 4), nn.Linear(4, 4)), r"call x.long\(\)"),
}  # fmt: skip


class Listed(nn.Module):
    """Reads a parameter through a list, which holds the same tensor whatever is put in its place."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(72, 4), nn.Parameter(torch.ones(4))
        self.all = [self.scale]

    def forward(self, images):
        return self.layer(images.flatten(1)) * self.all[0]


class Late(nn.Module):
    """Makes a buffer in its first forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 4)

    def forward(self, images):
        if not hasattr(self, "ramp"):
            self.register_buffer("ramp", torch.linspace(0, 1, 4, device=images.device))
        return self.layer(images.flatten(1)) + self.ramp


class InTraining(nn.Module):
    """Returns more in training, as networks with auxiliary heads do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 4)

    def forward(self, images):
        features = self.layer(images.flatten(1))
        return (features, features) if self.training else features


def test_a_backbone_that_returns_more_in_training_is_refused_before_training(make_learner):
    with pytest.raises(TypeError, match="in training the backbone returns tuple.*aux_logits=False"):
        make_learner(InTraining()).learn(make_task(0))


class Uncalled(nn.Module):
    """Reads the weight of a layer without calling it."""

    def __init__(self):
        super().__init__()
        self.called, self.read = nn.Linear(72, 16), nn.Linear(16, 8)

    def forward(self, images):
        return nn.functional.linear(self.called(images.flatten(1)).relu(), self.read.weight)


def swin():
    from torchvision.models.swin_transformer import SwinTransformer

    backbone = SwinTransformer([2, 2], 16, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0)
    backbone.head = nn.Identity()
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.Upsample(16), backbone)


@pytest.mark.filterwarnings("ignore:.*layers without masks")
@pytest.mark.parametrize(("make", "name"), [(Uncalled, "read.weight"), (swin, "2.features.1.0.attn.qkv.weight")])
def test_weights_that_are_read_without_calling_their_layer_are_private(make_learner, tmp_path, caplog, make, name):
    torch.manual_seed(0)
    learner = make_learner(make())
    learner.learn(make_task(0))
    assert f"'{name}' (" in caplog.text
    assert name in learner.network.parts.private
    assert name not in learner.network.weights
    before = learner.fingerprint(0)
    learner.learn(make_task(10))
    assert learner.fingerprint(0) == before
    own = [subnetwork.private[name] for subnetwork in learner.network.subnetworks]
    assert not torch.equal(*own)
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", make(), fabric=learner.fabric)
    assert loaded.fingerprint(0) == before
    loaded.learn(make_task(20))
    assert loaded.fingerprint(0) == before


def test_a_backbone_that_calls_no_layer_is_refused_and_one_that_failed_starts_anew(make_learner):
    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(72, 8)

        def forward(self, images):
            return nn.functional.linear(images.flatten(1), self.read.weight)

    with pytest.raises(ValueError, match="no layer is called, so nothing can be pruned; call 'read'"):
        make_learner(Nothing()).learn(make_task(0))
    learner = make_learner(Uncalled(), watch=lambda at: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        learner.learn(make_task(0))
    learner.watch = None
    learner.learn(make_task(0))
    assert "read.weight" in learner.network.parts.private


class InPlace(nn.Module):
    """Works in place on its input."""

    def __init__(self, is_in_place):
        super().__init__()
        self.layer, self.is_in_place = nn.Conv2d(2, 8, 3), is_in_place

    def forward(self, images):
        images = images.sub_(0.5).mul_(4) if self.is_in_place else (images - 0.5) * 4
        return self.layer(images).relu().mean(dim=(2, 3))


@pytest.mark.parametrize("rotations", [cps.Upright(flips=True), cps.Rotations()], ids=["mirrored", "turned"])
def test_work_in_place_does_not_reach_the_next_look(make_learner, rotations):
    task, said = make_task(0), []
    for is_in_place in (True, False):
        torch.manual_seed(0)
        learner = make_learner(InPlace(is_in_place), rotations=rotations)
        learner.learn(task)
        images = task.test[0].to(learner.network.device)
        given = images.clone()
        said.append((learner.evidence(images)[0].logits, learner.extract(0)(images)))
        assert torch.equal(images, given)
    for ours, plain in zip(*said, strict=True):
        torch.testing.assert_close(ours, plain, **ROUNDING)


def test_layers_that_run_again_in_the_backward_pass_are_learned(make_learner):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(72, 16), nn.Linear(16, 8)

        def forward(self, images):
            hidden = checkpoint(lambda x: self.first(x).relu(), images.flatten(1), use_reentrant=False)
            return self.second(hidden)

    learner = make_learner(Checkpointed())
    learner.learn(make_task(0))
    assert learner.network.density(0) < 1


def test_gradients_that_are_switched_off_outside_are_on_while_learning(make_learner):
    images = make_task(0).test[0]
    usual, without = make_learner(), make_learner()
    usual.learn(make_task(0))
    with torch.no_grad():
        without.learn(make_task(0))
    assert without.predict(images).classes == usual.predict(images).classes
    assert without.fingerprint(0) == usual.fingerprint(0)


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


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 4)

    def forward(self, images):
        return self.layer(images.flatten(1)), images


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_handled_is_refused_by_name(make_learner, what):
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        make_learner(make()).learn(make_task(0))


def test_layers_without_masks_are_private_and_said_so(make_learner):
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


def test_a_module_called_twice_is_handled(make_learner):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.layer = nn.Linear(72, 16), nn.Linear(16, 16)

        def forward(self, images):
            return self.layer(torch.relu(self.layer(self.stem(images.flatten(1)))))

    learner = make_learner(Twice())
    learner.learn(make_task(0))
    before = learner.fingerprint(0)
    learner.learn(make_task(10))
    assert learner.fingerprint(0) == before


def test_weights_the_user_froze_stay_as_they_are(make_learner):
    backbone = conv_net()
    backbone[0].weight.requires_grad_(False)
    backbone[1].bias.requires_grad_(False)
    learner = make_learner(backbone)
    subnetwork = learner.learn(make_task(0))
    assert torch.equal(learner.network.weights["0.weight"].cpu(), backbone[0].weight)
    assert torch.equal(subnetwork.private["1.bias"].cpu(), backbone[1].bias)
    assert not torch.equal(subnetwork.private["1.weight"].cpu(), backbone[1].weight)


def test_zero_rounds_is_cps_frozen(make_learner, monkeypatch):
    """All convolutions are learned with the first task and shared whole; later tasks learn norms and head."""
    learner = make_learner(rounds=0)
    learner.learn(make_task(0))
    shared = {name: value.clone() for name, value in learner.network.weights.items()}
    second = learner.learn(make_task(10))
    assert all(torch.equal(value, shared[name]) for name, value in learner.network.weights.items())
    assert all(mask.all() for mask in second.masks.values())
    first = learner.network.subnetworks[0]
    assert not torch.equal(first.private["1.weight"], second.private["1.weight"])


def test_private_parts_start_from_what_the_backbone_came_with(make_learner, monkeypatch):
    backbone = conv_net()
    with torch.no_grad():
        backbone[1].weight.fill_(3.0)
        backbone[1].running_mean.fill_(0.5)
    learner = make_learner(backbone)
    learner.learn(make_task(0))
    started = []
    original = Draft.__init__

    def note(self, *args, **kwargs):
        original(self, *args, **kwargs)
        started.append({name: value.clone() for name, value in self.private().items()})

    monkeypatch.setattr(Draft, "__init__", note)
    learner.learn(make_task(10))
    assert started[0]["1.weight"].eq(3.0).all()
    assert started[0]["1.running_mean"].eq(0.5).all()


class Counting(nn.Module):
    """Counts its calls in a buffer, in eval mode too, and adds the count to the features."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images):
        self.calls += 1
        return self.layer(images.flatten(1)) + 0 * self.calls


def test_buffers_that_change_in_eval_mode_are_changed_on_copies(make_learner, tmp_path):
    learner = make_learner(Counting())
    learner.learn(make_task(0))
    assert learner.fingerprint(0) == learner.fingerprint(0)
    learner.predict(make_task(0).test[0])
    learner.save(tmp_path / "model.cps")
    assert cps.load(tmp_path / "model.cps", Counting(), fabric=learner.fabric).fingerprint(0) == learner.fingerprint(0)


class Restless(nn.Module):
    """Gives other features each time: a dropout that stays on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 64)

    def forward(self, images):
        return nn.functional.dropout(self.layer(images.flatten(1)), 0.5, training=True)


class Remembering(nn.Module):
    """Keeps a state that is no buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean = nn.Linear(72, 8), 0.0

    def forward(self, images):
        self.mean = 0.9 * self.mean + 0.1 * float(images.mean()) + 0.1
        return self.layer(images.flatten(1)) - self.mean


@pytest.mark.parametrize("kind", [Restless, Remembering])
def test_a_backbone_that_answers_differently_each_time_is_refused(make_learner, kind):
    with pytest.raises(ValueError, match="other features each time"):
        make_learner(kind()).learn(make_task(0))


def test_work_in_place_never_reaches_the_users_images(make_learner):
    backbone = nn.Sequential(nn.ReLU(inplace=True), *conv_net())
    learner = make_learner(backbone)
    task = make_task(0)
    kept = task.train[0].clone()
    learner.learn(task)
    learner.learn(make_task(10))
    learner.predict(task.train[0])
    assert torch.equal(task.train[0], kept)


def test_a_float64_backbone_is_learned(make_learner):
    learner = make_learner(conv_net().double(), fabric=cps.make_fabric(accelerator=ACCELERATOR, precision="32-true"))
    learner.learn(make_task(0))
    before = learner.fingerprint(0)
    learner.learn(make_task(10))
    assert learner.fingerprint(0) == before
    assert next(iter(learner.network.weights.values())).dtype == torch.float64


class Narrow(nn.Module):
    """A backbone whose features are narrower than its weights."""

    def __init__(self):
        super().__init__()
        self.inner = conv_net()

    def forward(self, images):
        return self.inner(images).bfloat16()


def test_features_may_be_narrower_than_the_head(make_learner):
    learner = make_learner(Narrow(), fabric=cps.make_fabric(accelerator=ACCELERATOR, precision="32-true"))
    learner.learn(make_task(0))
    assert learner.predict(make_task(0).test[0]).classes


def test_the_memory_format_of_the_backbone_does_not_matter(make_learner, tmp_path):
    learner = make_learner(cps.resnet18(2, (4, 8, 12, 16)).to(memory_format=torch.channels_last))
    learner.learn(make_task(0, shape=(2, 8, 8)))
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", cps.resnet18(2, (4, 8, 12, 16)), fabric=learner.fabric)
    assert loaded.fingerprint(0) == learner.fingerprint(0)


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


def test_a_wholly_frozen_backbone_learns_heads(make_learner):
    backbone = conv_net().requires_grad_(False)
    learner = make_learner(backbone, rounds=0)
    learner.learn(make_task(0))
    learner.learn(make_task(10))
    assert len(learner.network.subnetworks) == 2


def test_a_resnet_of_equal_widths_works():
    assert cps.resnet18(3, (16, 16, 16, 16))(torch.zeros(2, 3, 16, 16)).shape == (2, 16)


@pytest.mark.parametrize(
    ("backbone", "weights", "kernels"),
    [
        (cps.resnet18(3, (21, 42, 85, 170)), 1_228_466, 153_298),
        (torchvision.models.resnet18(), 11_166_912, 1_392_832),
        (cps.resnet32(), 461_232, 51_248),
    ],
    ids=["ResNet-18(1/3)", "ResNet-18", "ResNet-32"],
)
def test_the_networks_of_the_paper_have_its_sizes(backbone, weights, kernels):
    convolutions = [p for p in backbone.parameters() if p.ndim == 4]
    assert sum(p.numel() for p in convolutions) == weights
    assert sum(p.shape[0] * p.shape[1] for p in convolutions) == kernels


def test_classes_are_learned_in_four_turns_and_found_in_every_turn(make_learner, tmp_path):
    draws = torch.Generator().manual_seed(0)
    patterns = torch.randn(2, 2, 6, 6, generator=draws)
    labels = torch.arange(64) % 2
    images = patterns[labels] + 0.3 * torch.randn(64, 2, 6, 6, generator=draws)
    training = cps.Training(20, cps.Adam(1e-2), batch_size=16)
    for rotations in (cps.Rotations(), cps.Rotations(at_once=True, flips=True)):
        learner = make_learner(rotations=rotations, train=training, retrain=training)
        subnetwork = learner.learn(cps.Task(["a", "b"], train=(images, labels.tolist())))
        assert subnetwork.head["bias"].shape == (8,)
        outputs = learner.evidence(images)[0]
        assert outputs.logits.shape == (64, 2)
        assert (outputs.logits.argmax(1).cpu() == labels).float().mean() > 0.9
        said = torch.stack(
            [learner.network.whole_outputs([torch.rot90(images, k, (2, 3))], 0).features for k in range(4)]
        )
        torch.testing.assert_close(said[0], said[1], rtol=1e-3, atol=1e-4)  # a turned image has the same four turns
        learner.save(tmp_path / "model.cps")
        loaded = cps.load(tmp_path / "model.cps", learner.network.backbone, fabric=learner.fabric)
        assert loaded.fingerprint(0) == learner.fingerprint(0)
        assert loaded.rotations == rotations
        assert loaded.network.subnetworks[0].flips == rotations.flips
        small = learner.extract(0)
        torch.testing.assert_close(small(images.to(learner.network.device)), outputs.logits, **ROUNDING)


def test_a_single_class_is_learned_in_its_four_turns(make_learner):
    learner = make_learner(rotations=cps.Rotations())
    images = make_task(0).train[0][:12]
    assert learner.learn(cps.Task(["bolt"], train=(images, ["bolt"] * 12))).num_rotations == 4
    learner.rotations = cps.Upright()
    learner.learn(make_task(10))
    assert set(learner.predict(images).classes) <= {"bolt", 10, 11}
    with pytest.raises(ValueError, match="rotations=cps.Rotations"):
        learner.learn(cps.Task(["nut"], train=(images, ["nut"] * 12)))


def test_images_that_are_not_square_are_not_turned(make_learner):
    with pytest.raises(ValueError, match="only square images"):
        make_learner(rotations=cps.Rotations()).learn(make_task(0, shape=(2, 6, 8)))


def test_an_image_and_its_mirror_image_get_the_same_answer_where_both_are_looked_at(make_learner):
    images = make_task(0).train[0]
    for rotations, is_same in ((cps.Upright(flips=True), True), (cps.Upright(), False)):
        learner = make_learner(rotations=rotations)
        learner.learn(make_task(0))
        first, second = (learner.evidence(seen)[0].logits for seen in (images, images.flip(-1)))
        assert torch.allclose(first, second, atol=1e-4) == is_same


def test_training_in_bf16_learns_whatever_autocast_is_around_it():
    """A weight that autocast has cast once must not be taken for the same weight after a step."""

    def learned(around):
        torch.manual_seed(0)
        training, losses = cps.Training(12, cps.Adam(1e-2), batch_size=16), []
        fabric = cps.make_fabric(accelerator="cpu", precision="bf16-mixed")
        learner = cps.Learner(conv_net(), rounds=1, train=training, retrain=training, fabric=fabric)
        learner.watch = lambda at: losses.append(at.loss)
        with around:
            learner.learn(make_task(0))
        assert losses[-1] < 0.1 * losses[0]
        return learner.fingerprint(0)

    plain = learned(nullcontext())
    for around in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16)):
        assert learned(around) == plain


def test_precision_and_types_of_the_caller_do_not_reach_the_network(make_learner, caplog):
    plain, other = make_learner(), make_learner()
    plain.learn(make_task(0))
    before = plain.fingerprint(0)
    with torch.autocast(plain.network.device.type, torch.bfloat16):
        assert plain.fingerprint(0) == before
        other.learn(make_task(0))
    assert other.fingerprint(0) == before
    torch.set_default_dtype(torch.float64)
    try:
        wide = make_learner(conv_net().float())
        tasks = [make_task(first) for first in (0, 10)]
        for task in tasks:
            wide.learn(cps.Task(task.classes, (task.train[0].float(), task.train[1])))
        images = tasks[0].test[0].float()
        found = wide.predict(images, reject=0.1)
        assert found.share.dtype == found.confidence.dtype == torch.float32
        assert wide.stream().predict(images).tasks.shape == (len(images),)
        expected = wide.evidence(images)[0].logits
        with full_precision():
            torch.testing.assert_close(wide.extract(0)(images.to(expected.device)), expected, rtol=1e-3, atol=1e-4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert "goes on without" not in caplog.text
    assert wide.network.subnetworks[0].head["weight"].dtype == torch.float32


def test_no_selector_scores_under_an_autocast_of_the_callers(make_learner):
    class Looking(cps.MaxOutput):
        name = "Looking"

        def __call__(self, evidence, statistics, groups):
            seen.append(torch.is_autocast_enabled(groups.device.type))
            return super().__call__(evidence, statistics, groups)

    seen = []
    learner, task = make_learner(selectors=[Looking()]), make_task(0)
    learner.learn(task)
    with torch.autocast(learner.network.device.type, torch.bfloat16):
        learner.predict(task.test[0])
        learner.stream().predict(task.test[0])
        cps.evaluate(learner, [task], group_sizes=[1])
    assert seen == [False] * 3


@pytest.mark.filterwarnings("ignore:.*of the backbone's")
def test_a_backbone_that_looks_its_input_up_in_a_table_has_a_fingerprint(make_learner):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(20, 8), nn.Linear(8, 16)

        def forward(self, words):
            return self.layer(self.table(words.long()).mean(dim=1)).relu()

    words = torch.randint(0, 20, (24, 5), generator=torch.Generator().manual_seed(0))
    learner = make_learner(Words())
    learner.learn(cps.Task([0, 1], train=(words, [0, 1] * 12)))
    before = learner.fingerprint(0)
    learner.learn(cps.Task([2, 3], train=(words.flip(1), [2, 3] * 12)))
    assert learner.fingerprint(0) == before


def test_an_extracted_subnetwork_sees_bytes_as_the_learner_does(make_learner):
    images, labels = make_task(0).train
    pictures = (images.clamp(-2, 2) * 60 + 128).to(torch.uint8)
    learner = make_learner(normalize=cps.Normalize([0.5, 0.4], [0.2, 0.3]))
    learner.learn(cps.Task([0, 1], train=(pictures, labels)))
    expected = learner.evidence(pictures)[0].logits
    with full_precision():
        torch.testing.assert_close(learner.extract(0)(pictures.to(expected.device)), expected, rtol=1e-3, atol=1e-4)
