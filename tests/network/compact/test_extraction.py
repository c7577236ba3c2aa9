"""An extracted subnetwork computes what the full-size backbone does with the same masks."""

import pytest
import torch

import cps
from cps.runtime.devices import full_precision
from samples import ACCELERATOR, ROUNDING, conv_net, make_task
from zoo import BACKBONE_NAMES, BACKBONES

TOLERANCE = 1e-4 if ACCELERATOR == "cpu" else 3e-3  # a GPU rounds the inputs of convolutions


@pytest.mark.filterwarnings("ignore:.*layers without masks")
@pytest.mark.parametrize("name", BACKBONE_NAMES)
def test_an_extracted_subnetwork_gives_the_same_logits_for_every_kind_of_backbone(make_learner, name):
    torch.manual_seed(0)
    quick = cps.Training(1, cps.Adam(1e-2, weight_decay=5e-3), batch_size=16)
    learner = make_learner(BACKBONES[name](), train=quick, retrain=quick, pruner=cps.NNrelief(0.6), rounds=2)
    task = make_task(0, shape=(2, 8, 8))
    learner.learn(task)
    images = task.test[0].to(learner.network.device)
    with full_precision():
        expected = learner.network.full_outputs([images], 0).logits
        torch.testing.assert_close(learner.extract(0)(images), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("in_full_precision")
def test_an_extracted_subnetwork_is_smaller_and_includes_normalisation(learner, images):
    images = images.to(learner.network.device)
    dense = sum(parameter.numel() for parameter in learner.network.backbone.parameters())
    for task in range(2):
        module = learner.extract(task)
        assert sum(parameter.numel() for parameter in module.parameters()) < 0.6 * dense
        expected = learner.network.full_outputs([images], task).logits
        torch.testing.assert_close(module(images), expected, rtol=1e-3, atol=TOLERANCE)
        assert module.classes == learner.network.subnetworks[task].classes


def test_negative_control_removing_a_used_channel_changes_the_logits(learner, images):
    module, images = learner.extract(0), images.to(learner.network.device)
    before = module(images)
    convolution = next(m for m in module.modules() if isinstance(m, torch.nn.Conv2d))
    with torch.no_grad():
        convolution.weight[0].zero_()
    assert not torch.allclose(module(images), before, rtol=1e-3, atol=1e-4)


def test_an_extracted_subnetwork_exports_with_torch_export(learner, images):
    module, images = learner.extract(1).cpu(), images.cpu()
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (images,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(program.module()(images[:5]), module(images[:5]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_extracted_subnetwork_exports_to_onnx(learner, images, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module, images = learner.extract(1).cpu(), images.cpu()
    path = tmp_path / "task.onnx"
    torch.onnx.export(
        module, (images,), path, dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False
    )
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images[:5].numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), module(images[:5]), rtol=1e-3, atol=1e-4)


def test_an_extracted_subnetwork_normalises_inputs_of_any_shape(make_learner):
    normalize = cps.Normalize((0.5,) * 9, (0.2,) * 9)
    learner = make_learner(torch.nn.Sequential(torch.nn.Linear(9, 32), torch.nn.ReLU()), normalize=normalize)
    task = make_task(0, shape=(9,))
    learner.learn(task)
    rows = task.test[0].to(learner.network.device)
    torch.testing.assert_close(learner.extract(0)(rows), learner.evidence(rows)[0].logits, **ROUNDING)


def test_an_extracted_float64_subnetwork_accepts_float32_images(make_learner):
    fabric = cps.make_fabric(accelerator=ACCELERATOR, precision="32-true")
    learner = make_learner(conv_net().double(), normalize=cps.Normalize((0.5, 0.5), (0.2, 0.3)), fabric=fabric)
    task = make_task(0)
    learner.learn(task)
    images = task.test[0].to(learner.network.device)
    torch.testing.assert_close(learner.extract(0)(images), learner.evidence(images)[0].logits, rtol=1e-3, atol=1e-3)


class Grouped(torch.nn.Module):
    """A grouped convolution between plain ones."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(2, 16, 3), torch.nn.Conv2d(32, 8, 1)
        self.middle, self.grouped = torch.nn.Conv2d(16, 32, 1), torch.nn.Conv2d(32, 32, 3, padding=1, groups=4)

    def forward(self, images):
        signal = self.grouped(self.middle(self.first(images).relu()).relu()).relu()
        return self.last(signal).relu().mean(dim=(2, 3))


def test_a_grouped_convolution_keeps_its_channels_and_other_layers_lose_unused_ones(make_learner):
    torch.manual_seed(0)

    def half(backbone, masks, batches):
        read = masks["middle.weight"].clone()
        read[:, 8:] = False
        return masks | {"middle.weight": read}

    learner = make_learner(Grouped(), pruner=half)
    task = make_task(0, shape=(2, 8, 8))
    learner.learn(task)
    module, images = learner.extract(0), task.test[0].to(learner.network.device)
    with full_precision():
        expected = learner.network.full_outputs([images], 0).logits
        torch.testing.assert_close(module(images), expected, rtol=1e-3, atol=1e-3)
    assert module.backbone.grouped.groups == 4
    assert module.backbone.first.out_channels == 8


@pytest.mark.parametrize("scale", [1.0, 3e-5])
def test_no_batch_norm_is_folded_into_a_convolution_that_is_called_twice(make_learner, scale):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again = torch.nn.Conv2d(2, 8, 3), torch.nn.Conv2d(8, 8, 3, padding=1)
            self.one, self.two = torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8)

        def forward(self, images):
            signal = self.one(self.again(self.first(images).relu())).relu()
            return self.two(self.again(signal)).relu().mean(dim=(2, 3)) * scale

    learner = make_learner(Twice())
    task = make_task(0, shape=(2, 8, 8))
    learner.learn(task)
    images = task.test[0].to(learner.network.device)
    with full_precision():
        features = learner.extract(0).outputs(images).features
        torch.testing.assert_close(features / scale, learner.network.full_outputs([images], 0).features / scale)


def keep_first(number):
    """Return a pruner that keeps the connections from the first channels of each hidden layer."""

    def prune(backbone, masks, batches):
        return {
            name: mask
            & ((torch.arange(mask.shape[1]) < number) | (mask.shape[1] < 8))[
                (None, slice(None)) + (None,) * (mask.ndim - 2)
            ]
            for name, mask in masks.items()
        }

    return prune


def compact_size(learner):
    return sum(parameter.numel() for parameter in learner.extract(0).backbone.parameters())


@pytest.mark.usefixtures("in_full_precision")
def test_batch_norm_with_an_activation_and_convolutions_that_pad_are_cut_like_plain_ones(make_learner, caplog):
    """timm has both: `BatchNormAct2d` and `Conv2dSame`."""
    layers = pytest.importorskip("timm").layers

    class Gated(torch.nn.Module):
        """Squeezes by a mean that keeps the axes, and gates by a shifted and scaled ReLU6."""

        def __init__(self):
            super().__init__()
            self.squeeze = torch.nn.Conv2d(16, 16, 1)

        def forward(self, x):
            gate = torch.nn.functional.relu6(self.squeeze(x.mean((2, 3), keepdim=True)) + 3) / 6
            return x * gate

    def backbone(norm, convolution):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(2, 16, 3, padding=1), *norm(16), convolution(), *norm(16), Gated(), torch.nn.Conv2d(16, 8, 1),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        )  # fmt: skip

    def plain(channels):
        return torch.nn.BatchNorm2d(channels), torch.nn.ReLU()

    sizes = {}
    for name, norm, convolution in (
        ("plain", plain, lambda: torch.nn.Conv2d(16, 16, 3, padding=1)),
        ("timm", lambda channels: [layers.BatchNormAct2d(channels)], lambda: layers.Conv2dSame(16, 16, 3)),
    ):
        learner = make_learner(backbone(norm, convolution), pruner=keep_first(4))
        task = make_task(0, shape=(2, 8, 8))
        learner.learn(task)
        images = task.test[0].to(learner.network.device)
        expected = learner.network.full_outputs([images], 0).logits
        torch.testing.assert_close(learner.extract(0)(images), expected, rtol=1e-3, atol=TOLERANCE)
        sizes[name] = compact_size(learner), sum(value.numel() for value in learner.network.backbone.parameters())
    assert sizes["timm"] == sizes["plain"]
    assert sizes["timm"][0] < 0.4 * sizes["timm"][1]
    assert "keep all channels" not in caplog.text


class Branching(torch.nn.Module):
    """Decides by its values, which cannot be traced."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.layer(x) if x.sum() > -1e9 else x


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (lambda: torch.nn.GroupNorm(2, 8), "layer '1.0' (GroupNorm) needs all channels of its input"),
        (Branching, "layer '1.0' (Branching) cannot be traced"),
    ],
    ids=["not known to keep channels apart", "cannot be traced"],
)
def test_one_log_line_names_the_layer_that_prevents_cutting(make_learner, caplog, layer, line):
    backbone = torch.nn.Sequential(
        torch.nn.Conv2d(2, 8, 3), torch.nn.Sequential(layer()), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    learner = make_learner(backbone, pruner=keep_first(4))
    with caplog.at_level("INFO", "cps.network.compact"):
        for first in (0, 10):
            learner.learn(make_task(first, shape=(2, 8, 8)))
            learner.extract(0)
    (message,) = [record.message for record in caplog.records if record.name.startswith("cps.network.compact")]
    assert message.startswith(f"subnetworks keep all channels: {line}")
