"""ImportanceSignature selects the task with the closest signature."""

import pytest
import torch

import cps
from samples import make_task


@pytest.mark.parametrize("norm", [1, 2])
def test_the_signature_is_the_formula_of_the_paper(make_learner, norm):
    """Distance of the signed means of w_ij times feature_i, over all connections of the head (eqs. 7, 8)."""
    selector = cps.ImportanceSignature(norm)
    learner = make_learner(selectors=(selector,))
    tasks = [make_task(0), make_task(10)]
    for task in tasks:
        learner.learn(task)
    images = tasks[0].test[0][:4]
    distances = []
    for index, task in enumerate(tasks):
        weight = learner.network.subnetworks[index].head["weight"]
        stored = (weight * learner.evidence(task.train[0])[index].features[:, None]).mean(dim=0)
        now = (weight * learner.evidence(images)[index].features[:, None]).mean(dim=0)
        difference = (stored - now).flatten()
        distances.append(difference.norm() if norm == 2 else difference.abs().mean())
    scores = selector(
        learner.evidence(images),
        learner.network.statistics(selector.name),
        torch.zeros(4, dtype=torch.long).to(now.device),
    )
    torch.testing.assert_close(-scores[0], torch.stack(distances), rtol=1e-4, atol=1e-6)
