"""Closed-form classifiers equal those of scikit-learn, and degenerate features give sound scores."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.neighbors import NearestCentroid

import cps
from cps.closed_form.classifiers import LDA, LinearScores, NearestMean, Ridge
from cps.closed_form.sums import Moments, Sums
from cps.storage.settings_codec import decode, encode

CLASSIFIERS = [NearestMean(), LDA(), Ridge()]


def _draw(counts, dims=8, seed=0):
    """Return features with correlated noise, and labels."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    means = torch.randn(len(counts), dims, generator=draws)
    noise = torch.randn(len(labels), dims, generator=draws) @ torch.randn(dims, dims, generator=draws)
    return means[labels] + noise, labels


def _moments(features, labels):
    """Return the moments after tasks of two classes each."""
    tasks = []
    for first in range(0, int(labels.max()) + 1, 2):
        chosen = (labels == first) | (labels == first + 1)
        classes = min(2, int(labels.max()) + 1 - first)
        tasks.append(Sums.of([(features[chosen], labels[chosen] - first)], classes))
    return Moments.of(tasks)


def _up_to_what_is_common(scores):
    return scores - scores.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("shrinkage", [1e-4, 0.1, 1.0])
@pytest.mark.parametrize(("images", "dims"), [(30, 8), (4, 40)], ids=["many images", "fewer images than features"])
def test_lda_equals_that_of_scikit_learn(shrinkage, images, dims):
    features, labels = _draw([images] * 5, dims)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=[0.2] * 5)
    theirs.fit(features.double().numpy(), labels.numpy())
    fresh = _draw([20] * 5, dims, seed=1)[0].double()
    scores = LDA(shrinkage).fit(_moments(features, labels))(fresh).numpy()
    expected = _up_to_what_is_common(theirs.decision_function(fresh.numpy()))
    np.testing.assert_allclose(_up_to_what_is_common(scores), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert (scores.argmax(axis=1) == theirs.predict(fresh.numpy())).all()
    other = LDA(0.5).fit(_moments(features, labels))(fresh).numpy()
    assert not np.allclose(_up_to_what_is_common(other), expected, rtol=0.01)


def test_lda_weighs_classes_in_the_covariance_by_their_images():
    features, labels = _draw([40, 10, 5])
    by_class = [np.cov(features[labels == label].double().numpy().T, bias=True) for label in range(3)]
    covariance = _moments(features, labels).covariance.numpy()
    np.testing.assert_allclose(covariance, np.average(by_class, axis=0, weights=[40, 10, 5]))
    assert not np.allclose(covariance, np.mean(by_class, axis=0))


@pytest.mark.parametrize("counts", [[30] * 4, [40, 3, 10, 1]], ids=["equal counts", "unequal counts"])
@pytest.mark.parametrize("penalty", [1e-4, 1.0])
def test_ridge_equals_that_of_scikit_learn(counts, penalty):
    features, labels = _draw(counts)
    values = features.double().numpy()
    alpha = penalty * len(values) * values.var(axis=0).mean()
    theirs = SklearnRidge(alpha=alpha).fit(values, np.eye(4)[labels.numpy()])
    fresh = _draw([20] * 4, seed=1)[0].double()
    scores = Ridge(penalty).fit(_moments(features, labels))(fresh).numpy()
    np.testing.assert_allclose(scores, theirs.predict(fresh.numpy()), rtol=1e-9, atol=1e-9)
    assert not np.allclose(Ridge(0.1).fit(_moments(features, labels))(fresh).numpy(), scores, rtol=0.01)


def test_ridge_depends_neither_on_the_scale_of_features_nor_on_the_number_of_images():
    features, labels = _draw([30] * 4)
    scores = Ridge(0.1).fit(_moments(features, labels))(features.double())
    twice = _moments(torch.cat([features, features]), torch.cat([labels, labels]))
    torch.testing.assert_close(Ridge(0.1).fit(twice)(features.double()), scores)
    torch.testing.assert_close(Ridge(0.1).fit(_moments(1000 * features, labels))(1000 * features.double()), scores)


@pytest.mark.parametrize("counts", [[30] * 4, [40, 3, 10, 1]], ids=["equal counts", "unequal counts"])
def test_nearest_mean_equals_the_nearest_centroid_of_scikit_learn(counts):
    features, labels = _draw(counts)
    theirs = NearestCentroid().fit(features.double().numpy(), labels.numpy())
    fresh = _draw([50] * 4, seed=1)[0].double()
    scores = NearestMean().fit(_moments(features, labels))(fresh)
    predicted = theirs.predict(fresh.numpy())
    assert (scores.argmax(dim=1).numpy() == predicted).all()
    assert len(set(predicted)) == 4
    # They are log likelihoods: half the squared distance in units of the mean variance within classes.
    moments = _moments(features, labels)
    expected = -torch.cdist(fresh, moments.means).pow(2) / 2 / moments.covariance.diagonal().mean()
    np.testing.assert_allclose(_up_to_what_is_common(scores.numpy()), _up_to_what_is_common(expected.numpy()))


@pytest.mark.parametrize("classifier", CLASSIFIERS, ids=repr)
def test_the_order_of_tasks_changes_only_the_order_of_classes(classifier):
    features, labels = _draw([9, 8, 7, 6])
    tasks = [Sums.of([(features[labels // 2 == t], labels[labels // 2 == t] - 2 * t)], 2) for t in range(2)]
    one, other = (classifier.fit(Moments.of(order))(features.double()) for order in (tasks, tasks[::-1]))
    torch.testing.assert_close(one, other[:, [2, 3, 0, 1]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("classifier", CLASSIFIERS, ids=repr)
def test_the_centre_keeps_small_differences_of_large_features_in_float32(classifier):
    features, labels = _draw([30] * 4)
    shifted = features + 2.0**14
    fitted = classifier.fit(_moments(shifted, labels))
    exact, single = fitted(shifted.double()), LinearScores(*(part.float() for part in fitted))
    without_centre = shifted @ single.weights + (fitted.offsets - fitted.centre @ fitted.weights).float()
    error, larger_error = ((scores - exact).abs().max() for scores in (single(shifted), without_centre))
    assert 2 * error < larger_error


@pytest.mark.parametrize("classifier", CLASSIFIERS, ids=repr)
@pytest.mark.parametrize(
    "change",
    [
        lambda features: torch.full_like(features, 3.0),
        lambda features: torch.cat([features[:, :4], torch.zeros_like(features[:, 4:])], dim=1),
        lambda features: features[:, :1].expand(-1, 8),
        lambda features: features * 1e-10,
        lambda features: features * 1e10,
    ],
    ids=["all constant", "some constant", "all the same", "tiny", "huge"],
)
def test_degenerate_features_give_finite_scores(classifier, change):
    features, labels = _draw([3, 3, 3])
    scores = LinearScores(*(part.float() for part in classifier.fit(_moments(change(features), labels))))
    assert scores(change(features)).isfinite().all()


@pytest.mark.parametrize("classifier", CLASSIFIERS, ids=repr)
@pytest.mark.parametrize("counts", [[1], [5], [1, 1, 1]], ids=["one image", "one class", "one image of each class"])
def test_few_images_or_classes_give_finite_scores(classifier, counts):
    features, labels = _draw(counts)
    scores = classifier.fit(_moments(features, labels))(features.double())
    assert scores.isfinite().all()
    assert (scores.argmax(dim=1) == labels).all()


@pytest.mark.parametrize("classifier", CLASSIFIERS, ids=repr)
def test_classes_with_equal_images_get_equal_scores(classifier):
    features, _ = _draw([6])
    scores = classifier.fit(_moments(features.repeat(3, 1), torch.arange(3).repeat_interleave(6)))(features.double())
    torch.testing.assert_close(scores, scores[:, :1].expand(-1, 3))


@pytest.mark.parametrize("classifier", CLASSIFIERS, ids=repr)
def test_a_class_without_images_is_never_predicted(classifier):
    features, labels = _draw([8, 8, 8])
    features += 5
    full = classifier.fit(_moments(features, labels))(features.double())
    with_empty = Moments.of([Sums.of([(features, labels)], 4)])
    scores = classifier.fit(with_empty)(0 * features.double())  # the sums of the class without images are zeros
    assert (scores.argmax(dim=1) < 3).all()
    torch.testing.assert_close(classifier.fit(with_empty)(features.double())[:, :3], full)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("LDA", {"shrinkage": 0}, "shrinkage of LDA must be in"),
        ("LDA", {"shrinkage": 1e-300}, "shrinkage of LDA must be in"),
        ("LDA", {"shrinkage": 1.01}, "shrinkage of LDA must be in"),
        ("LDA", {"shrinkage": "x"}, "shrinkage of LDA must be a finite number"),
        ("Ridge", {"penalty": 0}, "penalty of Ridge must be 1e-9 or more"),
        ("Ridge", {"penalty": -1}, "penalty of Ridge must be 1e-9 or more"),
        ("Ridge", {"penalty": None}, "penalty of Ridge must be a finite number"),
    ],
)
def test_settings_out_of_range_raise(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        getattr(cps, kind)(**fields)
    with pytest.raises(ValueError, match=f"damaged setting {kind}"):
        decode({"type": kind, **fields})


@pytest.mark.parametrize("classifier", [NearestMean(), LDA(0.3), Ridge(0.2)], ids=repr)
def test_files_can_hold_classifiers(classifier):
    assert decode(encode(classifier)) == classifier


def test_the_smallest_shrinkage_suffices_for_a_covariance_that_a_file_holds_in_float32():
    features, labels = _draw([2] * 4, dims=300)
    features = features + 100 * features[:, :1]  # one direction has nearly all of the variance
    moments = _moments(features, labels)
    rounded = Moments(moments.counts, moments.means, moments.covariance.float().double(), moments.images)
    assert torch.linalg.eigvalsh(rounded.covariance).min() < 0  # so that it has no Cholesky factor by itself
    assert LDA(1e-4).fit(rounded)(features.double()).isfinite().all()
