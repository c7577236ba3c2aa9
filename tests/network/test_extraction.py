"""A sealed subnetwork as a small network computes what the whole one does."""

import pytest
import torch

import cps
from cps.network.compact.parallel_inference import ParallelInference, to_half
from cps.network.outputs import Outputs
from cps.runtime.devices import full_precision
from network.test_any_module import BACKBONES
from samples import ACCELERATOR, ROUNDING, conv_net, make_task, use_all_compact

TOLERANCE = 1e-4 if ACCELERATOR == "cpu" else 3e-3  # a GPU rounds the inputs of convolutions


def small_resnet():
    return cps.resnet18(2, (8, 12, 16, 24))


@pytest.fixture(scope="module")
def model(fabric, tmp_path_factory):
    """Return the file of a ResNet that has learned two tasks."""
    torch.manual_seed(0)
    training = cps.Training(6, cps.Adam(1e-2, weight_decay=5e-3), batch_size=16)
    learner = cps.Learner(
        small_resnet(), pruner=cps.NNrelief(0.7), rounds=3, train=training, retrain=training, fabric=fabric,
        normalize=cps.Normalize((0.1, 0.2), (1.5, 2.0)),
    )  # fmt: skip
    for first in (0, 10):
        learner.learn(make_task(first, shape=(2, 8, 8)))
    path = tmp_path_factory.mktemp("model") / "model.cps"
    learner.save(path)
    return path


@pytest.fixture
def small_and_whole(model, fabric):
    """Return a learner of that model, and images."""
    return cps.load(model, small_resnet(), fabric=fabric), make_task(0, shape=(2, 8, 8)).test[0]


@pytest.fixture
def all_bits():
    """Let a GPU keep all bits of the inputs of convolutions."""
    with full_precision():
        yield


@pytest.mark.filterwarnings("ignore:.*layers without masks")
@pytest.mark.parametrize("name", BACKBONES)
def test_the_extracted_network_gives_the_same_logits_for_every_kind_of_backbone(make_learner, name):
    torch.manual_seed(0)
    quick = cps.Training(1, cps.Adam(1e-2, weight_decay=5e-3), batch_size=16)
    learner = make_learner(BACKBONES[name](), train=quick, retrain=quick, pruner=cps.NNrelief(0.6), rounds=2)
    task = make_task(0, shape=(2, 8, 8))
    learner.learn(task)
    images = task.test[0].to(learner.network.device)
    with full_precision():
        expected = learner.network.whole_outputs([images], 0).logits
        torch.testing.assert_close(learner.extract(0)(images), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("all_bits")
def test_the_extracted_network_is_smaller_and_has_its_normalisation_inside(small_and_whole):
    learner, images = small_and_whole
    images = images.to(learner.network.device)
    dense = sum(parameter.numel() for parameter in learner.network.backbone.parameters())
    for task in range(2):
        module = learner.extract(task)
        assert sum(parameter.numel() for parameter in module.parameters()) < 0.6 * dense
        expected = learner.network.whole_outputs([images], task).logits
        torch.testing.assert_close(module(images), expected, rtol=1e-3, atol=TOLERANCE)
        assert module.classes == learner.network.subnetworks[task].classes


def test_evidence_of_small_networks_is_that_of_the_whole_and_stays_to_the_bit(small_and_whole, tmp_path):
    learner, images = small_and_whole
    use_all_compact(learner)
    with full_precision():
        fast = learner.network.outputs([images], [0])[0]
        slow = learner.network.whole_outputs([images], 0)
    torch.testing.assert_close(fast.features, slow.features, rtol=1e-3, atol=TOLERANCE)

    def made_anew():
        learner.network.clear_compact()
        use_all_compact(learner)
        with full_precision():
            return learner.network.outputs([images], [0])[0].logits

    learner.learn(make_task(20, shape=(2, 8, 8)))
    assert torch.equal(made_anew(), fast.logits)
    for weight in learner.network.weights.values():  # the negative control
        weight.mul_(1.01)
    assert not torch.equal(made_anew(), fast.logits)


def test_negative_control_a_channel_too_many_removed_changes_the_logits(small_and_whole):
    learner, images = small_and_whole
    module, images = learner.extract(0), images.to(learner.network.device)
    before = module(images)
    convolution = next(m for m in module.modules() if isinstance(m, torch.nn.Conv2d))
    with torch.no_grad():
        convolution.weight[0].zero_()
    assert not torch.allclose(module(images), before, rtol=1e-3, atol=1e-4)


def test_the_extracted_network_exports_with_torch_export(small_and_whole):
    learner, images = small_and_whole
    module, images = learner.extract(1).cpu(), images.cpu()
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (images,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(program.module()(images[:5]), module(images[:5]))


@pytest.mark.filterwarnings("ignore")
def test_the_extracted_network_exports_to_onnx(small_and_whole, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    learner, images = small_and_whole
    module, images = learner.extract(1).cpu(), images.cpu()
    path = tmp_path / "task.onnx"
    torch.onnx.export(
        module, (images,), path, dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False
    )
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images[:5].numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), module(images[:5]), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("all_bits")
def test_subnetworks_asked_together_say_what_each_says_alone_to_the_bit(small_and_whole):
    learner, images = small_and_whole
    use_all_compact(learner)
    batches = images.split(40)
    for _ in range(5):  # on a GPU the later calls replay a graph
        together = learner.network.outputs(batches, [0, 1])
        for task in range(2):
            alone = learner.network.outputs(batches, [task])[0]
            assert torch.equal(together[task].logits, alone.logits)
            whole = learner.network.whole_outputs(batches, task)
            torch.testing.assert_close(together[task].features, whole.features, rtol=1e-3, atol=TOLERANCE)
    moved = learner.network.outputs([images + 0.1], [0, 1])  # the negative control: a graph reads its inputs anew
    assert not torch.equal(moved[0].logits, together[0].logits)


def test_evidence_is_computed_once_and_together_for_whoever_iterates():
    asked = []

    def compute(tasks):
        asked.append(list(tasks))
        return [cps.Outputs(torch.full((2, 1), float(task)), torch.zeros(2, 1)) for task in tasks]

    evidence = cps.Evidence(compute, 4)
    assert evidence[-1].features[0] == 3
    assert [int(outputs.features[0]) for outputs in evidence.until(3)] == [0, 1, 2]
    assert len(list(evidence)) == 4
    assert asked == [[3], [0, 1, 2]]


def test_half_precision_is_used_only_where_it_rounds_and_does_no_more():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten()).requires_grad_(False)
    pixels = torch.randn(2, 3, 6, 6)
    half = to_half(network, pixels)
    assert half is not None
    torch.testing.assert_close(half(pixels), network(pixels), rtol=1e-2, atol=1e-2)
    network[0].weight *= 1e5  # beyond what a half can hold
    assert to_half(network, pixels) is None
    assert to_half(network.double(), pixels.double()) is None


def test_features_that_half_precision_loses_are_computed_in_full(small_and_whole, monkeypatch):
    learner, images = small_and_whole
    use_all_compact(learner)
    whole = learner.network.whole_outputs([images], 1)
    lost = Outputs(torch.full_like(whole.features, float("inf")), whole.logits)
    monkeypatch.setattr(ParallelInference, "__call__", lambda self, pixels: [whole, lost])
    assert torch.equal(learner.network.outputs([images], [0, 1])[1].features, whole.features)


def test_a_small_network_normalises_inputs_of_any_form(make_learner):
    normalize = cps.Normalize((0.5,) * 9, (0.2,) * 9)
    learner = make_learner(torch.nn.Sequential(torch.nn.Linear(9, 32), torch.nn.ReLU()), normalize=normalize)
    task = make_task(0, shape=(9,))
    learner.learn(task)
    rows = task.test[0].to(learner.network.device)
    torch.testing.assert_close(learner.extract(0)(rows), learner.evidence(rows)[0].logits, **ROUNDING)


def test_a_small_network_of_doubles_takes_images_of_floats(make_learner):
    fabric = cps.make_fabric(accelerator=ACCELERATOR, precision="32-true")
    learner = make_learner(conv_net().double(), normalize=cps.Normalize((0.5, 0.5), (0.2, 0.3)), fabric=fabric)
    task = make_task(0)
    learner.learn(task)
    images = task.test[0].to(learner.network.device)
    torch.testing.assert_close(learner.extract(0)(images), learner.evidence(images)[0].logits, rtol=1e-3, atol=1e-3)


class Grouped(torch.nn.Module):
    """A convolution in groups beside plain ones."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(2, 16, 3), torch.nn.Conv2d(32, 8, 1)
        self.middle, self.grouped = torch.nn.Conv2d(16, 32, 1), torch.nn.Conv2d(32, 32, 3, padding=1, groups=4)

    def forward(self, images):
        seen = self.grouped(self.middle(self.first(images).relu()).relu()).relu()
        return self.last(seen).relu().mean(dim=(2, 3))


def test_a_convolution_in_groups_keeps_its_channels_and_the_others_are_cut(make_learner):
    torch.manual_seed(0)

    def half(backbone, masks, batches):
        read = masks["middle.weight"].clone()
        read[:, 8:] = False
        return masks | {"middle.weight": read}

    learner = make_learner(Grouped(), pruner=half)
    task = make_task(0, shape=(2, 8, 8))
    learner.learn(task)
    small, images = learner.extract(0), task.test[0].to(learner.network.device)
    with full_precision():
        expected = learner.network.whole_outputs([images], 0).logits
        torch.testing.assert_close(small(images), expected, rtol=1e-3, atol=1e-3)
    assert small.backbone.grouped.groups == 4
    assert small.backbone.first.out_channels == 8


@pytest.mark.parametrize("scale", [1.0, 3e-5])
def test_a_convolution_that_is_called_twice_has_no_norm_folded_in(make_learner, scale):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again = torch.nn.Conv2d(2, 8, 3), torch.nn.Conv2d(8, 8, 3, padding=1)
            self.one, self.two = torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8)

        def forward(self, images):
            seen = self.one(self.again(self.first(images).relu())).relu()
            return self.two(self.again(seen)).relu().mean(dim=(2, 3)) * scale

    learner = make_learner(Twice())
    task = make_task(0, shape=(2, 8, 8))
    learner.learn(task)
    images = task.test[0].to(learner.network.device)
    with full_precision():
        features = learner.extract(0).outputs(images).features
        torch.testing.assert_close(features / scale, learner.network.whole_outputs([images], 0).features / scale)
