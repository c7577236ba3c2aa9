"""The learner as a scikit-learn classifier."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import cps
from cps.sklearn import ContinualClassifier
from samples import conv_net, make_task

TRAINING = cps.Training(10, cps.Adam(1e-2), cps.Cosine(), batch_size=16)
QUICK = {"train": TRAINING, "retrain": TRAINING, "rounds": 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks_pass():
    """None is expected to fail; those that need pandas or array API are skipped where these are not installed."""
    training = cps.Training(5, cps.Adam(1e-2), cps.Cosine(), batch_size=32)
    settings = {"selectors": (cps.Fusion(cps.SharedSpace(classifier=cps.LDA(0.1)), cascade_tasks=0),)}
    check_estimator(ContinualClassifier(train=training, retrain=training, rounds=0, settings=settings))


def samples(first, names, shape=(2, 6, 6)):
    """Return training and test images of two classes, and their names."""
    task = make_task(first, shape=shape, images=40, test=20)
    name = dict(zip(task.classes, names, strict=True))
    return [
        (np.asarray(images), np.array([name[label] for label in labels])) for images, labels in (task.train, task.test)
    ]


def test_classes_learned_one_after_the_other_are_all_known():
    (X, y), (X_test, y_test) = samples(0, ("cat", "dog"))
    (X2, y2), (X2_test, y2_test) = samples(10, ("ant", "eel"))
    classifier = ContinualClassifier(**QUICK).partial_fit(X, y, classes=["cat", "dog"])
    before = classifier.learner_.fingerprint(0)
    assert classifier.partial_fit(X2, y2, classes=["eel", "ant"]) is classifier
    assert classifier.learner_.fingerprint(0) == before
    assert classifier.classes_.tolist() == ["ant", "cat", "dog", "eel"]
    X_all, y_all = np.concatenate([X_test, X2_test]), np.concatenate([y_test, y2_test])
    assert classifier.score(X_all, y_all) > 0.8
    probabilities = classifier.predict_proba(X_all)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert (classifier.classes_[probabilities.argmax(axis=1)] == classifier.predict(X_all)).all()


def test_samples_of_known_classes_are_added_and_change_no_subnetwork():
    (X, y), _ = samples(0, (3, 7))
    (X2, y2), _ = samples(10, (4, 5))
    classifier = ContinualClassifier(**QUICK).partial_fit(X[:20], y[:20])
    before = classifier.learner_.fingerprint(0)
    classifier.partial_fit(np.concatenate([X[20:], X2]), np.concatenate([y[20:], y2]))
    assert classifier.learner_.classes == [(3, 7), (4, 5)]
    assert classifier.learner_.fingerprint(0) == before
    counts = classifier.learner_.network.subnetworks[0].statistics["Fusion"]["shared counts"]
    assert counts.tolist() == [20, 20]


def test_fit_starts_again():
    (X, y), _ = samples(0, (0, 1))
    (X2, y2), _ = samples(10, (2, 3))
    classifier = ContinualClassifier(**QUICK).fit(X, y).fit(X2, y2)
    assert classifier.classes_.tolist() == [2, 3]
    assert classifier.learner_.classes == [(2, 3)]


def test_labels_that_are_not_among_the_classes_raise():
    (X, y), _ = samples(0, ("cat", "dog"))
    with pytest.raises(ValueError, match="classes must contain all labels of y, but .*'dog'.* is missing"):
        ContinualClassifier(**QUICK).partial_fit(X, y, classes=["cat"])


def test_it_works_in_a_pipeline_with_cross_validation_and_can_be_cloned_and_pickled():
    rows, labels = np.random.default_rng(0).normal(size=(90, 6)), np.arange(90) % 3
    rows[:, 0] += 4 * labels
    pipeline = make_pipeline(StandardScaler(), ContinualClassifier(**QUICK))
    assert cross_val_score(pipeline, rows, labels, cv=2).min() > 0.8
    fitted = clone(pipeline).fit(rows, labels)
    again = pickle.loads(pickle.dumps(fitted))
    assert (again.predict(rows) == fitted.predict(rows)).all()


def test_a_backbone_and_other_settings_are_those_of_the_learner():
    torch.manual_seed(0)
    (X, y), _ = samples(0, (0, 1))
    settings = {"selectors": (cps.MaxOutput(),), "pruner": cps.NNrelief(0.7)}
    classifier = ContinualClassifier(conv_net(), **QUICK, settings=settings).fit(X, y)
    config = classifier.learner_.config
    assert (config.selectors, config.pruner, config.rounds, config.train) == (
        (cps.MaxOutput(),),
        cps.NNrelief(0.7),
        1,
        TRAINING,
    )
    assert ContinualClassifier().fit.__self__.get_params()["train"] is None


@pytest.mark.parametrize("shape", [(20, 2, 6), (20, 2, 6, 6, 2)])
def test_a_shape_without_a_default_network_raises(shape):
    with pytest.raises(ValueError, match=r"X must have shape \(N, d\) or \(N, channels, height, width\)"):
        ContinualClassifier(**QUICK).fit(np.zeros(shape), [0, 1] * 10)


def test_importing_cps_does_not_import_scikit_learn_nor_hide_it():
    program = "import sys, cps; assert 'sklearn' not in sys.modules; cps.sklearn.ContinualClassifier\n"
    program += "import sklearn; assert sklearn.__version__ and 'cps' not in sklearn.__file__"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
