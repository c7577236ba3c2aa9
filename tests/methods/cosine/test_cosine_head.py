"""The cosine head: similarities, growing, and the vectors that new classes start with."""

import torch
import torch.nn.functional as F

from cps.methods.cosine.cosine_head import class_vectors, grow_cosine_head, k_means, make_cosine_head


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


FEATURES = torch.randn(7, 5, generator=draws(9))


def test_with_one_vector_of_a_class_the_output_is_the_scaled_cosine():
    head = make_cosine_head(5, 3, draws(), scale=4.0)
    expected = torch.stack([4 * F.cosine_similarity(FEATURES, vector[None], dim=1) for vector in head.weight], dim=1)
    torch.testing.assert_close(head(FEATURES), expected)
    torch.testing.assert_close(head(10 * FEATURES), expected)


def test_several_vectors_of_a_class_count_by_the_softmax_of_their_cosines():
    """Cosines 1 and 0 have the weights 0.7311 and 0.2689; those of the other class are -1 and 0."""
    head = make_cosine_head(2, 2, draws(), proxies=2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -3.0]]))
    expected = torch.tensor([[0.7311, -0.2689]])
    torch.testing.assert_close(head.similarities(torch.tensor([[5.0, 0.0]])), expected, atol=1e-4, rtol=0)


def test_equal_vectors_of_a_class_are_one_vector():
    one, many = make_cosine_head(5, 3, draws()), make_cosine_head(5, 3, draws(), proxies=4)
    with torch.no_grad():
        many.weight.copy_(one.weight.repeat_interleave(4, dim=0))
    torch.testing.assert_close(many(FEATURES), one(FEATURES))


def test_a_grown_head_keeps_old_vectors_and_scale():
    head = make_cosine_head(5, 2, draws(), proxies=3, sharpness=2.0, scale=7.0, learns_scale=False)
    grown = grow_cosine_head(head, 1, draws(1))
    assert grown.weight.shape == (9, 5)
    assert torch.equal(grown.weight[:6], head.weight)
    torch.testing.assert_close(grown(FEATURES)[:, :2], head(FEATURES))
    assert not grown.scale.requires_grad
    assert head.state_dict().keys() == grown.state_dict().keys()


def test_one_vector_of_a_class_starts_as_the_direction_of_its_mean_unit_feature():
    features = torch.tensor([[3.0, 0.0], [0.0, 0.5], [-1.0, 0.0]])
    vectors = class_vectors(features, torch.tensor([4, 4, 5]), [4, 5], 1, draws())
    expected = torch.tensor([[0.5, 0.5], [-1.0, 0.0]])
    torch.testing.assert_close(vectors, F.normalize(expected, dim=1).double())


def test_several_vectors_of_a_class_start_as_its_clusters():
    angles = torch.tensor([0.0, 2.0, 4.0]).repeat_interleave(20) + 0.1 * torch.rand(60, generator=draws())
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    vectors = class_vectors(7 * features, torch.zeros(60), [0], 3, draws())
    means = features.reshape(3, 20, 2).mean(dim=1).double()
    nearest = torch.cdist(means, vectors).argmin(dim=1)
    torch.testing.assert_close(vectors[nearest], means)


def test_more_clusters_than_points_return_points_again():
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert torch.equal(k_means(points, 5, draws()), points[[0, 1, 0, 1, 0]])
    assert torch.equal(k_means(torch.ones(4, 2), 3, draws()), torch.ones(3, 2))
