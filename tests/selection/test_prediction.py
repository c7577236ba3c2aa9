"""A prediction is a sequence of classes, with scores of all classes on demand."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

import cps
from samples import make_task

SELECTORS = (cps.Fusion(), cps.SharedSpace(), cps.Cascade(size=8), cps.MaxOutput(), cps.ImportanceSignature())
LAZY = cps.Fusion(cascade_tasks=0, certainty=0.01, most_subnetworks=1)


@pytest.fixture(scope="module")
def learner():
    """Return a learner of three tasks with classes 0, 1; 10, 11; 20, 21. Tests must not change it."""
    training = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    torch.manual_seed(0)
    learner = cps.Learner(
        cps.SmallConvNet(2, (8, 12)), rounds=1, train=training, retrain=training, selectors=SELECTORS,
        fabric=cps.make_fabric(accelerator="cpu"),
    )  # fmt: skip
    for first in (0, 10, 20):
        learner.learn(make_task(first, images=60))
    return learner


IMAGES = torch.cat([make_task(first).test[0] for first in (0, 10, 20)])
LABELS = [label for first in (0, 10, 20) for label in make_task(first).test[1]]


def test_a_prediction_is_a_sequence_of_classes(learner):
    prediction = learner.predict(IMAGES)
    assert len(prediction) == len(LABELS)
    assert list(prediction) == prediction.classes
    assert prediction[3] == prediction.classes[3]
    assert prediction[-2:] == prediction.classes[-2:]
    assert prediction.count(10) == prediction.classes.count(10)


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor])
def test_comparing_with_labels_compares_each_class(learner, convert):
    prediction = learner.predict(IMAGES)
    expected = [own == label for own, label in zip(prediction.classes, LABELS, strict=True)]
    assert 0 < sum(expected)
    for found in (prediction == convert(LABELS), convert(LABELS) == prediction):
        assert np.asarray(found).tolist() == expected
    assert (prediction != convert(LABELS)).tolist() == [not each for each in expected]
    assert (prediction == convert(LABELS)).mean() == np.mean(expected)


def test_comparing_with_one_label_or_another_prediction_compares_each_class(learner):
    prediction, known = learner.predict(IMAGES), learner.predict(IMAGES, task=0)
    assert (prediction == 10).tolist() == [own == 10 for own in prediction.classes]
    assert (prediction == known).tolist() == [a == b for a, b in zip(prediction, known, strict=True)]
    with pytest.raises(ValueError, match="expected one label per image, got 2 labels for 36 images"):
        _ = prediction == [0, 1]


def test_an_array_of_a_prediction_has_the_type_of_the_classes(learner):
    prediction = learner.predict(IMAGES)
    assert np.asarray(prediction).tolist() == prediction.classes
    assert np.asarray(prediction).dtype.kind == "i"
    unknown = learner.predict(100 * IMAGES, reject=0.5)
    assert None in unknown.classes
    assert np.asarray(unknown).dtype == object
    assert (unknown == None).tolist() == [own is None for own in unknown.classes]  # noqa: E711


def test_names_and_numbers_are_not_mixed_up_in_an_array(learner):
    mixed = copy.copy(learner.predict(IMAGES[:2]))
    object.__setattr__(mixed, "classes", ["cat", 3])
    assert np.asarray(mixed).tolist() == ["cat", 3]


@pytest.mark.parametrize("selector", [*SELECTORS, LAZY], ids=repr)
@pytest.mark.parametrize("group_size", [1, 4])
def test_the_best_of_all_scores_is_the_predicted_class(learner, selector, group_size):
    prediction = learner.predict(IMAGES, selector=selector, group_size=group_size)
    assert prediction.all_classes == (0, 1, 10, 11, 20, 21)
    assert prediction.scores.shape == (len(IMAGES), 6)
    assert [prediction.all_classes[index] for index in prediction.scores.argmax(dim=1)] == prediction.classes
    torch.testing.assert_close(prediction.scores.exp().sum(dim=1), torch.ones(len(IMAGES)))


def test_scores_by_the_largest_logit_are_the_softmax_over_the_logits_of_all_tasks(learner):
    logits = torch.cat([outputs.logits for outputs in learner.evidence(IMAGES)], dim=1)
    scores = learner.predict(IMAGES, selector=cps.MaxOutput()).scores
    torch.testing.assert_close(scores, logits.log_softmax(dim=1))


def test_the_best_classes_come_with_their_probabilities_in_order(learner):
    prediction = learner.predict(IMAGES)
    for own, row, scores in zip(prediction, prediction.top(2), prediction.scores, strict=True):
        assert row[0][0] == own
        assert [value for _, value in row] == pytest.approx(scores.exp().sort(descending=True).values[:2].tolist())
    assert [len(row) for row in prediction.top(100)] == [6] * len(IMAGES)


def test_with_the_task_given_only_its_classes_have_scores(learner):
    prediction = learner.predict(IMAGES, task=1)
    assert prediction.scores.isfinite().tolist() == [[False, False, True, True, False, False]] * len(IMAGES)
    logits = learner.evidence(IMAGES)[1].logits
    torch.testing.assert_close(prediction.scores[:, 2:4], logits.log_softmax(dim=1))


def test_scores_run_no_subnetwork_and_do_not_keep_the_images(learner):
    images = IMAGES.clone()
    evidence = learner.evidence(images)
    prediction = cps.selection.predict.predict(learner.network, evidence, LAZY, torch.arange(len(images)))
    ran = [len(evidence.ran(task)) for task in range(3)]
    assert sum(ran) == len(images)  # one subnetwork each
    alive = weakref.ref(images)
    before = prediction._score_all.args[1]
    assert prediction.scores.isfinite().all()  # the shared space knows the classes of the other tasks
    assert [len(before.ran(task)) for task in range(3)] == ran
    with pytest.raises(ValueError, match="have not run"):
        before.compute()
    del images, evidence
    gc.collect()
    assert alive() is None
    assert prediction._score_all is None


def test_scores_are_those_of_the_time_of_the_prediction(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    kept, read = learner.predict(IMAGES), learner.predict(IMAGES).scores
    learner.learn(make_task(10))
    learner.forget(0)
    assert kept.all_classes == (0, 1)
    assert torch.equal(kept.scores, read)


def test_of_several_versions_of_a_class_the_most_probable_one_counts(make_learner):
    learner = make_learner(selectors=[cps.MaxOutput()])
    learner.learn(make_task(0))
    learner.learn(make_task(0, seed=1), new_versions=True)
    prediction = learner.predict(IMAGES)
    assert prediction.all_classes == (0, 1)
    logits = torch.stack([outputs.logits for outputs in learner.evidence(IMAGES)])
    torch.testing.assert_close(prediction.scores, logits.amax(dim=0).log_softmax(dim=1))


def test_a_stream_scores_all_classes_by_its_posterior(learner):
    prediction = learner.stream(selector=cps.MaxOutput()).predict(IMAGES)
    assert [prediction.all_classes[index] for index in prediction.scores.argmax(dim=1)] == prediction.classes


def test_predictions_can_be_pickled_and_copied_with_their_scores(learner):
    prediction = learner.predict(IMAGES)
    for other in (pickle.loads(pickle.dumps(prediction)), copy.deepcopy(prediction)):
        assert other.classes == prediction.classes
        assert torch.equal(other.scores, prediction.scores)
