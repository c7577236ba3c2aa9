"""A backbone that cannot be used is rejected before training, with the reason."""

import pytest
import torch
from torch import nn

import cps
from cps.network.backbone_checks import accepts_noise, check_forward
from samples import conv_net, make_task


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(72, 8), nn.Linear(72, 8)

    def forward(self, images):
        return self.used(images.flatten(1))


class Listed(nn.Module):
    """Reads a parameter through a list, which keeps the old tensor when the attribute is replaced."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(72, 4), nn.Parameter(torch.ones(4))
        self.all = [self.scale]

    def forward(self, images):
        return self.layer(images.flatten(1)) * self.all[0]


class Late(nn.Module):
    """Creates a buffer in its first forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 4)

    def forward(self, images):
        if not hasattr(self, "ramp"):
            self.register_buffer("ramp", torch.linspace(0, 1, 4, device=images.device))
        return self.layer(images.flatten(1)) + self.ramp


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 4)

    def forward(self, images):
        return self.layer(images.flatten(1)), images


class Named(Several):
    def forward(self, images):
        features, maps = super().forward(images)
        return {"last_hidden_state": maps, "pooler_output": features}


class OneSize(nn.Module):
    """Asserts the size of its images, as networks of timm do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 4)

    def forward(self, images):
        torch._assert(images.shape[-1] == 8, "images must be 8 wide")
        return self.layer(images.flatten(1))


def conv1d():
    return nn.Sequential(nn.Flatten(2), nn.Conv1d(2, 4, 3), nn.Flatten())


INVALID = {
    "a layer that never runs": (Unused, "layer 'spare' does not run in the forward pass"),
    "features that are maps": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3)), r"features of shape \(N, d\)"),
    "several outputs": (Several, "one tensor of features"),
    "the wrong channel count": (lambda: conv_net(5), r"cannot process images of shape \(2, 6, 6\)"),
    "another size than the one it asserts": (OneSize, r"cannot process images of shape \(2, 6, 6\): images must be 8 wide"),
    "a parameter in a plain list": (Listed, "the backbone does not read 'scale' from its attribute"),
    "a buffer made in the first forward pass": (Late, "the backbone creates 'ramp' in its first forward pass"),
    "outputs by name, as of Hugging Face": (Named, r"got dict; wrap it .* returns self.backbone\(images\).pooler_output"),
    "a tuple of outputs": (Several, r"got tuple; wrap it in a module whose forward returns self.backbone\(images\)\[0\]"),
    "only one-dimensional convolutions": (conv1d, r"nn.Conv2d\(a, b, \(1, k\)\), and pass images\[:, :, None\]"),
    "an embedding of floats": (lambda: nn.Sequential(nn.Flatten(), nn.Embedding(9, 4), nn.Linear(4, 4)), r"call x.long\(\)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", INVALID)
def test_a_backbone_that_cannot_be_used_raises_before_training(make_learner, what):
    make, message = INVALID[what]
    with pytest.raises(ValueError, match=message):
        make_learner(make()).learn(make_task(0))


def test_the_recipe_for_one_dimensional_convolutions_gives_the_same_features(make_learner):
    torch.manual_seed(0)
    narrow, wide = nn.Conv1d(2, 4, 3), nn.Conv2d(2, 4, (1, 3))
    wide.load_state_dict(
        {name: value.reshape(getattr(wide, name).shape) for name, value in narrow.state_dict().items()}
    )
    signals = torch.randn(24, 2, 9)
    torch.testing.assert_close(wide(signals[:, :, None]).flatten(1), narrow(signals).flatten(1))
    learner = make_learner(nn.Sequential(wide, nn.Flatten()))
    learner.learn(cps.Task([0, 1], train=(signals[:, :, None], [0, 1] * 12)))
    assert len(learner.predict(signals[:, :, None])) == 24


class InTraining(nn.Module):
    """Returns a tuple in training mode, as networks with auxiliary heads do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 4)

    def forward(self, images):
        features = self.layer(images.flatten(1))
        return (features, features) if self.training else features


def test_a_backbone_with_other_outputs_in_training_mode_raises_before_training(make_learner):
    with pytest.raises(
        TypeError, match="in training mode the backbone must return one tensor of features, got tuple.*aux_logits=False"
    ):
        make_learner(InTraining()).learn(make_task(0))


class Uncalled(nn.Module):
    """Reads the weight of a layer without calling it."""

    def __init__(self):
        super().__init__()
        self.called, self.read = nn.Linear(72, 16), nn.Linear(16, 8)

    def forward(self, images):
        return nn.functional.linear(self.called(images.flatten(1)).relu(), self.read.weight)


class MatrixProduct(nn.Linear):
    """Multiplies by its weight without F.linear."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.called, self.read = nn.Linear(72, 16), MatrixProduct(16, 8)

    def forward(self, images):
        return self.read(self.called(images.flatten(1)).relu())


def swin():
    from torchvision.models.swin_transformer import SwinTransformer

    backbone = SwinTransformer([2, 2], 16, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0)
    backbone.head = nn.Identity()
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.Upsample(16), backbone)


@pytest.mark.filterwarnings("ignore:.*layers without masks")
@pytest.mark.parametrize(
    ("make", "name"), [(Uncalled, "read.weight"), (ByHand, "read.weight"), (swin, "2.features.1.0.attn.qkv.weight")]
)
def test_weights_that_no_layer_passes_to_its_usual_function_are_private(make_learner, tmp_path, caplog, make, name):
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


def test_a_backbone_that_calls_no_layer_raises_and_an_interrupted_one_can_be_learned_again(make_learner):
    class CallsNothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(72, 8)

        def forward(self, images):
            return nn.functional.linear(images.flatten(1), self.read.weight)

    with pytest.raises(
        ValueError, match=r"no layer of the backbone passes its weight to F\.conv2d or F\.linear.*call 'read'"
    ):
        make_learner(CallsNothing()).learn(make_task(0))
    learner = make_learner(Uncalled(), on_epoch=lambda progress: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        learner.learn(make_task(0))
    learner.on_epoch = None
    learner.learn(make_task(0))
    assert "read.weight" in learner.network.parts.private


class Standardised(nn.Conv2d):
    """Weight standardisation: each filter is used without its mean."""

    def forward(self, x):
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class Scaled(nn.Conv2d):
    """Uses each weight times a number."""

    def forward(self, x):
        return nn.functional.conv2d(x, 2 * self.weight, self.bias, self.stride, self.padding)


def with_layer(layer):
    return nn.Sequential(layer, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))


def timm_standardised():
    return pytest.importorskip("timm").layers.ScaledStdConv2d(2, 8, 3)


@pytest.mark.parametrize("make", [lambda: Standardised(2, 8, 3), timm_standardised], ids=["ours", "timm"])
def test_a_layer_that_mixes_pruned_weights_back_in_raises_by_name_before_training(make_learner, make):
    epochs = []
    learner = make_learner(with_layer(make()), on_epoch=epochs.append)
    with pytest.raises(ValueError, match=r"layer '0' \(\w+\) computes its weight .* use a plain Conv2d"):
        learner.learn(make_task(0))
    assert epochs == []
    learner.learn_frozen(make_task(0))  # which prunes nothing


def test_negative_control_a_layer_that_scales_its_weight_is_learned(make_learner):
    learner = make_learner(with_layer(Scaled(2, 8, 3)), pruner=cps.NNrelief(0.6))
    subnetwork = learner.learn(make_task(0))
    assert not subnetwork.masks["0.weight"].all()


class AlwaysDropout(nn.Module):
    """Returns different features each time: a dropout that stays on in eval mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 64)

    def forward(self, images):
        return nn.functional.dropout(self.layer(images.flatten(1)), 0.5, training=True)


class HiddenState(nn.Module):
    """Keeps state that is not a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean = nn.Linear(72, 8), 0.0

    def forward(self, images):
        self.mean = 0.9 * self.mean + 0.1 * float(images.mean()) + 0.1
        return self.layer(images.flatten(1)) - self.mean


@pytest.mark.parametrize("kind", [AlwaysDropout, HiddenState])
def test_a_backbone_that_is_not_deterministic_in_eval_mode_raises(make_learner, kind):
    with pytest.raises(ValueError, match="different features for the same images"):
        make_learner(kind()).learn(make_task(0))


def test_channels_last_images_get_a_hint(make_learner):
    images = torch.zeros(24, 32, 32, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="channels-last"):
        make_learner(conv_net(3)).learn(cps.Task([0, 1], train=(images, [0, 1] * 12)))


def test_only_a_lookup_table_does_not_accept_noise():
    noise = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.values = nn.Parameter(torch.randn(20, 8))

        def forward(self, words):
            return self.values[words.long() * 100].mean(dim=1)

    assert not accepts_noise(Table(), noise)
    assert accepts_noise(nn.Linear(5, 2), noise)
    assert accepts_noise(nn.Linear(7, 2), noise)  # other errors are left to the code that runs the backbone


@pytest.mark.filterwarnings("ignore:.*of the backbone's")
def test_a_backbone_with_an_embedding_has_a_fingerprint(make_learner):
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


@pytest.mark.filterwarnings("ignore:.*layers without masks")
def test_a_backbone_that_fails_on_noise_prints_no_traceback(make_learner, capsys):
    """Compact subnetworks are checked on noise, which an embedding cannot look up."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(50, 16), nn.Linear(16, 8)

        def forward(self, tokens):
            return self.layer(self.table(tokens.long()).mean(1)).relu()

    tokens = torch.randint(0, 50, (24, 6), generator=torch.Generator().manual_seed(0)).float()
    learner = make_learner(Tokens())
    subnetwork = learner.learn(cps.Task([0, 1], train=(tokens, [0, 1] * 12)))
    assert len(learner.predict(tokens).classes) == 24
    assert "Traceback" not in capsys.readouterr().err
    assert len(repr(subnetwork)) < 200


def test_running_out_of_memory_is_not_reported_as_a_fault_of_the_backbone():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(72, 4)

        def forward(self, images):
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        check_forward(Large(), ["layer.weight"], make_task(0).train[0][:2])
