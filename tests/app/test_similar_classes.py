"""New classes that resemble learned ones are reported."""

import pytest
import torch

from cps.app.similar_classes import _similar_class, find_similar_names
from samples import make_task


@pytest.mark.parametrize(("level", "similar"), [(-1e9, "10"), (1e9, None)])
def test_a_class_is_similar_only_if_most_of_its_images_get_a_typical_logit(make_learner, level, similar):
    learner, task = make_learner(), make_task(10)
    learner.learn(task)
    images = task.test[0][torch.tensor([label == 10 for label in task.test[1]])]
    evidence = learner.evidence(images)
    assert set(learner.predict(images).classes) == {10}
    assert _similar_class(learner, evidence, 0, {"10": level, "11": level}) == similar


def test_names_are_similar_if_only_case_or_spaces_differ():
    assert list(find_similar_names(["Bolt ", "nut", "n ut", "pin"], ["bolt", "pin"])) == [
        ("Bolt ", "bolt"),
        ("n ut", "nut"),
    ]
