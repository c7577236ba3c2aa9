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
