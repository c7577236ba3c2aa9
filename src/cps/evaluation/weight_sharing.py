"""How the tasks share the weights: the numbers behind the paper's plot of union and intersection."""

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from cps.network.masks import count_users, count_weights, density, union
from cps.network.shared import SharedNetwork


@dataclass(frozen=True)
class LayerSharing:
    """The weights of one layer that any task uses (`union`) and that all tasks use (`intersection`), in percent."""

    name: str
    weights: int
    union: float
    intersection: float


@dataclass(frozen=True)
class WeightSharing:
    """How the tasks share the weights, in percent of all weights of the network.

    `density[task]` is used by that task, `taken[task]` by it and all earlier ones, and `sharing[n]` by exactly n tasks.
    """

    weights: int
    density: tuple[float, ...]
    taken: tuple[float, ...]
    layers: tuple[LayerSharing, ...]
    sharing: tuple[float, ...]


def measure_weight_sharing(network: SharedNetwork) -> WeightSharing:
    """Measure how the sealed tasks of a network share its weights."""
    weights, masks = network.weights, [subnetwork.masks for subnetwork in network.subnetworks]
    users = {name: count_users(masks, name) for name in weights}

    def percent(name: str, selected: Tensor) -> float:
        return 100 * count_weights(selected, weights[name]) / weights[name].numel()

    return WeightSharing(
        weights=sum(weight.numel() for weight in weights.values()),
        density=tuple(100 * network.density(task) for task in range(len(masks))),
        taken=tuple(100 * density(taken, weights) for taken in accumulate(masks, union)),
        layers=tuple(
            LayerSharing(
                name=name.removesuffix(".weight"),
                weights=weight.numel(),
                union=percent(name, users[name] > 0),
                intersection=percent(name, users[name] == len(masks)),
            )
            for name, weight in weights.items()
        ),
        sharing=tuple(
            100 * density({name: count == number for name, count in users.items()}, weights)
            for number in range(len(masks) + 1)
        ),
    )
