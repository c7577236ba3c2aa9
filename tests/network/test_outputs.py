"""Evidence computes the outputs of subnetworks on demand."""

import pytest
import torch

import cps
from samples import make_task


def test_iterating_over_evidence_computes_all_missing_outputs_once_and_together():
    calls = []

    def compute(tasks):
        calls.append(list(tasks))
        return [cps.Outputs(torch.full((2, 1), float(task)), torch.zeros(2, 1)) for task in tasks]

    evidence = cps.Evidence(compute, 4)
    assert evidence[-1].features[0] == 3
    assert [int(outputs.features[0]) for outputs in evidence.first(3)] == [0, 1, 2]
    assert len(list(evidence)) == 4
    assert calls == [[3], [0, 1, 2]]


def test_logits_of_pairs_are_rows_of_each_tasks_logits_and_end_in_minus_infinity():
    logits = [torch.randn(6, classes) for classes in (3, 2, 3)]
    ran = []

    def run_some(images):
        ran.append({task: rows.tolist() for task, rows in images.items()})
        return {task: cps.Outputs(logits[task][rows], logits[task][rows]) for task, rows in images.items()}

    evidence = cps.Evidence(lambda tasks: [], 3, None, run_some, 6)
    needed = torch.zeros(6, 3, dtype=torch.bool)
    needed[[1, 4], 0] = needed[[2, 5], 1] = True
    evidence.compute_some(needed)
    assert ran == [{0: [1, 4], 1: [2, 5]}]
    images, tasks = torch.tensor([5, 1, 4, 2, 0]), torch.tensor([1, 0, 0, 1, 2])
    pairs = evidence.logits_of(images, tasks)
    assert ran[1:] == [{2: [0]}]  # the only pair that had not run
    for row, image, task in zip(pairs, images, tasks, strict=True):
        assert torch.equal(row[: logits[task].shape[1]], logits[task][image])
        assert (row[logits[task].shape[1] :] == -torch.inf).all()


def test_evidence_can_be_sliced(learned):
    evidence = learned.evidence(make_task(0).test[0])
    assert torch.equal(evidence[:1][0].logits, evidence[0].logits)
    assert len(evidence[-1:]) == 1


def test_evidence_of_a_forgotten_task_raises(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    evidence = learner.evidence(make_task(0).test[0])
    learner.forget(0)
    with pytest.raises(RuntimeError, match="a task was forgotten since"):
        evidence[0]
