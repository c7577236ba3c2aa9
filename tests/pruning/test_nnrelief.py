"""Invariant 3: NNrelief equals a slow reference written from the formulas."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import cps
from cps.network.masks import full_masks
from cps.pruning.activations import record_activations
from cps.pruning.nnrelief import importance
from samples import make_task


def reference_kernel_importance(layer, images):
    """Frobenius norm of |w_kc| correlated with the batch mean of |x_c|, kernel by kernel (eq. 2 for maps)."""
    mean = images.abs().mean(dim=0)
    weight = layer.weight.detach().abs()
    scores = torch.zeros(weight.shape[:2])
    per_group = layer.out_channels // layer.groups
    for k in range(weight.shape[0]):
        for c in range(weight.shape[1]):
            channel = (k // per_group) * weight.shape[1] + c
            flow = F.conv2d(
                mean[channel][None, None], weight[k, c][None, None],
                stride=layer.stride, padding=layer.padding, dilation=layer.dilation,
            )  # fmt: skip
            scores[k, c] = flow.square().sum().sqrt()
    return scores


def reference_linear_importance(layer, images):
    """mean |w_ij x_i| over images (eq. 2), one connection at a time."""
    scores = torch.zeros(layer.weight.shape)
    for j in range(layer.out_features):
        for i in range(layer.in_features):
            scores[j, i] = (layer.weight[j, i].detach() * images[:, i]).abs().mean()
    return scores


def reference_keep(scores, bias, alpha):
    """The rule, neuron by neuron: sort, keep the fewest whose sum reaches alpha of the total."""
    keep = torch.zeros_like(scores, dtype=torch.bool)
    for j, row in enumerate(scores.tolist()):
        entries = [(score, i) for i, score in enumerate(row)]
        if bias is not None:
            entries.append((float(bias[j]), None))
        total, reached = sum(score for score, _ in entries), 0.0
        for score, i in sorted(entries, key=lambda entry: -entry[0]):
            if reached >= alpha * total * (1 - 1e-12) or score == 0:
                break
            reached += score
            if i is not None:
                keep[j, i] = True
        if max(row) > 0 and not keep[j].any():
            keep[j, row.index(max(row))] = True
    return keep


CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "padded": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "padding": 1, "stride": 2},
    "dilated": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "pointwise": {"kernel_size": 1},
    "grouped": {"kernel_size": 3, "groups": 2},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
    "oblong": {"kernel_size": (1, 3), "stride": (2, 1)},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_kernel_importance_equals_the_nested_loops(kind):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, bias=False, **CONVOLUTIONS[kind])
    images = torch.randn(6, 4, 9, 7)
    activity = record_activations(nn.Sequential(layer), ["0.weight"], [images[:4], images[4:]])
    scores, bias = importance(activity.calls["0.weight"])
    assert bias is None
    torch.testing.assert_close(scores[:, :, 0, 0], reference_kernel_importance(layer, images))


class PadsItself(nn.Conv2d):
    """Pads in its own forward, like timm's `Conv2dSame`; its attribute `padding` is 0."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride)


class ScalesItself(nn.Conv2d):
    """Uses its weight times a number for each output."""

    def forward(self, x):
        scale = torch.arange(1.0, 1 + len(self.weight))[:, None, None, None]
        return F.conv2d(x, scale * self.weight, self.bias, self.stride, self.padding)


def importance_in(layer, images):
    return importance(record_activations(nn.Sequential(layer), ["0.weight"], [images]).calls["0.weight"])[0]


def test_a_layer_that_pads_in_its_forward_is_scored_on_the_padded_signal():
    torch.manual_seed(0)
    plain, own = nn.Conv2d(4, 8, 3, padding=1, stride=2), PadsItself(4, 8, 3, stride=2)
    own.load_state_dict(plain.state_dict())
    images = torch.zeros(6, 4, 8, 8)
    images[..., 0] = torch.randn(6, 4, 8)  # signal at the border only
    expected = importance_in(plain, images)
    assert torch.equal(importance_in(own, images), expected)
    unpadded = nn.Conv2d(4, 8, 3, stride=2)
    unpadded.load_state_dict(plain.state_dict())
    assert not torch.allclose(importance_in(unpadded, images), expected, rtol=0.01)


def test_a_layer_that_computes_its_weight_is_scored_on_the_weight_that_it_uses():
    torch.manual_seed(0)
    plain, own = nn.Conv2d(4, 8, 3), ScalesItself(4, 8, 3)
    own.load_state_dict(plain.state_dict())
    images = torch.randn(6, 4, 8, 8)
    scale = torch.arange(1.0, 9)[:, None, None, None]
    torch.testing.assert_close(importance_in(own, images), scale * importance_in(plain, images))


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("padding", [{"padding": "same"}, {"padding": 2, "padding_mode": "circular"}])
def test_other_ways_of_padding_are_scored_like_zeros_around_the_image(padding):
    torch.manual_seed(0)
    layer, images = nn.Conv2d(4, 8, 4 if padding["padding"] == "same" else 3, **padding), torch.randn(6, 4, 9, 7)
    sides = (1, 2, 1, 2) if padding["padding"] == "same" else (2, 2, 2, 2)
    mode = padding.get("padding_mode", "constant")
    unpadded = nn.Conv2d(4, 8, layer.kernel_size)
    unpadded.load_state_dict(layer.state_dict())
    torch.testing.assert_close(importance_in(layer, images), importance_in(unpadded, F.pad(images, sides, mode=mode)))


def test_layers_of_timm_that_pad_in_their_forward_are_learned(make_learner):
    layers = pytest.importorskip("timm").layers
    backbone = nn.Sequential(
        layers.Conv2dSame(2, 8, 3, stride=2), nn.ReLU(), layers.Conv2dSame(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten()
    )
    learner = make_learner(backbone, pruner=cps.NNrelief(0.7))
    learner.learn(make_task(0))
    before = learner.fingerprint(0)
    learner.learn(make_task(10))
    assert learner.fingerprint(0) == before


def test_negative_control_signed_weights_give_other_scores():
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 3, bias=False)
    images = torch.randn(6, 4, 9, 7)
    calls = record_activations(nn.Sequential(layer), ["0.weight"], [images]).calls["0.weight"]
    scores, _ = importance(calls)
    first, kernel = images.abs().mean(0)[None, :1], layer.weight[:1, :1].detach()
    torch.testing.assert_close(scores[0, 0, 0, 0], F.conv2d(first, kernel.abs()).norm())
    assert not torch.isclose(scores[0, 0, 0, 0], F.conv2d(first, kernel).norm())


def test_linear_importance_equals_the_nested_loops():
    torch.manual_seed(0)
    layer = nn.Linear(5, 4)
    images = torch.randn(6, 5)
    activity = record_activations(nn.Sequential(layer), ["0.weight"], [images])
    scores, bias = importance(activity.calls["0.weight"])
    torch.testing.assert_close(scores, reference_linear_importance(layer, images))
    torch.testing.assert_close(bias, layer.bias.detach().abs())


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=5, max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([0.3, 0.5, 0.7, 0.9, 0.95, 1.0]),
)
@example([[0, 12, 15, 15, 48]], False, 0.7)  # reaches alpha exactly, but for rounding
def test_the_rule_equals_the_reference(rows, with_bias, alpha):
    scores = torch.tensor(rows, dtype=torch.float64)
    scores += torch.arange(5) * 1e-3 * (scores > 0)  # no ties: either of two equal scores may stay
    bias = torch.full((len(rows),), 7.5, dtype=torch.float64) if with_bias else None
    assert torch.equal(cps.NNrelief(alpha).keep(scores, bias), reference_keep(scores, bias, alpha))


def test_alpha_one_keeps_every_connection_that_carries_signal():
    scores = torch.tensor([[3.0, 1e-6, 0.0], [1.0, 1.0, 1.0]])
    assert cps.NNrelief(1.0).keep(scores).tolist() == [[True, True, False], [True, True, True]]


def test_a_filter_with_one_input_keeps_it():
    assert cps.NNrelief(0.5).keep(torch.tensor([[0.2], [0.0]])).tolist() == [[True], [False]]


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


def test_a_strong_bias_does_not_remove_the_last_input_of_a_neuron():
    assert cps.NNrelief(0.9).keep(torch.tensor([[0.1, 0.2]]), torch.tensor([100.0])).tolist() == [[False, True]]


def test_later_rounds_score_masked_weights():
    """Unlike the published code, which scores pruned weights again and so prunes less than the rule."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 3, bias=False))
    images = [torch.ones(4, 6)]
    first = cps.NNrelief(0.8)(backbone, full_masks(dict(backbone.named_parameters()), on=True), images)
    with torch.no_grad():
        backbone[0].weight.masked_fill_(~first["0.weight"], 0.0)
    second = cps.NNrelief(0.8)(backbone, first, images)["0.weight"]
    rule = reference_keep(backbone[0].weight.detach().abs(), None, 0.8)
    assert torch.equal(second, rule & first["0.weight"])
    assert second.sum() < first["0.weight"].sum()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.branch = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        signal = torch.relu(self.stem(x))
        total = self.norm(self.branch(signal))
        total += signal
        return total.mean(dim=(2, 3))


def full_masks_of(backbone):
    return full_masks({n: p for n, p in backbone.named_parameters() if p.ndim > 1}, on=True)


def test_a_weak_residual_channel_is_dropped_at_its_source():
    torch.manual_seed(0)
    backbone = Residual().eval()
    with torch.no_grad():
        backbone.branch.weight[1] *= 1e-3
        backbone.stem.weight.abs_()
    masks = cps.NNrelief(0.9)(backbone, full_masks_of(backbone), [torch.rand(8, 2, 6, 6)])
    assert masks["branch.weight"].flatten(1).any(dim=1).tolist() == [True, False, True, True]
    assert masks["stem.weight"].flatten(1).any(dim=1).all()


def test_the_residual_rule_is_the_ratio_of_the_paper():
    """A channel is dropped exactly when |norm(conv x)| / |shortcut| < (1 - alpha) / alpha."""
    torch.manual_seed(1)
    backbone, images = Residual().eval(), torch.rand(8, 2, 6, 6)
    with torch.no_grad():
        backbone.stem.weight.abs_()
        backbone.branch.weight *= torch.tensor([0.02, 0.05, 0.2, 1.0])[:, None, None, None]
        shortcut = torch.relu(backbone.stem(images))
        branch = backbone.norm(backbone.branch(shortcut))
    ratio = branch.abs().mean(0).flatten(1).norm(dim=1) / shortcut.abs().mean(0).flatten(1).norm(dim=1)
    alpha = 1 / (1 + float(ratio.median()) * 1.001)  # between the channels
    masks = cps.NNrelief(alpha)(backbone, full_masks_of(backbone), [images])
    dropped = ~masks["branch.weight"].flatten(1).any(dim=1)
    assert torch.equal(dropped, ratio < (1 - alpha) / alpha)
    assert 0 < dropped.sum() < 4


def test_a_signal_that_is_read_elsewhere_is_not_dropped_at_an_addition():
    class ReadTwice(Residual):
        def forward(self, x):
            signal = self.stem(x)  # straight into the addition, but the branch reads it too
            return (signal + self.norm(self.branch(torch.relu(signal)))).mean(dim=(2, 3))

    torch.manual_seed(0)
    backbone = ReadTwice().eval()
    with torch.no_grad():
        backbone.branch.weight *= 100
        backbone.stem.weight.abs_()
    masks = cps.NNrelief(0.9)(backbone, full_masks_of(backbone), [torch.rand(8, 2, 6, 6)])
    assert masks["stem.weight"].flatten(1).any(dim=1).any()


def test_a_filter_without_input_signal_loses_its_connections():
    backbone = nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.Flatten()).eval()
    images = torch.rand(4, 2, 3, 3)
    images[:, 1] = 0
    with torch.no_grad():
        backbone[0].weight.fill_(1.0)
        backbone[0].weight[1, 0] = 0  # filter 1 only listens to the silent channel
    masks = cps.NNrelief(0.9)(backbone, full_masks_of(backbone), [images])["0.weight"]
    assert masks.flatten(1).tolist() == [[True, False], [False, False], [True, False]]


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1])
def test_alpha_must_be_a_share(alpha):
    with pytest.raises(ValueError, match="alpha"):
        cps.NNrelief(alpha)


class TwoReaders(nn.Module):
    """An output that is added and also read in another way."""

    def __init__(self, read):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, bias=False), nn.Conv2d(2, 4, 3, bias=False)
        self.read = read

    def forward(self, x):
        first, second = self.a(x), self.b(x)
        return self.read(first, first + second).mean(dim=(2, 3))


@pytest.mark.parametrize(
    "read",
    [lambda y, total: torch.cat([y, total], dim=1), lambda y, total: torch.mul(input=y, other=50.0) + total],
    ids=["in a list", "by keyword"],
)
def test_an_output_read_in_a_list_or_by_keyword_is_not_dropped(read):
    torch.manual_seed(0)
    backbone = TwoReaders(read).eval()
    with torch.no_grad():
        backbone.b.weight.mul_(100)
    assert cps.NNrelief(0.9)(backbone, full_masks_of(backbone), [torch.rand(8, 2, 6, 6)])["a.weight"].any()


def test_a_saturated_gate_is_not_a_dead_channel():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.gate = nn.Conv2d(2, 4, 3), nn.Linear(4, 4)

        def forward(self, x):
            signal = torch.relu(self.conv(x))
            return (signal * F.hardsigmoid(self.gate(signal.mean(dim=(2, 3))))[:, :, None, None]).mean(dim=(2, 3))

    torch.manual_seed(0)
    backbone, images = Gated().eval(), [torch.rand(8, 2, 6, 6)]
    with torch.no_grad():
        backbone.conv.bias.fill_(3.0)
        backbone.gate.weight.uniform_(2, 3)
    before = backbone(images[0])
    masks = cps.NNrelief(0.99)(backbone, full_masks_of(backbone), images)
    with torch.no_grad():
        for name, mask in masks.items():
            backbone.get_parameter(name).masked_fill_(~mask, 0.0)
    assert masks["gate.weight"].any()
    torch.testing.assert_close(backbone(images[0]), before, rtol=0.2, atol=0.1)


def test_a_stem_without_gradients_and_a_call_by_keyword_are_pruned():
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.layer, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            with torch.no_grad():
                signal = self.stem(x)
            return self.last(torch.relu(self.layer(input=signal)))

    backbone = Stem().eval()
    with torch.no_grad():
        backbone.last.weight[:, 2] = 0
    masks = cps.NNrelief(1.0)(backbone, full_masks_of(backbone), [torch.rand(9, 4)])
    assert masks["layer.weight"].any(dim=1)[[0, 1, 3, 4]].any()
    assert not masks["layer.weight"][2].any()
    assert masks["stem.weight"].any()


def test_of_two_equal_summands_one_stays_for_any_alpha():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 3, bias=False), nn.Conv2d(2, 4, 3, bias=False)
            self.b.weight.data.copy_(self.a.weight.data)

        def forward(self, x):
            return (self.a(x) + self.b(x)).mean(dim=(2, 3))

    masks = cps.NNrelief(0.45)(Sum().eval(), full_masks_of(Sum()), [torch.rand(8, 2, 6, 6)])
    assert masks["a.weight"].any() or masks["b.weight"].any()
