"""The settings of a learner, checked in one place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cps.closed_form.spaces import Joined, RandomPatches, RandomReLU
from cps.data.augmentation import Augmentation
from cps.data.normalize import Normalize
from cps.data.rotations import RotationScheme, Upright
from cps.network.capacity import Capacity
from cps.pruning.base import Pruner
from cps.pruning.nnrelief import NNrelief
from cps.selection.base import Selector
from cps.selection.fusion import Fusion
from cps.selection.importance_signature import ImportanceSignature
from cps.selection.max_output import MaxOutput
from cps.selection.statistics import check_selectors
from cps.storage.settings_codec import contains_setting, encode
from cps.training.settings import Cosine, Training

# The defaults: those of the paper for CIFAR-100 but for the first selector, the optimizer and its schedule, which
# studies/default_training.py has chosen on networks of several kinds.
PRUNER = NNrelief()
TRAIN = Training(70, schedule=Cosine(warmup=5))
RETRAIN = Training(50, schedule=Cosine(warmup=5))
SELECTORS: tuple[Selector, ...] = (Fusion(), MaxOutput(), ImportanceSignature())
ROTATIONS = Upright()
CAPACITY = Capacity()


@dataclass(frozen=True)
class LearnerConfig:
    """All settings of a learner that a model file holds. None stands for a default object, such as `NNrelief()`.

    Constructing it checks every setting: `TypeError` for a wrong type, `ValueError` for a wrong value.
    """

    pruner: Pruner = PRUNER
    rounds: int = 3
    train: Training = TRAIN
    retrain: Training = RETRAIN
    selectors: Sequence[Selector] = SELECTORS
    augment: Augmentation | None = None
    rotations: RotationScheme = ROTATIONS
    normalize: Normalize | None = None
    prune_images: int = 1000
    trunk: str | None = None
    map_copies: int = 8
    capacity: Capacity = CAPACITY
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name not in _REQUIRED:
                object.__setattr__(self, field.name, field.default)
            else:
                _check(field.name, value)
        for name in INTEGERS:
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "selectors", check_selectors(self.selectors))
        if self.trunk is not None:
            self._check_trunk()

    def _check_trunk(self) -> None:
        """Raise an error for settings that do not go with a trunk: its maps cannot be rotated like images."""
        if not isinstance(self.trunk, str):
            raise TypeError(f"trunk must be the name of a layer, such as 'layer3', or None, got {self.trunk!r}")
        if self.rotations.num_rotations > 1 or self.rotations.flips:
            raise ValueError(f"rotations must be cps.Upright() with a trunk, got {self.rotations}")
        if any(contains_setting(self.selectors, space) for space in (RandomReLU, RandomPatches, Joined)):
            raise ValueError("the space of a selector must be cps.Pretrained() or None with a trunk")
        if any(getattr(space, "flips", False) for space in _shared_spaces(self.selectors)):
            raise ValueError("SharedSpace must have flips=False with a trunk, whose maps cannot be mirrored")

    def encode(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        return {field.name: encode(getattr(self, field.name)) for field in fields(self)}


SETTINGS = tuple(field.name for field in fields(LearnerConfig))
INTEGERS = {"rounds": 0, "prune_images": 1, "map_copies": 1, "seed": 0}  # and the smallest value of each
_REQUIRED = {*INTEGERS, "selectors"}  # None is an error here, in a file too
_INSTANCES = {"train": Training, "retrain": Training, "normalize": Normalize, "capacity": Capacity}
_FUNCTIONS = {  # and what else they need to have
    "pruner": ("cps.NNrelief()", ""),
    "augment": ("cps.Flip()", ""),
    "rotations": ("cps.Rotations()", "num_rotations"),
}


def _check(name: str, value: Any) -> None:
    """Raise an error if a setting has the wrong type or value."""
    if name in INTEGERS:
        least = INTEGERS[name]
        is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
        if not is_integer or not least <= value < 2**63:
            kind = ValueError if isinstance(value, int) else TypeError
            raise kind(f"{name} must be an integer, {least} or more, got {value!r}")
    elif name in _INSTANCES and not isinstance(value, _INSTANCES[name]):
        raise TypeError(f"{name} must be a cps.{_INSTANCES[name].__name__}, got {_describe(value)}")
    elif name in _FUNCTIONS:
        example, attribute = _FUNCTIONS[name]
        if not is_function(value) or not hasattr(value, attribute or "__call__"):
            raise TypeError(f"{name} must be an object such as {example}, got {_describe(value)}")


def _shared_spaces(selectors: Sequence[Selector]) -> list[Any]:
    """Return the selectors, and the shared space of those that have one."""
    return [*selectors, *(getattr(selector, "shared", None) for selector in selectors)]


def is_function(value: Any) -> bool:
    """Return True for a callable that is not a class."""
    return callable(value) and not isinstance(value, type)


def check_callback(name: str, value: Callable[..., object] | None) -> None:
    """Raise `TypeError` unless a callback is None or callable."""
    if value is not None and not is_function(value):
        raise TypeError(f"{name} must be a function, got {_describe(value)}")


def _describe(value: Any) -> str:
    hint = " (the class itself; pass an instance)" if isinstance(value, type) else ""
    return f"{repr(value)[:80]}{hint}"
