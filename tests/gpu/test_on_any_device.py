"""What a CPU forgives and a GPU does not; with CPS_TEST_ACCELERATOR=cuda these ask more than on a CPU."""

import copy
import logging
import threading

import pytest
import torch
from torch import nn

import cps
from cps.data.examples import as_examples
from cps.network.backbone_checks import first_pass
from cps.network.compact.cache import CompactCache
from cps.runtime import devices
from cps.runtime import seeding as seeds
from cps.runtime.cuda_graphs import Captured
from cps.runtime.seeding import seeded
from cps.training import trainer as training
from samples import ACCELERATOR, ListDataset, conv_net, make_task, use_all_compact


class Watching(nn.Module):
    """Notes some switches of torch each time it runs."""

    def __init__(self, switches):
        super().__init__()
        self.layer, self.switches, self.seen = nn.Linear(72, 4), switches, []

    def forward(self, images):
        self.seen.append(self.switches())
        return self.layer(images.flatten(1))


def test_what_lightning_tells_of_every_device_is_kept_from_the_user():
    lightning = devices._lightning_fabric()
    warned, listener = [], logging.Handler()
    listener.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger(f"{lightning.__name__}.utilities.rank_zero").addHandler(listener)
    cps.make_fabric(accelerator=ACCELERATOR, precision="bf16-mixed")
    assert not warned
    lightning.Fabric(accelerator=ACCELERATOR, precision="bf16-mixed", devices=1)
    assert "bfloat16" in warned[0]


def test_no_search_for_kernels_reaches_what_is_learned_and_predicted(make_learner, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    learner = make_learner(Watching(lambda: torch.backends.cudnn.benchmark))
    learner.learn(make_task(0))
    learner.predict(make_task(0).test[0])
    assert set(learner.network.backbone.seen) == {False}
    assert torch.backends.cudnn.benchmark


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9 has other switches")
def test_fingerprints_are_taken_in_full_precision(make_learner):
    learner = make_learner(Watching(lambda: torch.backends.cudnn.conv.fp32_precision))
    learner.learn(make_task(0))
    learner.network.backbone.seen.clear()
    learner.fingerprint(0)
    assert set(learner.network.backbone.seen) == {"ieee"}


def test_the_first_look_holds_its_precision_against_other_threads():
    backbone = Watching(lambda: torch.backends.cudnn.deterministic)
    first_pass(backbone, ["layer.weight"], make_task(0).train[0][:2])
    assert set(backbone.seen) == {True}
    assert not torch.backends.cudnn.deterministic


def test_images_on_the_learners_device_are_learned_and_evaluated(make_learner):
    learner, task = make_learner(), make_task(0)
    device = learner.network.device
    train, test = (task.train[0].to(device), task.train[1]), (task.test[0].to(device), task.test[1])
    there = cps.Task(task.classes, train, test=test, val=test)
    learner.learn(there)
    assert cps.evaluate(learner, [there], group_sizes=[1])["task_il"]["ACC"] > 0


def test_labels_are_where_their_images_are():
    images = torch.zeros(4, 2, 6, 6, dtype=torch.uint8, device="meta")
    assert as_examples((images, [0, 1, 0, 1]), torch.tensor).targets.device.type == "meta"


class OnCPU(cps.MaxOutput):
    """A selector that keeps and returns everything on the CPU."""

    name = "OnCPU"

    def observe(self, subnetwork, evidence, labels, earlier):
        return {"mean": evidence[-1].features.cpu().mean(dim=0)}

    def __call__(self, evidence, statistics, groups):
        assert {kept["mean"].device for kept in statistics} == {groups.device}
        return super().__call__(evidence, statistics, groups).cpu()


class HalfOnCPU:
    """A pruner that switches off every second input, in masks on the CPU."""

    def __call__(self, backbone, masks, batches):
        return {name: mask.cpu() & (torch.arange(mask.shape[1]) % 2 == 0).view(1, -1, *[1] * (mask.ndim - 2))
                for name, mask in masks.items()}  # fmt: skip


def test_pruners_and_selectors_that_compute_on_the_cpu_serve_any_learner(make_learner, tmp_path):
    learner = make_learner(pruner=HalfOnCPU(), selectors=[OnCPU()])
    for first in (0, 10):
        learner.learn(make_task(first))
    images = make_task(0).test[0]
    learner.save(tmp_path / "model.cps")
    settings = {"pruner": HalfOnCPU(), "selectors": [OnCPU()], "fabric": learner.fabric}
    loaded = cps.load(tmp_path / "model.cps", conv_net(), **settings)
    assert loaded.predict(images).classes == learner.predict(images).classes


def test_predictions_in_inference_mode_do_not_break_later_ones(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    use_all_compact(learner)
    images = make_task(0).test[0]
    with torch.inference_mode():
        before = [learner.predict(images).classes for _ in range(6)]
    assert [learner.predict(images).classes for _ in range(6)] == before
    learner.network.release_images()


def test_a_prediction_is_the_same_however_often_it_was_asked_for(make_learner):
    learner = make_learner()
    for first in (0, 10):
        learner.learn(make_task(first))
    images = make_task(0).test[0]
    shares = [learner.predict(images).share for _ in range(6)]  # from the fourth on a GPU replays a graph
    assert all(torch.equal(share, shares[0]) for share in shares)
    assert not torch.equal(learner.predict(images.flip(0)).share, shares[0])


def test_a_gpu_predicts_by_small_networks_even_where_they_are_as_large_as_the_whole(make_learner):
    learner = make_learner(pruner=cps.Magnitude(0.9))
    learner.learn(make_task(0))
    assert learner.network._compact.is_worthwhile(0) == (ACCELERATOR == "cuda")


def test_a_learner_that_holds_what_cannot_be_copied_is_copied_without(make_learner):
    learner, task = make_learner(), make_task(0)
    learner.learn(task)
    learner._trainer._engine = ("key", threading.Lock())
    learner.network._compact._parallel[1, 2] = threading.Lock()
    other = copy.deepcopy(learner)
    assert other._trainer._engine is None
    assert other.predict(task.test[0]).classes == learner.predict(task.test[0]).classes
    assert isinstance(other.network._compact, CompactCache)


def test_seeding_for_one_device_leaves_the_others_alone(monkeypatch):
    def refuse(seed):
        raise AssertionError("all GPUs would be seeded, and none put back")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    before = torch.get_rng_state()
    with seeded(torch.device("cpu"), 1):
        first = torch.rand(3)
    with seeded(torch.device("cpu"), 1):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_engines_are_built_in_turn_with_the_epochs_of_other_threads(fabric, monkeypatch):
    built = []
    monkeypatch.setattr(training, "CapturedStep", lambda *_, **how: built.append(seeds.RNG_LOCK._is_owned()))
    training.Trainer(fabric)._built(*[None] * 4, {})
    assert built == [True]


def test_plain_steps_in_mixed_precision_take_any_loss(make_learner):
    fabric, task = cps.make_fabric(accelerator=ACCELERATOR, precision="bf16-mixed"), make_task(0)
    training = cps.Training(1, cps.Adam(1e-2), batch_size=16, loss=cps.Contrastive())
    learner = make_learner(train=training, retrain=training, fabric=fabric)
    learner.learn(cps.Task(task.classes, ListDataset(*task.train)))
    assert learner.predict(task.test[0]).classes


def test_a_backbone_in_float64_is_refused_in_mixed_precision(make_learner):
    fabric = cps.make_fabric(accelerator=ACCELERATOR, precision="bf16-mixed")
    with pytest.raises(ValueError, match="float64 cannot be trained in bf16-mixed; pass fabric="):
        make_learner(conv_net().double(), fabric=fabric).learn(make_task(0))


def test_running_out_of_memory_is_called_by_its_name():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(72, 4)

        def forward(self, images):
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        first_pass(Large(), ["layer.weight"], make_task(0).train[0][:2])


@pytest.mark.skipif(ACCELERATOR != "cuda", reason="needs a GPU")
def test_a_capture_that_fails_leaves_the_gpu_as_it_was(caplog):
    def impossible(values):
        return [values * float(values.sum().item())]  # which waits for the GPU

    pool = torch.cuda.graph_pool_handle()
    work, double = Captured(impossible, pool), Captured(lambda values: [values * 2], pool)
    ones = torch.ones(4, device="cuda")
    for _ in range(2):  # a second failure is left as well as the first
        assert [float(work(ones)[0].sum()) for _ in range(6)] == [16.0] * 6
        work._impossible = False
    assert caplog.text.count("without a CUDA graph: CUDA error") == 2
    torch.cuda.empty_cache()
    nn.functional.dropout(ones)
    assert [float(double(ones)[0].sum()) for _ in range(6)] == [8.0] * 6
    assert len(double._graphs) == 1
    before = torch.cuda.memory_reserved()
    torch.zeros(2**26, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before  # what comes later is given back


@pytest.mark.skipif(ACCELERATOR != "cuda", reason="needs a GPU")
def test_nothing_is_captured_while_another_thread_may_draw_numbers():
    double, ones = Captured(lambda values: [values * 2]), torch.ones(4, device="cuda")
    has_begun, may_end = threading.Event(), threading.Event()

    def draw():
        with seeded(torch.device("cuda", 0), 0):
            has_begun.set()
            while not may_end.wait(0.001):
                nn.functional.dropout(ones)

    other = threading.Thread(target=draw)
    other.start()
    has_begun.wait()
    assert [float(double(ones)[0].sum()) for _ in range(6)] == [8.0] * 6
    assert not double._graphs
    may_end.set()
    other.join()
    assert [float(double(ones)[0].sum()) for _ in range(3)] == [8.0] * 3
    assert len(double._graphs) == 1


@pytest.mark.skipif(ACCELERATOR != "cuda", reason="needs a GPU")
def test_threads_with_streams_of_their_own_may_share_a_graph():
    def slow(values):
        for _ in range(100):
            values = values + 1  # so that what others ask would be seen
        return [values]

    work, wrong = Captured(slow), []

    def ask(factor):
        values = torch.linspace(0, factor, 2**20, device="cuda")
        (expected,) = slow(values)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [work(values)[0] for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            wrong.extend(one for one in found if not torch.equal(one, expected))

    askers = [threading.Thread(target=ask, args=(factor,)) for factor in (1.0, 2.0, 4.0)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert work._graphs
    assert not wrong
