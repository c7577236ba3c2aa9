"""A head that compares directions, and the vectors that new classes start with."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

K_MEANS_ROUNDS = 100


class CosineHead(nn.Linear):
    """Similarities of features and vectors of each class by their angle, times a scale.

    With one vector of a class, its proxy, the similarity is their cosine. With several, it is the mean of the cosines,
    weighted by their softmax (the local similarity classifier of PODNet): `y_c = sum_k s_ck cos_ck`. `sharpness`
    multiplies the cosines before that. Vectors are the rows of `weight`, those of a class one after the other.
    """

    def __init__(self, features: int, classes: int, *, proxies: int = 1, sharpness: float = 1.0, device: str = "cpu"):
        super().__init__(features, classes * proxies, bias=False, device=device, dtype=torch.float32)
        self.proxies, self.sharpness = proxies, sharpness
        self.scale = nn.Parameter(torch.empty(1, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled similarities (N, classes) of features (N, d)."""
        return self.scale * self.similarities(input)

    def similarities(self, features: Tensor) -> Tensor:
        """Return the similarities (N, classes) of features (N, d) without the scale."""
        with torch.autocast(features.device.type, enabled=False):
            points = F.normalize(features.to(self.weight.dtype), dim=1)
            cosines = self.sharpness * F.linear(points, F.normalize(self.weight, dim=1))
        if self.proxies == 1:
            return cosines
        by_class = cosines.unflatten(1, (-1, self.proxies))  # (N, classes, proxies)
        return (by_class * by_class.softmax(dim=2)).sum(dim=2)


@torch.no_grad()
def make_cosine_head(
    features: int,
    classes: int,
    draws: torch.Generator,
    *,
    proxies: int = 1,
    sharpness: float = 1.0,
    scale: float = 1.0,
    learns_scale: bool = True,
) -> CosineHead:
    """Return a head with vectors in random directions."""
    head = CosineHead(features, classes, proxies=proxies, sharpness=sharpness, device="meta").to_empty(device="cpu")
    head.weight.uniform_(-(features**-0.5), features**-0.5, generator=draws)
    head.scale.fill_(scale).requires_grad_(learns_scale)
    return head


@torch.no_grad()
def grow_cosine_head(head: CosineHead, classes: int, draws: torch.Generator) -> CosineHead:
    """Return a head with `classes` classes more, in random directions; the old ones and the scale are the same."""
    settings = {"proxies": head.proxies, "sharpness": head.sharpness, "learns_scale": head.scale.requires_grad}
    new = make_cosine_head(head.in_features, classes, draws, **settings)
    grown = make_cosine_head(head.in_features, len(head.weight) // head.proxies + classes, draws, **settings)
    grown.weight.copy_(torch.cat([head.weight, new.weight.to(head.weight)]))
    grown.scale.copy_(head.scale)
    return grown.to(head.weight.device)


def class_vectors(
    features: Tensor, labels: Tensor, classes: Sequence[int], proxies: int, draws: torch.Generator
) -> Tensor:
    """Return `proxies` vectors (classes * proxies, d) for each class, made of the features (N, d) of its images.

    One vector is the direction of the mean of the features, all of unit length (weight imprinting); several are their
    k-means.
    """
    points = F.normalize(features.double(), dim=1).cpu()
    vectors = []
    for label in classes:
        own = points[labels.cpu() == label]
        vectors.append(F.normalize(own.mean(dim=0, keepdim=True)) if proxies == 1 else k_means(own, proxies, draws))
    return torch.cat(vectors)


def k_means(points: Tensor, number: int, draws: torch.Generator) -> Tensor:
    """Return the means (number, d) of clusters of points (N, d), started by k-means++.

    Of too few points, some are returned more than once.
    """
    if len(points) <= number:
        return points[torch.arange(number) % len(points)]
    means = points[torch.randint(len(points), (1,), generator=draws)]
    for _ in range(number - 1):
        distances = torch.cdist(points, means).amin(dim=1).square() + 1e-12  # all may be 0
        means = torch.cat([means, points[torch.multinomial(distances, 1, generator=draws)]])
    for _ in range(K_MEANS_ROUNDS):
        nearest = torch.cdist(points, means).argmin(dim=1)
        members = F.one_hot(nearest, number).to(points)  # (N, number)
        sizes = members.sum(dim=0)[:, None]
        moved = torch.where(sizes > 0, members.T @ points / sizes.clamp(min=1), means)
        if torch.equal(moved, means):
            break
        means = moved
    return means
