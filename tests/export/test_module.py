"""All subnetworks and a selector in one module predict like the learner."""

import pytest
import torch

import cps
from cps.export.module import AllTasksModule
from cps.export.tasks import export_all


@pytest.mark.parametrize(
    "selector", [cps.MaxOutput(), cps.ImportanceSignature(), cps.ImportanceSignature(norm=1), cps.Cascade()]
)
def test_score_images_gives_the_scores_of_groups_of_one(learner, images, selector):
    evidence = learner.evidence(images)
    statistics = []
    for task, subnetwork in enumerate(learner.network.subnetworks):
        labels = torch.arange(len(images)) % len(subnetwork.classes)
        statistics.append(selector.observe(subnetwork, evidence.first(task + 1), labels, statistics))
    alone = selector.score_images(list(evidence), selector.precompute(statistics))
    torch.testing.assert_close(alone, selector(evidence, statistics, torch.arange(len(images))))
    together = selector(evidence, statistics, torch.zeros(len(images), dtype=torch.long))
    assert not torch.allclose(alone[:1], together)  # the negative control


def test_the_module_selects_by_the_statistics_in_the_model(learner, images):
    signature = learner.config.selectors[1]
    output = AllTasksModule(learner.network, signature)(images)
    assert torch.equal(output.task, learner.predict(images, selector=signature).tasks)


def test_the_module_predicts_what_the_learner_predicts(learner, images):
    module = AllTasksModule(learner.network, learner.config.selectors[0])
    output, expected = module(images), learner.predict(images)
    assert [module.classes[index] for index in output.class_index.tolist()] == expected.classes
    assert torch.equal(output.task, expected.tasks)
    torch.testing.assert_close(output.confidence, expected.confidence)
    assert output.scores.shape == (len(images), 3)
    assert not module.training


def test_a_network_without_tasks_has_no_module(make_learner):
    with pytest.raises(RuntimeError, match="nothing has been learned"):
        AllTasksModule(make_learner().network, cps.MaxOutput())


class NoGraphSelector:
    """A selector without the methods of a GraphSelector."""

    name = "NoGraph"


def test_a_selector_that_a_graph_cannot_hold_is_rejected_by_name(learner, tmp_path):
    with pytest.raises(ValueError, match="selector NoGraph cannot be part of a graph"):
        export_all(learner, tmp_path / "x.onnx", selector=NoGraphSelector())


def test_a_selector_without_statistics_of_a_task_is_rejected(learner, tmp_path):
    with pytest.raises(ValueError, match="ImportanceSignature-L1 has no 'mean' statistics of some task"):
        export_all(learner, tmp_path / "x.onnx", selector=cps.ImportanceSignature(norm=1))
