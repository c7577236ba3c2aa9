"""Threads and forked processes: whoever predicts at the same time gets the right answers and breaks nobody else."""

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
from cps.network.compact.fx_tracing import traced
from cps.runtime.devices import deterministic_cudnn
from samples import ACCELERATOR, conv_net, make_task, use_all_compact


@pytest.fixture
def learner(make_learner):
    learner = make_learner(pruner=cps.NNrelief(0.6), rounds=2)
    for index in range(3):
        learner.learn(make_task(10 * index))
    return learner


def test_threads_that_predict_at_once_from_a_cold_start_get_the_right_answers(learner):
    images = make_task(0).test[0]
    right = [learner.predict(images, task=task) for task in range(3)]
    learner.network.clear_compact()
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda number: learner.predict(images, task=number % 3), range(60)))
    assert all(torch.equal(one.confidence, right[number % 3].confidence) for number, one in enumerate(found))
    assert nn.Sequential(nn.Linear(2, 2))(torch.rand(1, 2)).shape == (1, 2)


class Free:
    """What the network's lock would be, if nobody took turns."""

    __enter__ = __exit__ = lambda *_: None


@pytest.mark.parametrize("take_turns", [True, False])
def test_answers_are_right_because_threads_take_turns(learner, monkeypatch, take_turns):
    images = make_task(0).test[0].repeat(50, 1, 1, 1)
    right = [learner.network.whole_outputs([images], task).logits for task in range(3)]
    if not take_turns:  # the negative control
        learner.network._turns = Free()
    meet = threading.Barrier(3)
    forward, seen = learner.network.backbone[0].forward, threading.local()

    def together():
        with suppress(threading.BrokenBarrierError):
            meet.wait(0.5 if take_turns else 20)

    def slow(
        pixels,
    ):  # all put their tensors in before any goes on, and none takes them out before all went, if they can
        if getattr(seen, "met", False):
            return forward(pixels)
        seen.met = True
        together()
        features = forward(pixels)
        together()
        return features

    monkeypatch.setattr(learner.network.backbone[0], "forward", slow)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda task: learner.network.whole_outputs([images], task).logits, range(3)))
    assert all(map(torch.equal, found, right)) == take_turns


def test_a_prediction_waits_while_its_learner_learns(learner):
    images, answers = make_task(0).test[0], []
    right = learner.predict(images, task=0)
    asked = threading.Thread(target=lambda: answers.append(learner.predict(images, task=0)))
    learner.watch = lambda at: None if asked.ident else asked.start()
    learner.learn(make_task(30))
    asked.join(60)
    assert torch.equal(answers[0].confidence, right.confidence)
    assert len(learner.network.subnetworks) == 4


class Stopping(nn.Module):
    """Lets another thread go on while it is traced."""

    def __init__(self, is_traced, may_go_on):
        super().__init__()
        self.layer, self._events = nn.Linear(2, 2), (is_traced, may_go_on)

    def forward(self, images):
        self._events[0].set()
        self._events[1].wait(20)
        return self.layer(images)


def test_modules_of_other_threads_work_while_one_is_traced():
    is_traced, may_go_on = threading.Event(), threading.Event()
    other, images = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.rand(4, 2)
    expected = other(images)
    with ThreadPoolExecutor(1) as pool:
        graph = pool.submit(traced, Stopping(is_traced, may_go_on))
        assert is_traced.wait(20)
        found = other(images)
        may_go_on.set()
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
        signal.alarm(20)  # ends it, were it to wait for ever
        learner.network.outputs([images], [0])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_copies_and_pickles_of_a_learner_predict_while_the_first_is_in_use(learner):
    images = make_task(0).test[0]
    network, right = learner.network, learner.predict(images).classes
    copies = [copy.deepcopy(network), pickle.loads(pickle.dumps(network))]
    with network.in_use(), ThreadPoolExecutor(1) as pool:
        for each in copies:
            again = copy.copy(learner)
            again.network = each
            assert pool.submit(again.predict, images).result(20).classes == right


class Asking(cps.MaxOutput):
    """Lets another thread ask while the task that was just sealed is looked at."""

    def observe(self, subnetwork, evidence, labels, earlier):
        self.ask()
        return {"number": torch.tensor([1.0])}

    def __call__(self, evidence, statistics, groups):
        assert all("number" in kept for kept in statistics)
        return super().__call__(evidence, statistics, groups)


@pytest.mark.parametrize("fails", [False, True])
def test_other_threads_see_a_task_whole_or_not_at_all(make_learner, tmp_path, fails):
    selector = Asking()
    learner, path, images = make_learner(selectors=[selector]), tmp_path / "model.cps", make_task(0).test[0]
    object.__setattr__(selector, "ask", lambda: None)
    learner.learn(make_task(0))
    answers = []

    def saved():
        learner.save(path)
        return len(cps.load(path, conv_net(), selectors=[selector], fabric=learner.fabric).network.subnetworks)

    questions = (lambda: len(learner.evidence(images)), lambda: learner.predict(images) and None, saved)
    asked = [threading.Thread(target=lambda ask=ask: answers.append(ask())) for ask in questions]

    def start_asking():
        for thread in asked:
            thread.start()
        asked[-1].join(0.3)
        if fails:
            raise KeyboardInterrupt

    object.__setattr__(selector, "ask", start_asking)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        learner.learn(make_task(10))
    for thread in asked:
        thread.join(60)
    tasks = 1 if fails else 2
    assert sorted(answers, key=str) == [tasks, tasks, None]


def test_a_learner_cannot_learn_or_forget_while_it_learns(learner):
    before = [learner.fingerprint(task) for task in range(3)]
    for nested in (lambda at: learner.learn(make_task(40)), lambda at: learner.forget(0)):
        learner.watch = nested
        with pytest.raises(RuntimeError, match="a task is being learned or forgotten"):
            learner.learn(make_task(30))
    learner.watch = lambda at: learner.predict(make_task(0).test[0])
    learner.learn(make_task(30))
    assert [learner.fingerprint(task) for task in range(3)] == before


def test_learners_that_learn_in_threads_of_one_process_learn_what_they_would_alone(make_learner):
    def learned(learner):
        learner.learn(make_task(0))
        return learner.fingerprint(0)

    backbone = nn.Sequential(*conv_net(), nn.Dropout(0.5))
    learners = [make_learner(backbone) for _ in range(3)]
    alone = learned(learners.pop())
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(learned, learners)) == [alone, alone]


def test_switches_that_two_threads_set_at_once_are_put_back():
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    first, second = deterministic_cudnn(), deterministic_cudnn()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert cudnn.deterministic
    second.__exit__(None, None, None)
    assert (cudnn.deterministic, cudnn.benchmark) == before


def test_an_evidence_says_so_when_its_tasks_were_forgotten_meanwhile(learner):
    evidence = learner.evidence(make_task(0).test[0])
    learner.forget(0)
    with pytest.raises(RuntimeError, match="tasks were forgotten"):
        evidence[0]


def test_drawing_a_backbone_in_another_thread_does_not_reach_the_draws_of_a_learner(make_learner):
    backbone = nn.Sequential(*conv_net(), nn.Dropout(0.5))
    alone, other = make_learner(backbone), make_learner(backbone)
    alone.learn(make_task(0))
    done = threading.Event()

    def draw():
        while not done.is_set():
            cps.Builtin("small", 2).drawn(1)

    drawing = threading.Thread(target=draw)
    drawing.start()
    other.learn(make_task(0))
    done.set()
    drawing.join(60)
    assert other.fingerprint(0) == alone.fingerprint(0)


def test_a_stream_refuses_evidence_of_fewer_tasks_than_there_are(learner):
    evidence = learner.evidence(make_task(0).test[0])
    learner.learn(make_task(30))
    with pytest.raises(ValueError, match="the evidence is of 3 tasks"):
        learner.stream().predict_by(evidence)
