"""Sums over features do not depend on order or batches, lose no digits, and reject what cannot be summed."""

import numpy as np
import pytest
import torch

from cps.closed_form.sums import ROWS, Moments, Sums, pack, unpack


def _draw(images=60, dims=5, classes=3, seed=0):
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    return torch.randn(images, dims, generator=draws) + labels[:, None], labels


def _assert_same(first, second, rtol=1e-12):
    for name in ("counts", "means", "scatter"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=rtol, atol=rtol)


def test_sums_are_counts_means_and_scatter_within_classes():
    features, labels = _draw()
    sums = Sums.of([(features, labels)], 3)
    assert sums.counts.tolist() == [20, 20, 20]
    assert sums.dims == 5
    by_class = [features[labels == label].double().numpy() for label in range(3)]
    np.testing.assert_allclose(sums.means, [part.mean(axis=0) for part in by_class])
    np.testing.assert_allclose(sums.scatter, sum(len(part) * np.cov(part.T, bias=True) for part in by_class))


def test_order_and_batches_do_not_matter():
    features, labels = _draw()
    whole = Sums.of([(features, labels)], 3)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    for sizes in ([60], [1] * 60, [7, 0, 33, 20]):
        batches = zip(features[order].split(sizes), labels[order].split(sizes), strict=True)
        _assert_same(Sums.of(batches, 3), whole)


def test_a_batch_of_many_images_is_summed_in_parts():
    features, labels = _draw(ROWS + 10, dims=2)
    by_hand = features[labels == 1].double()
    sums = Sums.of([(features, labels)], 3)
    torch.testing.assert_close(sums.means[1], by_hand.mean(dim=0))
    assert sums.counts.sum() == ROWS + 10


def test_added_sums_are_the_sums_of_all_images():
    features, labels = _draw()
    whole = Sums.of([(features, labels)], 3)
    first, second = (Sums.of([(features[part], labels[part])], 3) for part in (slice(0, 13), slice(13, 60)))
    _assert_same(first + second, whole)
    _assert_same(second + first, whole)
    assert not torch.allclose(first.scatter + second.scatter, whole.scatter)  # the means of both differ


def test_a_class_that_only_one_part_has_is_added():
    features, labels = _draw()
    parts = [Sums.of([(features[labels == label], labels[labels == label])], 3) for label in range(3)]
    assert parts[0].counts.tolist() == [20, 0, 0]
    assert parts[0].means[1].tolist() == [0] * 5
    _assert_same(parts[0] + parts[2] + parts[1], Sums.of([(features, labels)], 3))


@pytest.mark.parametrize("parts", [1, 3, 60])
def test_large_offsets_lose_no_digits(parts):
    features, labels = _draw()
    shifted = (features + 2.0**16).float()  # exact differences of what float32 holds of them
    batches = zip(shifted.chunk(parts), labels.chunk(parts), strict=True)
    expected = Sums.of([(shifted.double() - 2.0**16, labels)], 3)
    torch.testing.assert_close(Sums.of(batches, 3).scatter, expected.scatter, rtol=1e-9, atol=1e-9)
    # The textbook formula, sum of squares minus squared sum, loses these digits even in float64.
    values = shifted.double()
    means = torch.stack([values[labels == label].mean(dim=0) for label in range(3)])
    naive = values.T @ values - 20 * means.T @ means
    assert not torch.allclose(naive, expected.scatter, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_everything_is_summed_in_float64(dtype):
    features, labels = _draw()
    sums = Sums.of([(features.to(dtype), labels.to(torch.uint8))], 3)
    assert {sums.counts.dtype, sums.means.dtype, sums.scatter.dtype} == {torch.float64}
    _assert_same(sums, Sums.of([(features.to(dtype).double(), labels)], 3))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e200])
def test_features_that_are_not_finite_raise(wrong):
    features, labels = _draw()
    features = features.double()
    features[7, 2] = wrong
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        Sums.of([(features, labels)], 3)


@pytest.mark.parametrize("batches", [[], [(torch.empty(0, 5), torch.empty(0, dtype=torch.long))]])
def test_no_images_raise(batches):
    with pytest.raises(ValueError, match="there are no images"):
        Sums.of(batches, 3)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (torch.zeros(2, 5), torch.tensor([0, 3]), "labels must be from 0 to 2, got 0 to 3"),
        (torch.zeros(2, 5), torch.tensor([-1, 0]), "labels must be from 0 to 2, got -1 to 0"),
        (torch.zeros(2, 5), torch.tensor([0.0, 0.5]), "labels must be integers, got torch.float32"),
        (torch.zeros(2, 5), torch.tensor([0]), r"labels \(N,\), got \(2, 5\) and \(1,\)"),
        (torch.zeros(2, 5, 1), torch.tensor([0, 1]), r"shape \(N, d\) and labels \(N,\), got \(2, 5, 1\)"),
    ],
)
def test_wrong_batches_raise(features, labels, message):
    with pytest.raises(ValueError, match=message):
        Sums.of([(features, labels)], 3)


def test_sums_over_other_classes_or_features_cannot_be_added():
    features, labels = _draw()
    sums = Sums.of([(features, labels)], 3)
    for other in (Sums.of([(features, labels)], 4), Sums.of([(features[:, :1], labels)], 3)):
        with pytest.raises(ValueError, match="same classes and features"):
            _ = sums + other


def test_moments_join_the_classes_of_all_tasks_and_pool_their_scatter():
    (features, labels), (more, _) = _draw(), _draw(30, seed=1)
    tasks = [Sums.of([(features, labels)], 3), Sums.of([(more, torch.arange(30) % 2)], 2)]
    moments = Moments.of(tasks)
    assert moments.counts.tolist() == [20, 20, 20, 15, 15]
    assert moments.images == 90
    together = Sums.of([(features, labels), (more, 3 + torch.arange(30) % 2)], 5)
    torch.testing.assert_close(moments.means, together.means)
    torch.testing.assert_close(moments.covariance, together.scatter / 90)
    assert torch.equal(tasks[0].scatter, Sums.of([(features, labels)], 3).scatter)  # not changed in place


def test_moments_need_tasks_with_the_same_features():
    features, labels = _draw()
    with pytest.raises(ValueError, match=r"one or more tasks .*, got \[\] features"):
        Moments.of([])
    with pytest.raises(ValueError, match=r"the same features, got \[5, 4\] features"):
        Moments.of([Sums.of([(features, labels)], 3), Sums.of([(features[:, :4], labels)], 3)])


def test_a_symmetric_matrix_is_packed_in_half_and_unpacked():
    matrix = torch.tensor([[1.0, 2, 3], [2, 4, 5], [3, 5, 6]])
    assert pack(matrix).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(unpack(pack(matrix), 3), matrix)
    with pytest.raises(ValueError, match="packed 4 x 4 covariance must have 10 entries, got 6"):
        unpack(pack(matrix), 4)
