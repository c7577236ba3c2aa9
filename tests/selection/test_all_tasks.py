"""All subnetworks and a selector in one module predict like the learner."""

import pytest
import torch

import cps
from samples import make_task

SELECTORS = (cps.Fusion(), cps.MaxOutput(), cps.ImportanceSignature(), cps.Cascade(size=8), cps.SharedSpace())


def three_tasks(first):
    """Return a learner of tasks with 2, 3 and 2 classes from 0, 10 and `first`."""
    training = cps.Training(2, cps.Adam(1e-2), batch_size=16)
    torch.manual_seed(0)
    learner = cps.Learner(
        cps.Architecture("small"), pruner=cps.NNrelief(0.8), rounds=1, train=training, retrain=training,
        normalize=cps.Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), fabric=cps.make_fabric(accelerator="cpu"),
        selectors=SELECTORS,
    )  # fmt: skip
    for name, classes in ((0, 2), (10, 3), (first, 2)):
        learner.learn(make_task(name, classes=classes, shape=(3, 8, 8)), new_versions=True)
    return learner


@pytest.fixture(scope="module")
def learner():
    """Return a learner of three tasks; tests must not change it."""
    return three_tasks(20)


IMAGES = torch.cat([make_task(10 * i, classes=c, shape=(3, 8, 8)).test[0] for i, c in enumerate((2, 3, 2))]).clamp(0, 1)


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_score_images_gives_the_scores_of_groups_of_one(learner, selector):
    evidence, statistics = learner.evidence(IMAGES), learner.network.statistics(selector.name)
    alone = selector.score_images(evidence, selector.precompute(statistics))
    torch.testing.assert_close(alone, selector(evidence, statistics, torch.arange(len(IMAGES))))
    together = selector(evidence, statistics, torch.zeros(len(IMAGES), dtype=torch.long))
    assert not torch.allclose(alone[:1], together)  # the negative control


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_the_module_predicts_what_the_learner_predicts(learner, selector):
    module = cps.AllTasksModule(learner.network, selector)
    output, expected = module(IMAGES), learner.predict(IMAGES, selector=selector)
    assert [module.classes[index] for index in output.class_index.tolist()] == expected.classes
    assert torch.equal(output.task, expected.tasks)
    torch.testing.assert_close(output.confidence, expected.confidence)
    torch.testing.assert_close(output.class_scores, expected.scores, rtol=1e-3, atol=1e-4)
    assert torch.equal(output.class_scores.argmax(dim=1), output.class_index)
    assert output.scores.shape == (len(IMAGES), 3)
    assert not module.training


@pytest.mark.parametrize("selector", [None, cps.MaxOutput()])
def test_the_module_of_a_learner_gives_the_scores_of_its_predictions(learner, selector):
    module, expected = learner.module(selector=selector), learner.predict(IMAGES, selector=selector)
    assert module.classes == expected.all_classes
    torch.testing.assert_close(module(IMAGES), expected.scores, rtol=1e-3, atol=1e-4)
    as_bytes = (IMAGES * 255).round().byte()
    torch.testing.assert_close(
        module(as_bytes), learner.predict(as_bytes, selector=selector).scores, rtol=1e-3, atol=1e-4
    )


def test_of_several_versions_of_a_class_the_module_gives_the_most_probable_one():
    learner = three_tasks(0)
    module, expected = learner.module(), learner.predict(IMAGES)
    assert module.classes == expected.all_classes == (0, 1, 10, 11, 12)
    torch.testing.assert_close(module(IMAGES), expected.scores, rtol=1e-3, atol=1e-4)


def test_a_module_does_not_change_when_the_learner_does_and_its_state_can_be_loaded(learner, tmp_path):
    learner.save(tmp_path / "model.cps")
    other = cps.load(tmp_path / "model.cps", fabric=learner.fabric)
    module = other.module()
    before = module(IMAGES)
    other.forget(0)
    assert torch.equal(module(IMAGES), before)
    fresh = cps.load(tmp_path / "model.cps", fabric=learner.fabric).module()
    with torch.no_grad():
        for value in fresh.state_dict().values():
            value.zero_()
    assert not torch.allclose(fresh(IMAGES), before)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(IMAGES), before)
    assert not any(parameter.requires_grad for parameter in fresh.parameters())


def test_a_module_moves_to_another_device_with_all_its_tensors(learner):
    module = learner.module().to("meta")
    assert module(IMAGES.to("meta")).shape == (len(IMAGES), 7)


@pytest.mark.slow
def test_a_module_exports_with_torch_export_for_any_batch_size(learner):
    module, batch = learner.module(), torch.export.Dim("batch")
    program = torch.export.export(module, (IMAGES,), dynamic_shapes=({0: batch},))
    for number in (1, 5):
        torch.testing.assert_close(program.module()(IMAGES[:number]), module(IMAGES[:number]))


def test_a_network_without_tasks_has_no_module(make_learner):
    with pytest.raises(RuntimeError, match="nothing has been learned"):
        make_learner().module()


def test_a_module_predicts_unlike_the_learner_if_a_task_is_missing(learner):
    """The negative control of the comparisons above."""
    module, expected = learner.module(selector=cps.MaxOutput()), learner.predict(IMAGES, selector=cps.MaxOutput())
    with torch.no_grad():
        for parameter in module.all_tasks.subnetworks[1].head.parameters():
            parameter.zero_()
    assert not torch.allclose(module(IMAGES), expected.scores, rtol=1e-3, atol=1e-4)
