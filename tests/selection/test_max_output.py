"""MaxOutput selects the task with the largest logit."""

import torch

from samples import make_task


def test_max_output_is_the_formula_of_the_paper(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    learner.learn(make_task(10))
    images = make_task(0).test[0]
    evidence = learner.evidence(images)
    sums = [outputs.logits[:5].max(dim=1).values.sum() for outputs in evidence]
    assert int(learner.predict(images[:5], group_size=5).tasks[0]) == int(torch.stack(sums).argmax())
