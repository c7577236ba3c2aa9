"""The relative distance is the difference of two Mahalanobis distances, and small for unknown classes."""

import pytest
import torch

from cps.closed_form.classifiers import LDA, nearest_mean_scores
from cps.closed_form.relative_distance import RelativeDistance, leave_one_out_distances
from cps.closed_form.sums import Moments, Sums

MEANS = 3 * torch.randn(6, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def draw(counts, seed=0):
    """Return normal features around the first of the means, and labels."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    noise = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return MEANS[labels] + noise, labels


def moments_of(features, labels, classes):
    return Moments.of([Sums.of([(features, labels)], classes)])


def direct(features, means, within):
    """Return d0 - min d_c with inverse matrices of the size of the features."""
    centre = means.mean(dim=0)
    between = (means - centre).T @ (means - centre) / len(means)

    def distances(points, covariance):
        deviations = features[:, None] - points
        return (deviations @ torch.linalg.inv(covariance) * deviations).sum(dim=2)

    return distances(centre[None], within + between)[:, 0] - distances(means, within).amin(dim=1)


@pytest.mark.parametrize("shrinkage", [0.01, 0.5])
def test_the_distance_is_that_to_the_centre_minus_that_to_the_nearest_mean(shrinkage):
    features, labels = draw([20, 10, 5])
    moments, lda = moments_of(features, labels, 3), LDA(shrinkage)
    distance = RelativeDistance.of(lda.fit(moments), moments.counts, moments.means)
    new, _ = draw([4, 4, 4, 4], seed=1)
    torch.testing.assert_close(distance(new), direct(new, moments.means, lda.shrunk(moments.covariance)))


def test_nearest_means_have_a_relative_distance_too():
    features, labels = draw([20, 10, 5])
    moments = moments_of(features, labels, 3)
    scores = nearest_mean_scores(moments.counts, moments.means, 2.0)
    distance = RelativeDistance.of(scores, moments.counts, moments.means)
    torch.testing.assert_close(distance(features), direct(features, moments.means, 2 * torch.eye(5).double()))


def test_a_class_without_images_changes_nothing():
    features, labels = draw([20, 10, 5])
    with_empty, without = (moments_of(features, labels, classes) for classes in (4, 3))
    one, two = (RelativeDistance.of(LDA().fit(each), each.counts, each.means) for each in (with_empty, without))
    torch.testing.assert_close(one(features), two(features))


def test_images_of_an_unknown_class_have_smaller_distances():
    features, labels = draw([50] * 5)
    moments = moments_of(features, labels, 5)
    distance = RelativeDistance.of(LDA().fit(moments), moments.counts, moments.means)
    new, classes = draw([50] * 6, seed=1)
    known, unknown = distance(new[classes < 5]), distance(new[classes == 5])
    assert known.median() > 5 + unknown.median()


def test_with_a_single_class_all_distances_are_zero():
    features, labels = draw([20])
    moments = moments_of(features, labels, 1)
    distance = RelativeDistance.of(LDA().fit(moments), moments.counts, moments.means)
    torch.testing.assert_close(distance(features), torch.zeros(20, dtype=torch.float64))


def test_distances_without_the_image_itself_are_like_those_of_new_images():
    draws = torch.Generator().manual_seed(0)
    means = torch.randn(5, 30, generator=draws, dtype=torch.float64)
    labels, new_labels = torch.arange(5).repeat(60), torch.arange(5).repeat(400)
    features, new = (
        means[each] + torch.randn(len(each), 30, generator=draws, dtype=torch.float64) for each in (labels, new_labels)
    )
    moments, lda = moments_of(features, labels, 5), LDA(0.1)
    distance = RelativeDistance.of(lda.fit(moments), moments.counts, moments.means)
    left_out = leave_one_out_distances(features, labels, moments, lda)
    expected = distance(new).mean()
    assert (left_out.mean() - expected).abs() < (distance(features).mean() - expected).abs() / 2  # negative control
    share = (distance(new) < left_out.quantile(0.1)).double().mean()
    assert 0.05 < share < 0.15


def without(image, features, labels, classes, *, in_covariance):
    """Return class means and the covariance after leaving out an image, whose number still divides the covariance."""
    rest = torch.arange(len(labels)) != image
    means = moments_of(features[rest], labels[rest], classes).means
    every = moments_of(features, labels, classes)
    if not in_covariance:
        return means, every.covariance
    deviations = features[rest] - means[labels[rest]]
    return means, deviations.T @ deviations / len(labels)


@pytest.mark.parametrize("in_covariance", [True, False])
@pytest.mark.parametrize("counts", [[9, 6, 5], [2, 3], [40, 30, 20, 2]])
@pytest.mark.parametrize("dims", [5, 60])  # fewer features than images, and more
def test_distances_without_the_image_itself_are_those_of_a_new_fit(counts, dims, in_covariance):
    features, labels = draw(counts)
    more = torch.randn(len(features), dims - 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    features = torch.cat([features, more], dim=1)
    moments, lda = moments_of(features, labels, len(counts)), LDA(0.2)
    found = leave_one_out_distances(features, labels, moments, lda, in_covariance=in_covariance)
    ridge = lda.shrunk(moments.covariance) - 0.8 * moments.covariance  # keeps its factor
    with_itself = RelativeDistance.of(lda.fit(moments), moments.counts, moments.means)(features)
    assert (with_itself - found).mean() > 0.01  # the negative control
    for image in range(len(labels)):
        means, covariance = without(image, features, labels, len(counts), in_covariance=in_covariance)
        expected = direct(features[image : image + 1], means, 0.8 * covariance + ridge)[0]
        torch.testing.assert_close(found[image], expected, rtol=1e-8, atol=1e-8)


def test_an_empty_class_does_not_change_distances_without_the_image_itself():
    features, labels = draw([6, 5, 4])
    skipped = labels + (labels > 0).long()  # class 1 has no image
    with_empty = leave_one_out_distances(features, skipped, moments_of(features, skipped, 4), LDA())
    expected = leave_one_out_distances(features, labels, moments_of(features, labels, 3), LDA())
    torch.testing.assert_close(with_empty, expected)


def test_the_only_image_of_a_class_has_no_finite_distance():
    features, labels = draw([1, 8, 8])
    distances = leave_one_out_distances(features, labels, moments_of(features, labels, 3), LDA())
    assert distances.isfinite().tolist() == [False] + [True] * 16
