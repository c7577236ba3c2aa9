"""Leave-one-out scores are those of fits without each image, and give the temperature for new images."""

import pytest
import torch

from cps.closed_form.calibration import (
    TEMPERATURES,
    best_temperature,
    leave_one_out_scores,
    log_loss_by_temperature,
)
from cps.closed_form.classifiers import LDA
from cps.closed_form.sums import ROWS, Moments, Sums


def _draw(counts, dims, seed=0, distance=1.0):
    """Return features of normal classes, and labels; the means of the classes do not depend on the seed."""
    means = distance * torch.randn(len(counts), dims, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    draws = torch.Generator().manual_seed(seed)
    scales = torch.linspace(0.5, 2, dims, dtype=torch.float64)
    return means[labels] + scales * torch.randn(len(labels), dims, generator=draws, dtype=torch.float64), labels


def _moments(features, labels, classes):
    return Moments.of([Sums.of([(features, labels)], classes)])


def _distances(features, moments, covariance):
    """Return squared distances to the means of classes that have images, infinite for the others."""
    deviations = features[:, None] - moments.means  # (N, classes, d)
    distances = (deviations @ torch.linalg.inv(covariance) * deviations).sum(dim=2)
    return distances.masked_fill(moments.counts == 0, torch.inf)


def _refit_distances(features, labels, classes, covariance_without):
    """Return the distances (N, classes) of each image by a fit to the others."""
    rows = []
    for index in range(len(features)):
        stay = torch.arange(len(features)) != index
        without = _moments(features[stay], labels[stay], classes)
        rows.append(_distances(features[index, None], without, covariance_without(index, without))[0])
    return torch.stack(rows)


COUNTS = {"two images of each class": [2] * 5, "unequal classes, one of one image": [1, 2, 3, 9], "one class": [6]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dims", [3, 12], ids=["few features", "more features than images"])
@pytest.mark.parametrize("shrinkage", [0.01, 1.0])
def test_without_the_covariance_scores_are_exactly_those_of_fits_without_the_image(counts, dims, shrinkage):
    features, labels = _draw(counts, dims)
    moments, lda = _moments(features, labels, len(counts)), LDA(shrinkage)
    scores = leave_one_out_scores(features, labels, moments, lda, in_covariance=False)
    expected = _refit_distances(features, labels, len(counts), lambda *_: lda.shrunk(moments.covariance))
    torch.testing.assert_close(-2 * scores, expected, rtol=1e-9, atol=1e-9)
    plain = _distances(features, moments, lda.shrunk(moments.covariance))
    assert not torch.allclose(-2 * scores, plain)  # the image counts in the means


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dims", [3, 12], ids=["few features", "more features than images"])
@pytest.mark.parametrize("shrinkage", [0.01, 1.0])
def test_the_product_of_the_image_is_exactly_taken_off_the_covariance(counts, dims, shrinkage):
    features, labels = _draw(counts, dims)
    moments, lda = _moments(features, labels, len(counts)), LDA(shrinkage)

    def covariance_without(index, without):
        scatter = without.covariance * without.images
        identity = torch.eye(dims, dtype=torch.float64)
        variance = moments.covariance.diagonal().mean()  # of all images, as documented
        return (1 - shrinkage) * scatter / moments.images + shrinkage * variance * identity

    scores = leave_one_out_scores(features, labels, moments, lda)
    expected = _refit_distances(features, labels, len(counts), covariance_without)
    torch.testing.assert_close(-2 * scores, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("counts", [[2] * 5, [1, 2, 3, 9], [6], [40, 40]])
@pytest.mark.parametrize("dims", [3, 12])
@pytest.mark.parametrize("shrinkage", [0.01, 0.3, 1.0])
def test_scores_differ_from_fits_without_the_image_by_no_more_than_documented(counts, dims, shrinkage):
    features, labels = _draw(counts, dims)
    moments, lda, images = _moments(features, labels, len(counts)), LDA(shrinkage), len(labels)
    distances = -2 * leave_one_out_scores(features, labels, moments, lda)
    refit = _refit_distances(features, labels, len(counts), lambda _, without: lda.shrunk(without.covariance))
    count = moments.counts[labels]
    contributed = (features - moments.means[labels]).pow(2).sum(dim=1) * count / (count - 1).clamp(min=1)
    share = contributed / (images * moments.covariance.diagonal().sum())
    finite = refit.isfinite()
    assert torch.equal(finite, distances.isfinite())
    ratio = torch.where(finite, refit / distances, 1 - 1 / images)
    assert (ratio >= (1 - 1 / images) * (1 - 1e-9)).all()
    assert (ratio <= ((1 - 1 / images) / (1 - share))[:, None] * (1 + 1e-9)).all()
    plain = _distances(features, moments, lda.shrunk(moments.covariance))  # of images in their own sums
    own = finite.gather(1, labels[:, None])[:, 0]
    assert (plain[own, labels[own]] < distances[own, labels[own]]).all()


def test_an_image_alone_in_its_class_and_a_class_without_images_score_minus_infinity():
    features, labels = _draw([1, 3, 3], 4)
    scores = leave_one_out_scores(features, labels, _moments(features, labels, 4), LDA())
    assert scores[0, 0] == -torch.inf
    assert scores[:, 3].eq(-torch.inf).all()
    losses = log_loss_by_temperature(scores, labels)
    torch.testing.assert_close(losses, log_loss_by_temperature(scores[1:, :3], labels[1:]))
    scores[0, 0] = 0
    assert scores[:, :3].isfinite().all()


def test_many_images_are_scored_in_parts():
    features, labels = _draw([ROWS, 20], 3)
    moments = _moments(features, labels, 2)
    scores = leave_one_out_scores(features, labels, moments, LDA())
    last = leave_one_out_scores(features[-5:], labels[-5:], moments, LDA())
    assert scores.shape == (ROWS + 20, 2)
    torch.testing.assert_close(scores[-5:], last)


@pytest.mark.parametrize(
    "change",
    [lambda features: 0 * features, lambda features: features[:1].expand_as(features), lambda features: 1e8 * features],
    ids=["constant", "all images the same", "huge"],
)
@pytest.mark.parametrize("counts", [[3], [1, 1], [2, 2]])
def test_degenerate_features_give_losses_and_a_temperature(change, counts):
    features, labels = _draw(counts, 5)
    features = change(features)
    moments = _moments(features, labels, len(counts))
    losses = log_loss_by_temperature(leave_one_out_scores(features, labels, moments, LDA()), labels)
    assert losses.shape == (len(TEMPERATURES),)
    assert losses.isfinite().all()
    assert 0.5 <= best_temperature(losses) <= 256


def _temperatures(counts, dims, shrinkage, distance):
    """Return the temperatures by leave-one-out scores, by new images, and by training images in their own sums."""
    features, labels = _draw(counts, dims, distance=distance)
    lda, moments = LDA(shrinkage), _moments(features, labels, len(counts))
    scores = lda.fit(moments)
    fresh, fresh_labels = _draw([200] * len(counts), dims, seed=1, distance=distance)
    left_out = leave_one_out_scores(features, labels, moments, lda)
    return [
        best_temperature(log_loss_by_temperature(values, of))
        for values, of in ((left_out, labels), (scores(fresh), fresh_labels), (scores(features), labels))
    ]


def test_the_temperature_is_that_of_new_images_with_more_features_than_images():
    left_out, fresh, naive = _temperatures([12] * 10, 200, 0.01, 0.3)
    assert fresh > 8  # far from 1
    assert left_out == pytest.approx(fresh, rel=0.25)
    assert naive < 1


def test_the_temperature_is_about_one_with_many_images():
    left_out, fresh, _ = _temperatures([500] * 4, 3, 1e-4, 1.0)
    assert fresh == pytest.approx(1, rel=0.15)
    assert left_out == pytest.approx(fresh, rel=0.15)


def test_log_losses_are_sums_over_images_and_leave_out_those_alone_in_their_class():
    scores = torch.tensor([[2.0, 0.0], [0.0, 4.0], [-torch.inf, 1.0]])
    losses = log_loss_by_temperature(scores, torch.tensor([0, 1, 0]))
    at_two = TEMPERATURES.index(2.0)
    expected = torch.nn.functional.softplus(torch.tensor([-1.0, -2.0])).sum()
    torch.testing.assert_close(losses[at_two], expected)
    parts = [log_loss_by_temperature(scores[i : i + 1], torch.tensor([0, 1, 0])[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(sum(parts), losses)


def test_the_best_temperature_is_interpolated_and_stays_in_range():
    logs = torch.tensor(TEMPERATURES).log2()
    assert best_temperature((logs - 3.2).pow(2)) == pytest.approx(2**3.2)
    assert best_temperature(logs) == TEMPERATURES[0]
    assert best_temperature(-logs) == TEMPERATURES[-1]


def test_losses_that_say_nothing_give_temperature_one():
    features, labels = _draw([5], 3)
    one_class = leave_one_out_scores(features, labels, _moments(features, labels, 1), LDA())
    assert best_temperature(log_loss_by_temperature(one_class, labels)) == 1
    assert best_temperature(torch.zeros(len(TEMPERATURES))) == 1
