"""Threads and forked processes that predict at the same time get the right predictions."""

import copy
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

import cps
from cps.network.compact.fx_tracing import trace_module
from cps.runtime.devices import deterministic_cudnn
from samples import ACCELERATOR, conv_net, make_task, use_all_compact


@pytest.fixture
def learner(make_learner):
    learner = make_learner(pruner=cps.NNrelief(0.6), rounds=2)
    for index in range(3):
        learner.learn(make_task(10 * index))
    return learner


def test_threads_that_predict_at_once_without_compact_subnetworks_get_the_right_predictions(learner):
    images = make_task(0).test[0]
    expected = [learner.predict(images, task=task) for task in range(3)]
    learner.network.clear_compact()
    with ThreadPoolExecutor(6) as pool:
        predictions = list(pool.map(lambda number: learner.predict(images, task=number % 3), range(60)))
    assert all(torch.equal(one.confidence, expected[number % 3].confidence) for number, one in enumerate(predictions))
    assert nn.Sequential(nn.Linear(2, 2))(torch.rand(1, 2)).shape == (1, 2)


class NoLock:
    """A lock that does not exclude anyone."""

    __enter__ = __exit__ = lambda *_: None


@pytest.mark.parametrize("is_locked", [True, False])
def test_predictions_are_right_because_the_network_is_locked(learner, monkeypatch, is_locked):
    images = make_task(0).test[0].repeat(50, 1, 1, 1)
    expected = [learner.network.full_outputs([images], task).logits for task in range(3)]
    if not is_locked:  # the negative control
        learner.network._lock = NoLock()
    barrier = threading.Barrier(3)
    forward, local = learner.network.backbone[0].forward, threading.local()

    def wait():
        with suppress(threading.BrokenBarrierError):
            barrier.wait(0.5 if is_locked else 20)

    def slow(pixels):
        """Run when all threads have put their tensors into the backbone, unless a lock keeps them apart."""
        if getattr(local, "has_waited", False):
            return forward(pixels)
        local.has_waited = True
        wait()
        features = forward(pixels)
        wait()
        return features

    monkeypatch.setattr(learner.network.backbone[0], "forward", slow)
    with ThreadPoolExecutor(3) as pool:
        logits = list(pool.map(lambda task: learner.network.full_outputs([images], task).logits, range(3)))
    assert all(map(torch.equal, logits, expected)) == is_locked


def test_a_prediction_waits_while_its_learner_learns(learner):
    images, predictions = make_task(0).test[0], []
    expected = learner.predict(images, task=0)
    thread = threading.Thread(target=lambda: predictions.append(learner.predict(images, task=0)))
    learner.on_epoch = lambda progress: None if thread.ident else thread.start()
    learner.learn(make_task(30))
    thread.join(60)
    assert torch.equal(predictions[0].confidence, expected.confidence)
    assert len(learner.network.subnetworks) == 4


class Waiting(nn.Module):
    """Waits for another thread while it is traced."""

    def __init__(self, is_traced, may_continue):
        super().__init__()
        self.layer, self._events = nn.Linear(2, 2), (is_traced, may_continue)

    def forward(self, images):
        self._events[0].set()
        self._events[1].wait(20)
        return self.layer(images)


def test_modules_of_other_threads_work_while_one_is_traced():
    is_traced, may_continue = threading.Event(), threading.Event()
    other, images = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.rand(4, 2)
    expected = other(images)
    with ThreadPoolExecutor(1) as pool:
        graph = pool.submit(trace_module, Waiting(is_traced, may_continue))
        assert is_traced.wait(20)
        found = other(images)
        may_continue.set()
        assert torch.equal(found, expected)
        assert [node.op for node in graph.result().graph.nodes] == ["placeholder", "call_module", "output"]


@pytest.mark.skipif(ACCELERATOR != "cpu" or not hasattr(os, "fork"), reason="needs fork, which CUDA does not allow")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_predicts(learner):
    images = make_task(0).test[0]
    use_all_compact(learner)
    learner.network.outputs([images], [0])
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # end it if it waits for ever
        learner.network.outputs([images], [0])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_copies_and_pickles_of_a_learner_predict_while_the_first_is_in_use(learner):
    images = make_task(0).test[0]
    network, expected = learner.network, learner.predict(images).classes
    copies = [copy.deepcopy(network), pickle.loads(pickle.dumps(network))]
    with network.in_use(), ThreadPoolExecutor(1) as pool:
        for each in copies:
            other = copy.copy(learner)
            other.network = each
            assert pool.submit(other.predict, images).result(20).classes == expected


class Calling(cps.MaxOutput):
    """Calls a function while the statistics of a new task are collected."""

    def observe(self, subnetwork, evidence, labels, earlier):
        self.call()
        return {"number": torch.tensor([1.0])}

    def __call__(self, evidence, statistics, groups):
        assert all("number" in kept for kept in statistics)
        return super().__call__(evidence, statistics, groups)


@pytest.mark.parametrize("fails", [False, True])
def test_other_threads_see_a_task_whole_or_not_at_all(make_learner, tmp_path, fails):
    selector = Calling()
    learner, path, images = make_learner(selectors=[selector]), tmp_path / "model.cps", make_task(0).test[0]
    object.__setattr__(selector, "call", lambda: None)
    learner.learn(make_task(0))
    results = []

    def save_and_load():
        learner.save(path)
        return len(cps.load(path, conv_net(), selectors=[selector], fabric=learner.fabric).network.subnetworks)

    functions = (lambda: len(learner.evidence(images)), lambda: learner.predict(images) and None, save_and_load)
    threads = [threading.Thread(target=lambda call=call: results.append(call())) for call in functions]

    def start_threads():
        for thread in threads:
            thread.start()
        threads[-1].join(0.3)
        if fails:
            raise KeyboardInterrupt

    object.__setattr__(selector, "call", start_threads)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        learner.learn(make_task(10))
    for thread in threads:
        thread.join(60)
    tasks = 1 if fails else 2
    assert sorted(results, key=str) == [tasks, tasks, None]


def test_a_learner_cannot_learn_or_forget_while_it_learns(learner):
    before = [learner.fingerprint(task) for task in range(3)]
    for nested in (lambda progress: learner.learn(make_task(40)), lambda progress: learner.forget(0)):
        learner.on_epoch = nested
        with pytest.raises(RuntimeError, match="a task is being learned or forgotten"):
            learner.learn(make_task(30))
    learner.on_epoch = lambda progress: learner.predict(make_task(0).test[0])
    learner.learn(make_task(30))
    assert [learner.fingerprint(task) for task in range(3)] == before


def test_learners_in_threads_of_one_process_learn_the_same_bits(make_learner):
    def learn(learner):
        learner.learn(make_task(0))
        return learner.fingerprint(0)

    backbone = nn.Sequential(*conv_net(), nn.Dropout(0.5))
    learners = [make_learner(backbone) for _ in range(3)]
    expected = learn(learners.pop())
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(learn, learners)) == [expected, expected]


def test_cudnn_settings_of_overlapping_users_are_restored():
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    first, second = deterministic_cudnn(), deterministic_cudnn()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert cudnn.deterministic
    second.__exit__(None, None, None)
    assert (cudnn.deterministic, cudnn.benchmark) == before


def test_initialising_a_backbone_in_another_thread_does_not_change_the_draws_of_a_learner(make_learner):
    backbone = nn.Sequential(*conv_net(), nn.Dropout(0.5))
    first, second = make_learner(backbone), make_learner(backbone)
    first.learn(make_task(0))
    done = threading.Event()

    def initialise():
        while not done.is_set():
            cps.Architecture("small", 2).make(1)

    thread = threading.Thread(target=initialise)
    thread.start()
    second.learn(make_task(0))
    done.set()
    thread.join(60)
    assert second.fingerprint(0) == first.fingerprint(0)
