"""The fast paths of a GPU compute what the plain ones do; what needs no GPU is tested without one."""

import copy
import gc
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.data.normalize import Prepare
from cps.network.backbones import large_resnet18, resnet18_third
from cps.network.classifier import Classifier
from cps.network.compact.channel_padding import copy_into, padded, resized_state
from cps.network.compact.parallel_inference import ParallelInference
from cps.network.freezing import FlatRestorer, Kept, bind
from cps.network.outputs import Outputs
from cps.runtime.cuda_graphs import compiled_alone
from cps.runtime.seeding import RNG_LOCK
from cps.training import trainer as training_module
from cps.training.cuda.accelerated_copy import accelerated_copy, check_alike
from cps.training.cuda.captured_step import CapturedStep
from cps.training.cuda.device_batches import EpochPlan
from cps.training.cuda.flat_parameters import FlatParameters
from cps.training.cuda.fused_norms import Norm, joined
from cps.training.cuda.optimizer_step import Update
from samples import ACCELERATOR, conv_net, make_task

needs_gpu = pytest.mark.skipif(ACCELERATOR == "cpu", reason="needs a GPU")


def awkward():
    torch.manual_seed(0)
    return cps.resnet18(3, (18, 21, 25, 30))


def train(model, steps, pixels, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-2)
    model.train()
    for _ in range(steps):
        nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_a_padded_twin_trains_as_the_backbone_does_and_its_padding_stays_zero():
    backbone, pixels, labels = awkward().double(), torch.randn(8, 3, 8, 8).double(), torch.arange(8) % 2
    twin = padded(backbone, pixels, least=1)
    assert twin is not None
    assert {m.out_channels for m in twin.modules() if isinstance(m, nn.Conv2d)} == {24, 32}
    assert {m.in_channels for m in twin.modules() if isinstance(m, nn.Conv2d)} == {8, 24, 32}
    head = nn.Linear(30, 2).double()
    plain, wide = Classifier(backbone, head), Classifier(twin, nn.Linear(30, 2).double())
    wide.head.load_state_dict(head.state_dict())
    first, second = train(plain, 3, pixels, labels), train(wide, 3, pixels, labels)
    torch.testing.assert_close(wide.eval()(pixels), plain.eval()(pixels))
    trained = {name: value.clone() for name, value in backbone.named_parameters()}
    narrow = {name: value.shape for name, value in backbone.named_parameters()}
    for name, value in twin.inner.named_parameters():
        beyond = value.detach().clone()
        beyond[tuple(map(slice, narrow[name]))] = 0
        assert not beyond.any(), name
    copy_into(twin.inner, backbone)
    for name, value in backbone.named_parameters():
        torch.testing.assert_close(value, trained[name])
    state = resized_state(second.state_dict(), plain)
    for index, entries in first.state_dict()["state"].items():
        torch.testing.assert_close(state["state"][index], entries)
    back = resized_state(state, wide)["state"]
    assert all(torch.equal(v, second.state_dict()["state"][i][k]) for i, e in back.items() for k, v in e.items())


@pytest.mark.parametrize(
    "backbone",
    [cps.resnet32(3), conv_net(3), nn.Sequential(nn.Conv2d(3, 17, 3), nn.Flatten(), nn.Linear(17 * 36, 4))],
    ids=["nothing to pad", "few channels", "a layer that cannot be padded"],
)
def test_what_need_not_or_cannot_be_padded_is_left_alone(backbone):
    assert padded(backbone, torch.randn(2, 3, 8, 8)) is None


def test_a_module_that_counts_its_channels_is_not_padded():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 17, 3), nn.Conv2d(17, 18, 3)

        def forward(self, x):
            signal = self.first(x)
            return (self.second(signal) * signal.shape[1]).mean(dim=(2, 3))

    assert padded(Counts(), torch.randn(2, 3, 8, 8)) is None


def test_guarding_all_weights_at_once_does_what_guarding_each_does():
    draws = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draws) for name, shape in {"a": (4, 3, 3, 3), "b": (5, 4)}.items()}
    guard = {}
    for name, weight in weights.items():
        taken, off = (torch.rand(*weight.shape[:2], *[1] * (weight.ndim - 2), generator=draws) < 0.4 for _ in range(2))
        guard[name] = Kept(taken, torch.randn(weight.shape, generator=draws), off)
    one, other = ({name: weight.clone() for name, weight in weights.items()} for _ in range(2))
    bind(guard, one)()
    flat = FlatParameters({name: nn.Parameter(value) for name, value in other.items()})
    other = flat.views(flat.vector.detach())
    restorer = FlatRestorer(flat.vector, flat.views)
    whole = Kept(torch.ones(1, dtype=torch.bool), torch.ones(4, 3, 3, 3), torch.zeros(1, dtype=torch.bool))
    shapes = {name: value.shape for name, value in weights.items()}
    restorer.keep({"a": whole}, shapes)
    restorer.keep(guard, shapes)  # the last one counts
    restorer()
    assert all(torch.equal(one[name], other[name]) for name in weights)
    moved = [name for name in weights if not torch.equal(one[name], weights[name])]
    assert moved == ["a", "b"]


def test_convolutions_and_their_gradients_are_those_of_pytorch():
    """Triton's interpreter runs the kernels on the CPU, in a process of its own."""
    script = """
import torch
from cps.training.cuda.conv_kernels import convolve, input_gradient, weight_gradient_parts
from cps.training.cuda.strided_conv_kernels import strided_input_gradient
torch.manual_seed(0)
last = {"memory_format": torch.channels_last}
ways = [(8, 24, 8, 3, 1), (24, 48, 7, 3, 2), (24, 48, 8, 3, 2), (40, 88, 6, 1, 2), (9, 33, 9, 5, 1), (8, 70, 9, 5, 3)]
for channels, outputs, size, kernel, stride in ways:
    seen = torch.randn(3, channels, size, size).to(**last).requires_grad_()
    weight = torch.randn(outputs, channels, kernel, kernel).to(**last).requires_grad_()
    out = torch.nn.functional.conv2d(seen, weight, None, stride, kernel // 2)
    gradient = torch.randn_like(out).contiguous(**last)
    out.backward(gradient)
    close = lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    close(convolve(seen.detach(), weight.detach(), stride, kernel // 2), out.detach())
    close(weight_gradient_parts(seen.detach(), gradient, kernel, stride, kernel // 2).sum(0), weight.grad)
    if stride == 1:
        close(input_gradient(gradient, weight.detach(), kernel // 2), seen.grad)
    elif size % stride == 0:
        close(strided_input_gradient(gradient, weight.detach(), (size, size), stride, kernel // 2), seen.grad)
print("agrees")
"""
    assert_agrees(script)


def assert_agrees(script):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in run.stderr:
        pytest.skip("the interpreter of this Triton cannot count with this numpy")
    if "'InterpretedFunction' object has no attribute 'warmup'" in run.stderr:
        pytest.skip("the interpreter of this Triton compiles nothing ahead")
    assert run.stdout == "agrees\n", run.stderr


def test_an_engine_with_our_own_kernels_trains_as_plain_steps_do():
    assert_agrees((Path(__file__).parent / "kernels_on_cpu.py").read_text())


def test_norms_with_what_follows_them_and_their_gradients_are_those_of_pytorch():
    """Means far from zero, several parts, steps and blocks of channels, some of them not whole."""
    script = """
import torch
import cps.training.cuda.norms
from torch.nn.functional import batch_norm, relu
from cps.training.cuda.fused_norms import Norm, _Normalize
from cps.training.cuda.norms import Running, normalize, normalize_backward
torch.manual_seed(0)
ways = [(5, 24, 9, True, True), (3, 88, 4, True, False), (40, 16, 8, False, True), (24, 64, 8, False, False)]
for number, channels, size, has_relu, has_shortcut, cps.training.cuda.norms.MOST_PARTS in [(*w, p) for p in (132, 3) for w in ways]:
    values = lambda: torch.randn(number, channels, size, size).contiguous(memory_format=torch.channels_last)
    signal = (3 * values() + 20 * torch.randn(channels)[:, None, None]).requires_grad_()
    shortcut = values().requires_grad_() if has_shortcut else None
    weight, bias = torch.randn(2, channels).requires_grad_().unbind()
    weight.retain_grad(), bias.retain_grad()
    mean, variance = torch.randn(channels), torch.rand(channels)
    ours = Running(mean.clone(), variance.clone(), torch.tensor(4), 0.1)
    assert cps.training.cuda.norms.MOST_PARTS != 3 or number < 5 or cps.training.cuda.norms._Cut.of(signal).steps > 1
    counts = torch.zeros(channels, dtype=torch.int32)
    total = batch_norm(signal, mean, variance, weight, bias, training=True)
    total = total + shortcut if has_shortcut else total
    total = relu(total) if has_relu else total
    gradient = values()
    total.backward(gradient)
    close = lambda ours, theirs: torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        done = normalize(signal, weight, bias, ours, counts, 1e-5, shortcut=shortcut, has_relu=has_relu)
        close(done.result, total)
        close(ours.mean, mean), close(ours.variance, variance), close(ours.batches, torch.tensor(5))
        how = {"has_shortcut": has_shortcut, "has_relu": has_relu}
        found = normalize_backward([gradient], done, signal, weight, bias, counts, **how)
        halves = normalize_backward([gradient / 4, 3 * gradient / 4], done, signal, weight, bias, counts, **how)
    expected = signal.grad, weight.grad, bias.grad, shortcut.grad if has_shortcut else None
    assert (found[3] is not None) == has_shortcut
    for one, half, other in zip(found, halves, expected):
        one is None or (close(one, other), close(half, other))
    layer = Norm(channels)
    layer.weight.data, layer.bias.data, layer.num_batches_tracked = weight.detach(), bias.detach(), torch.tensor(4)
    again = [None if value is None else value.detach().requires_grad_() for value in (signal, shortcut)]
    both = _Normalize.apply(*again, layer.weight, layer.bias, layer, has_relu, True)
    torch.autograd.backward(both, [0.25 * gradient, 0.75 * gradient])
    for one, other in zip((again[0].grad, layer.weight.grad, layer.bias.grad), expected):
        close(one, other)
    assert not has_shortcut or close(again[1].grad, shortcut.grad) is None
    broken = signal.detach().index_fill(1, torch.tensor([1]), torch.nan)
    done = normalize(broken, weight, bias, ours, counts, 1e-5, shortcut=shortcut, has_relu=has_relu)
    assert done.result[:, 1].isnan().all() and not done.result[:, 0].isnan().any()
print("agrees")
"""
    assert_agrees(script)


@pytest.mark.parametrize(("channels", "kernel", "stride", "expected"), [
    (64, 1, 2, True), (63, 1, 1, True), (63, 3, 2, True), (64, 1, 1, False), (64, 3, 2, False), (200, 3, 1, False),
    (512, 1, 2, False),
])  # fmt: skip
def test_our_kernels_serve_where_they_are_the_faster_ones(channels, kernel, stride, expected):
    from cps.training.cuda.convolution import _is_awkward

    signal = torch.empty(1, device="meta").expand(128, channels, 32, 32)
    weight = torch.empty(channels, channels, kernel, kernel, device="meta")
    assert _is_awkward(weight, stride, signal) == expected
    assert not _is_awkward(weight, stride, signal[:1].expand(2**20, -1, -1, -1))  # they could not count so far


@pytest.mark.parametrize(
    ("make", "size", "norms", "additions", "relus", "twice"),
    [
        (resnet18_third, 16, 20, 8, 17, 8),
        (cps.resnet32, 8, 31, 15, 16, 15),
        (large_resnet18, 64, 20, 8, 17, 7),  # a pooling reads that of its stem
        (lambda: cps.SmallConvNet(3), 8, 3, 0, 3, 0),
    ],
)
def test_norms_joined_to_what_is_around_them_compute_the_same_under_the_same_names(
    make, size, norms, additions, relus, twice
):
    backbone, images = make(), torch.randn(4, 3, size, size)
    twin = joined(copy.deepcopy(backbone))
    calls = [node for node in twin.graph.nodes if node.target in dict(twin.named_modules())]
    calls = [node for node in calls if isinstance(twin.get_submodule(node.target), Norm)]
    assert len(calls) == norms
    assert sum(node.args[1:2] not in ((), (None,)) for node in calls) == additions
    assert sum(node.args[2:3] == (True,) for node in calls) == relus
    assert sum(node.args[3:] == (True,) for node in calls) == twice
    for mode in (True, False):
        torch.testing.assert_close(twin.train(mode)(images), backbone.train(mode)(images))
    ours, theirs = twin.state_dict(), backbone.state_dict()
    assert list(ours) == list(theirs)
    torch.testing.assert_close(dict(ours), dict(theirs))  # running moments, too


def test_norms_are_joined_only_in_code_that_is_known():
    """Whoever branches by chance would do so once, when traced, and never again."""

    class Chancy(nn.Sequential):
        def forward(self, images):
            return super().forward(images) if torch.rand(()) < 0.5 else images

    layers = [nn.BatchNorm2d(3), nn.ReLU()]
    assert joined(nn.Sequential(*layers)) is not None
    hooked = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    hooked[0].register_forward_hook(lambda layer, inputs, output: output + 1)
    assert joined(hooked) is None
    idle = large_resnet18()
    idle.extra = nn.Linear(2, 2)  # a name that the twin would not have
    assert joined(idle) is None
    twice = nn.Conv2d(3, 3, 1)
    assert joined(nn.Sequential(twice, nn.BatchNorm2d(3), twice)) is None  # its gradient is a sum of two
    assert joined(Chancy(*layers)) is None
    assert joined(nn.Sequential(nn.BatchNorm2d(3, momentum=None))) is None


def test_a_joined_norm_refuses_one_number_a_channel_as_pytorch_does(monkeypatch):
    monkeypatch.setattr("cps.training.cuda.convolution.runs_in_bf16", lambda signal: True)
    norm = joined(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.randn(1, 3, 1, 1))


def test_layers_may_write_their_gradients_where_they_belong():
    flat = FlatParameters({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2, 5))})
    flat.parameters["b"].grad = torch.full((2, 5), 3.0)
    with pytest.raises(AssertionError, match="no gradient reached a"):
        flat.gather()
    flat.written.add("a")
    flat.views(flat.vector.grad)["a"].fill_(2.0)
    flat.parameters["b"].grad = torch.full((2, 5), 3.0)
    flat.gather()
    found = flat.views(flat.vector.grad)
    assert found["a"].tolist() == [2.0] * 3
    assert found["b"].tolist() == [[3.0] * 5] * 2
    assert float(flat.vector.grad.sum()) == 36.0  # and nothing in between


def test_an_engine_that_cannot_be_built_is_tried_without_own_kernels_and_then_given_up(monkeypatch, caplog, fabric):
    """There may be no C compiler, which Triton needs."""

    def fails(*_, is_quick, **__):
        raise RuntimeError(f"no compiler, quick: {is_quick}\nand more")

    monkeypatch.setattr(training_module, "CapturedStep", fails)
    trainer = training_module.Trainer(fabric)
    images = torch.randn(8, 3, 8, 8)
    model, how = Classifier(conv_net(3), nn.Linear(12, 2)), {"is_bf16": False, "is_long": False, "choosing": ()}
    assert trainer._built(model, images, cps.Training(1), BatchTransform(), how) is None
    assert [record.message for record in caplog.records] == [
        "training goes on without kernels of its own: no compiler, quick: True",
        "training goes on without a CUDA graph: no compiler, quick: False",
    ]


@pytest.mark.parametrize("wrong", ["sign", "missing", "nan", "one layer"])
def test_gradients_of_own_kernels_that_differ_are_refused(wrong):
    torch.manual_seed(0)
    exact = {name: torch.randn(8, 8) for name in "abc"}
    noise = {"a": 0.4, "b": 0.1, "c": 0.02}  # what bf16 does in layers near the images, and in later ones
    plain, ours = ({name: value + noise[name] * torch.randn(8, 8) for name, value in exact.items()} for _ in range(2))
    check_alike(ours, plain, exact)  # the negative control
    if wrong == "missing":
        del ours["b"]
    else:
        ours["b"] = {"sign": -ours["b"], "nan": ours["b"] * torch.nan, "one layer": ours["b"] * 1.4}[wrong]
    with pytest.raises(RuntimeError, match="own kernels do not agree"):
        check_alike(ours, plain, exact)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_an_engine_compares_its_own_kernels_with_those_of_pytorch(is_wrong):
    engine, model, _ = small_engine(awkward(), 30)
    images = torch.randn(8, 3, 8, 8)
    engine.begin(model, {}, None)
    plain = engine._classifier(accelerated_copy(model.backbone, images[:2], is_bf16=True, is_quick=False))
    if is_wrong:
        engine.inner.blocks[0].conv1.register_full_backward_hook(lambda _, found, __: (-2 * found[0],))
    with pytest.raises(RuntimeError, match="do not agree .*stem") if is_wrong else nullcontext():
        engine._check(plain, images)


@needs_gpu
@pytest.mark.parametrize("optimizer", [cps.SGD(0.1), cps.Adam(1e-2), cps.AdamW(1e-2)], ids=repr)
def test_an_update_in_one_kernel_is_that_of_pytorch(optimizer):
    torch.manual_seed(0)
    start, kept = torch.randn(5003, device=ACCELERATOR), torch.rand(5003, device=ACCELERATOR) < 0.3
    slopes = torch.randn(5, 5003, device=ACCELERATOR)
    found = []
    for in_one in (False, True):
        flat = FlatParameters({"a": nn.Parameter(start.clone())})
        update = Update(flat, optimizer, flat.views, ())
        update.make_capturable(is_fused=not in_one)
        update()
        if in_one:
            update.work_in_one()
        assert (update._in_one is not None) == in_one
        flat.views(flat.vector.detach())["a"].copy_(start)
        update.begin({"a": Kept(kept, start.clone(), torch.zeros_like(kept))}, {}, {})
        for step, slope in enumerate(slopes):
            flat.views(flat.vector.grad)["a"].copy_(slope)
            update.set_rate(1 / (1 + step))
            update()
        found.append((flat.views(flat.vector.detach())["a"].clone(), *update.state_of_each()["a"].values()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1][0][kept], start[kept])
    assert not torch.equal(found[1][0][~kept], start[~kept])


UNKNOWN = {
    "nesterov": lambda values: torch.optim.SGD(values, 0.1, 0.9, nesterov=True),
    "no momentum": lambda values: torch.optim.SGD(values, 0.1),
    "amsgrad": lambda values: torch.optim.Adam(values, amsgrad=True),
    "a beta of zero": lambda values: torch.optim.Adam(values, betas=(0.0, 0.99)),
    "another kind": torch.optim.RMSprop,
}


@pytest.mark.parametrize("optimizer", UNKNOWN.values(), ids=UNKNOWN)
def test_an_optimizer_that_is_not_known_takes_its_own_steps(optimizer):
    pytest.importorskip("triton")
    flat = FlatParameters({"a": nn.Parameter(torch.ones(8))})
    update = Update(flat, optimizer, flat.views, ())
    update()
    update.work_in_one()
    assert update._in_one is None


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_an_update_in_one_kernel_that_does_something_else_is_refused(monkeypatch, factor):
    kernels = pytest.importorskip("cps.training.cuda.optimizer_kernels")
    flat = FlatParameters({"a": nn.Parameter(torch.ones(8))})
    update = Update(flat, cps.SGD(0.1), flat.views, ())
    flat.vector.grad.fill_(1.0)
    update()

    def other(optimizer, vector, free, value):
        def step():
            optimizer.param_groups[0]["lr"] = 0.1 * factor
            optimizer.step()

        return step

    monkeypatch.setattr(kernels, "own_update", other)
    with pytest.raises(RuntimeError, match="in the update") if factor != 1 else nullcontext():
        update.work_in_one()


@needs_gpu
def test_joined_norms_train_as_separate_ones_do():
    """In bf16, so only nearly: no further from full precision than separate ones, within a factor."""
    torch.manual_seed(0)
    device = torch.device(ACCELERATOR)
    images, labels = torch.randn(32, 3, 16, 16, device=device), torch.arange(32, device=device) % 4
    model = Classifier(resnet18_third().to(device), nn.Linear(170, 4).to(device))
    initial, losses, moved = copy.deepcopy(model.state_dict()), [], []
    for is_quick, is_bf16 in ((True, True), (False, True), (False, False)):
        training = cps.Training(1, cps.SGD(0.01), batch_size=32)
        engine = CapturedStep(
            model, images, training, BatchTransform(), is_bf16=is_bf16, is_long=False, is_quick=is_quick
        )
        assert (engine.bf16_weights is not None) == is_quick
        model.load_state_dict(initial)
        engine.begin(model, {}, None)
        plan = EpochPlan([torch.arange(32)] * 8, torch.zeros(256, 0), [1.0] * 8, [1.0] * 8)
        losses.append(float(engine.run(TensorExamples(images.repeat(8, 1, 1, 1), labels.repeat(8)), plan)))
        engine.settle()
        moved.append({name: value.detach() - initial[name] for name, value in model.named_parameters()})
        assert int(model.backbone.norm.num_batches_tracked) == 8
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    check_alike(*moved)


OPTIMIZERS = [cps.SGD(0.05), cps.Adam(1e-2), cps.AdamW(1e-2)]
WAYS = [(optimizer, False) for optimizer in OPTIMIZERS] + [
    pytest.param(optimizer, True, marks=needs_gpu) for optimizer in (cps.SGD(0.05), cps.Adam(1e-3))
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile
@pytest.mark.parametrize(("optimizer", "compiled"), WAYS)
def test_an_engine_trains_as_plain_steps_do_and_forgets_the_classifier_before(optimizer, compiled):
    """On a GPU the later steps replay a graph."""
    torch.manual_seed(0)
    device = torch.device(ACCELERATOR)
    training = cps.Training(1, optimizer, batch_size=8)
    images, labels = torch.randn(8, 3, 8, 8, device=device).double(), torch.arange(8, device=device) % 2
    uniform = torch.rand(8, 1).to(device)
    backbone = awkward().double().to(device)
    initial = copy.deepcopy(backbone.state_dict())
    taken, off = ((torch.rand(18, 3, 1, 1) < share).to(device) for share in (0.5, 0.3))
    guard = {"stem.weight": Kept(taken, initial["stem.weight"].clone(), off)}
    heads = [nn.Linear(30, 2).double().to(device) for _ in range(2)]
    prepare = Prepare(dtype=torch.float64)
    first = Classifier(backbone, heads[0])
    engine = CapturedStep(first, images, training, BatchTransform(prepare, cps.Flip()), is_bf16=False, is_long=compiled)
    assert (engine._fast is not None) == compiled
    examples = TensorExamples(images.repeat(3, 1, 1, 1), labels.repeat(3))
    factors = (1.0, 0.5, 0.5, 0.1, 0.1, 0.1)

    def by_engine(head):
        backbone.load_state_dict(initial)
        model = Classifier(backbone, copy.deepcopy(head))
        engine.begin(model, guard, None)
        for epoch in range(2):  # an epoch of three steps on the same images
            order = [torch.arange(8)] * 3
            engine.run(examples, EpochPlan(order, uniform.repeat(3, 1), factors[3 * epoch : 3 * epoch + 3], [1.0] * 3))
        optimizer_state = engine.optimizer_state()["state"]
        return copy.deepcopy(model.state_dict()), optimizer_state

    def by_plain_steps(head):
        backbone.load_state_dict(initial)
        model = Classifier(backbone, copy.deepcopy(head)).train()
        made = optimizer(model.parameters())
        protect = bind(guard, dict(backbone.named_parameters()))
        for factor in factors:
            made.param_groups[0]["lr"] = optimizer.lr * factor
            nn.functional.cross_entropy(model(cps.Flip()(images, uniform)), labels).backward()
            made.step()
            made.zero_grad()
            protect()
        return model.state_dict(), made.state_dict()["state"]

    close = 5e-3 if compiled else 1e-3  # Adam, compiled by torch, corrects its bias in 32 bits
    for head in heads:  # the second with what the first has left
        for ours, plain in zip(by_engine(head), by_plain_steps(head), strict=True):
            torch.testing.assert_close(ours, plain, rtol=close, atol=close, check_device=False)


def small_engine(backbone, features):
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8) % 2
    model = Classifier(backbone, nn.Linear(features, 2))
    training = cps.Training(1, cps.Adam(1e-2), batch_size=8)
    engine = CapturedStep(model, images, training, BatchTransform(), is_bf16=False, is_long=False)
    examples = TensorExamples(images, labels)
    return engine, model, lambda: engine.run(examples, EpochPlan([torch.arange(8)], torch.zeros(8, 0), [1.0], [1.0]))


def test_what_is_aside_is_waited_for_in_turn_with_the_epochs_of_other_threads(monkeypatch):
    engine, _, _ = small_engine(awkward(), 30)
    is_mine = []
    monkeypatch.setattr(type(engine._aside), "join", lambda _: is_mine.append(RNG_LOCK._is_owned()))
    engine.forget()
    assert is_mine == [True]


def test_an_engine_serves_tasks_of_any_number_of_images_one_after_the_other():
    """Whole batches, smaller ones, one batch alone, and again the first number; nothing of one task is in the next."""
    engine, model, _ = small_engine(awkward(), 30)
    initial = copy.deepcopy(model.state_dict())
    found = {}
    for task, number in enumerate((20, 5, 16, 20)):
        draws = torch.Generator().manual_seed(number)
        images, labels = torch.randn(number, 3, 8, 8, generator=draws), torch.arange(number) % 2
        order = torch.arange(number).split(8)
        plan = EpochPlan(order, torch.zeros(number, 0), [1.0] * len(order), [1.0] * len(order))
        model.load_state_dict(initial)
        engine.begin(model, {}, None)
        loss = float(engine.run(TensorExamples(images, labels), plan))
        engine.settle()
        engine.forget()
        found[task] = loss, copy.deepcopy(model.state_dict())
    assert found[0][0] == found[3][0]
    assert all(torch.equal(value, found[3][1][name]) for name, value in found[0][1].items())
    assert found[1][0] != found[2][0]


def test_padding_stays_zero_without_a_guard_where_an_activation_is_not_zero_at_zero():
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Sigmoid(), nn.Conv2d(5, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    engine, model, step = small_engine(backbone, 6)
    assert engine.inner[0].out_channels == 8
    engine.begin(model, {}, None)
    for _ in range(20):
        step()
    engine.settle()
    images = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(engine.live.eval()(images), model.eval()(images), rtol=1e-4, atol=1e-5)


def test_a_step_that_failed_half_way_leaves_no_gradient_behind():
    engine, model, step = small_engine(conv_net(3), 12)
    initial = copy.deepcopy(model.state_dict())

    def train():
        model.load_state_dict(initial)
        engine.begin(model, {}, None)
        step()
        engine.settle()
        return copy.deepcopy(model.state_dict())

    def stop(_gradient):
        raise RuntimeError("stopped")

    expected = train()
    handle = engine.inner[0].weight.register_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        step()
    handle.remove()
    assert engine.live.head.weight.grad is not None  # the negative control: there is something to forget
    torch.testing.assert_close(train(), expected)


def test_an_optimizer_without_state_is_taken_up_again():
    engine, model, step = small_engine(conv_net(3), 12)
    engine.begin(model, {}, {"state": {}, "param_groups": []})
    step()
    groups = engine.optimizer_state()["param_groups"][0]
    assert isinstance(groups["lr"], float)
    assert not groups.get("capturable")


def test_many_engines_are_all_compiled(monkeypatch):
    """torch.compile stops compiling a function after eight times; each engine has one of its own."""
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda work, **_: original(work, backend=backend, dynamic=False))

    class Doubles:
        def __init__(self, factor):
            self.factor = factor

        def double(self, value):
            return value * self.factor

    for factor in range(12):
        assert compiled_alone(Doubles(factor).double)(torch.ones(1)) == factor
    assert len(compiled) == 12


class Times:
    """A network of a crowd that sees pixels times a factor."""

    def __init__(self, factor):
        self.factor = factor

    def look(self, pixels):
        return self.factor * pixels.flatten(1)

    def say(self, seen):
        return Outputs(seen, -seen)


def test_threads_of_others_have_as_many_as_before_a_crowd_ran():
    from threading import Thread

    before, seen = torch.get_num_threads(), []
    ParallelInference([Times(1)])(torch.rand(3, 1, 2, 2))
    thread = Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_crowd_is_gone_with_all_that_its_graphs_hold_as_soon_as_nobody_needs_it():
    crowd = ParallelInference([Times(1)])
    crowd(torch.rand(3, 1, 2, 2))
    gc.disable()
    try:
        gone = weakref.ref(crowd._captured)
        del crowd
        assert gone() is None
    finally:
        gc.enable()


def test_a_crowd_looks_at_few_enough_images_at_once_for_the_memory_of_a_gpu(monkeypatch):
    crowd, launched = ParallelInference([Times(1), Times(2)], views=2), []

    def launch(pixels):
        launched.append(len(pixels))
        return [part for network in crowd.networks for part in network.say(network.look(pixels))]

    monkeypatch.setattr(crowd, "_captured", launch)
    monkeypatch.setattr("cps.network.compact.parallel_inference.LAUNCH", 6 * 48)
    images = torch.randn(7, 3, 4, 4)
    found = crowd._in_launches(images)
    assert launched == [3, 3, 1]
    for outputs, network in zip(found, crowd.networks, strict=True):
        assert all(map(torch.equal, outputs, network.say(network.look(images))))


@needs_gpu
def test_the_step_is_captured_and_the_same_seed_gives_the_same_bits(make_learner):
    training = cps.Training(4, cps.Adam(1e-2), cps.Cosine(), batch_size=8)

    def run():
        torch.manual_seed(0)
        backbone = nn.Sequential(awkward(), nn.Dropout(0.2))
        learner = make_learner(backbone, train=training, retrain=training, augment=cps.PadCrop(1), rounds=2)
        engines = set()
        for first in (0, 10):
            learner.learn(make_task(first, shape=(3, 8, 8), images=37))
            engines.add(learner._trainer._engine[1])
        (engine,) = engines  # one for all phases and tasks; whole batches and the last
        assert [len(step._graphs) for step in engine._steps.values()] == [1] * 4  # before, whole, to the last, the last
        assert not engine._feed._images.any()  # and no image is kept
        assert not any(pixels.any() for pixels, _ in engine._feed._ready.values())
        learner.learn(
            make_task(20, shape=(3, 8, 8), images=29)
        )  # other steps are captured for another number of images
        assert learner._trainer._engine[1] is engine
        assert [len(step._graphs) for step in engine._steps.values()] == [1] * 4
        return [learner.fingerprint(task) for task in range(2)]

    assert run() == run()


class Unknown(nn.Sequential):
    """Code that nobody knows to do the same in every pass, so its norms are not joined."""


@needs_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_in_bf16_the_same_seed_gives_the_same_bits_and_gradients_are_those_of_cudnn(monkeypatch, compiled):
    import cps.training.cuda.convolution
    import cps.training.trainer

    if compiled:
        monkeypatch.setattr(cps.training.trainer, "LONG", 1)
    training = cps.Training(2, cps.SGD(0.05), batch_size=16)

    def run(precision=None):
        torch.manual_seed(0)
        fabric = cps.make_fabric(accelerator=ACCELERATOR, precision=precision)
        backbone = Unknown(awkward()) if compiled else awkward()
        learner = cps.Learner(backbone, train=training, retrain=training, rounds=1, fabric=fabric)
        learner.learn(make_task(0, shape=(3, 16, 16), images=64))
        assert (learner._trainer._engine[1]._fast is not None) == compiled
        return learner.fingerprint(0), learner.network.subnetworks[0].head

    first, again = run(), run()
    assert first[0] == again[0]
    monkeypatch.setattr(cps.convolution, "LARGEST", 0)
    plain, exact = run(), run("32-true")
    assert plain[0] != first[0]  # other kernels, other bits
    check_alike(first[1], plain[1], exact[1])


@needs_gpu
def test_images_that_do_not_fit_stay_on_the_host_and_train_to_the_same_bits(make_learner, monkeypatch, caplog):
    import cps.data.examples

    def run():
        torch.manual_seed(0)
        learner = make_learner(awkward(), augment=cps.Flip())
        learner.learn(make_task(0, shape=(3, 8, 8)))
        return learner.fingerprint(0)

    resident = run()
    monkeypatch.setattr(cps.data, "_fits", lambda *_: False)
    assert run() == resident
    assert "stay in the host's memory" in caplog.text


def test_all_phases_of_a_task_ask_for_the_same_engine(make_learner, monkeypatch):
    """24 images in batches of 16 for 2 epochs are 3 batches; with the retraining of two rounds they are 9."""
    asked = []
    monkeypatch.setattr(training_module, "LONG", 9)
    monkeypatch.setattr(training_module.Trainer, "_engine_for", lambda *arguments: asked.append(arguments[-1]))
    make_learner(rounds=2).learn(make_task(0))
    assert asked == [True] * 3
    asked.clear()
    make_learner(rounds=1).learn(make_task(0))
    assert asked == [False] * 2
