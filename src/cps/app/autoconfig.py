"""A proposal: settings for a new model, each chosen from its first shipment unless it is given."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cps.app.folder_scan import FolderScan
from cps.data.augmentation import Augmentation, Chain, Flip, PadCrop, ResizedCrop
from cps.data.normalize import IMAGENET, Normalize
from cps.learner import Learner
from cps.network.backbones import Builtin
from cps.pruning.nnrelief import NNrelief
from cps.training.settings import SGD, Adam, Cosine, Training

SIZES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224)  # pixels of an image's side
SMALLEST_LARGE = 96  # pixels from which the first layer of the backbone halves the image twice
CPU_SIZE = 64  # pixels; more takes hours without a GPU
STEPS = 1000  # that training takes, about
EPOCHS = (10, 40)  # the fewest and the most
AUGMENTATIONS = ("none", "shift", "shift+flip", "crop+flip")


class Choice(NamedTuple):
    """A setting in words, and why it is so."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Options:
    """What the user asks for; the rest is chosen."""

    size: int | None = None
    backbone: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    augment: str | None = None
    alpha: float | None = None
    seed: int | None = None
    pretrained: bool = False

    def __post_init__(self) -> None:
        if self.augment is not None and self.augment not in AUGMENTATIONS:
            raise ValueError(f"there is no augmentation '{self.augment}'; there are: {', '.join(AUGMENTATIONS)}")


@dataclass(frozen=True)
class Proposal:
    """The settings of a new model: image size, backbone, and what the learner takes."""

    size: int
    backbone: Builtin
    settings: dict[str, Any]
    choices: tuple[Choice, ...]


def propose(shipment: FolderScan, wishes: Options, *, has_gpu: bool) -> Proposal:
    """Choose the settings of a new model from its first shipment."""
    images, sample = len(shipment.files), shipment.sample
    size = _size(sample.side, wishes, has_gpu)
    backbone = _backbone(size.value, wishes)
    batch = _Made(wishes.batch_size or _batch_size(images, has_gpu), "asked for" if wishes.batch_size else "by images")
    epochs = _epochs(images, batch.value, wishes)
    augment = _augment(size.value, sample.is_grey, wishes)
    alpha = wishes.alpha or (0.9 if wishes.pretrained else 0.75)
    optimizer = SGD(1e-2, weight_decay=1e-4) if wishes.pretrained else Adam(2e-3, weight_decay=5e-4)
    settings = {
        "train": Training(epochs.value, optimizer, Cosine(), batch.value),
        "retrain": Training(_half(epochs.value), optimizer, Cosine(), batch.value),
        "rounds": 2,
        "pruner": NNrelief(alpha=alpha),
        "augment": augmentation(augment.value, size.value),
        "normalize": IMAGENET if wishes.pretrained else Normalize(sample.mean, sample.std),
        "seed": wishes.seed or 0,
    }
    choices = (
        Choice("image size", f"{size.value} x {size.value}", size.why),
        Choice("backbone", backbone.value, backbone.why),
        Choice("epochs", _epochs_in_words(settings["train"], settings["retrain"], 2), epochs.why),
        Choice("batch", str(batch.value), batch.why),
        Choice("augmentation", augment.value, augment.why),
        Choice("pruning", f"alpha {alpha}", "asked for" if wishes.alpha else "leaves room for later shipments"),
    )
    return Proposal(size.value, Builtin(backbone.value), settings, choices)


def apply(wishes: Options, learner: Learner, size: int) -> tuple[Choice, ...]:
    """Let a model of earlier shipments learn the next one as wished; return its settings in words.

    What a model was made with for good, its image size and backbone, cannot be wished otherwise.
    """
    name = learner.builtin.name if learner.builtin else "your own"
    if wishes.size not in (None, size):
        raise ValueError(f"the model was made for images of {size} pixels, which cannot become {wishes.size}")
    if wishes.backbone not in (None, name):
        raise ValueError(f"the model was made with the backbone {name}, which cannot become {wishes.backbone}")
    if wishes.seed not in (None, learner.seed):
        raise ValueError(f"the model was made with seed {learner.seed}, which cannot become {wishes.seed}")
    if wishes.pretrained:
        raise ValueError("ImageNet weights are for a new model; this one has weights of its own")
    epochs, batch = wishes.epochs or learner.train.epochs, wishes.batch_size or learner.train.batch_size
    if wishes.epochs:
        learner.retrain = replace(learner.retrain, epochs=_half(epochs))
    learner.train = replace(learner.train, epochs=epochs, batch_size=batch)
    learner.retrain = replace(learner.retrain, batch_size=batch)
    if wishes.augment is not None:
        learner.augment = augmentation(wishes.augment, size)
    if wishes.alpha is not None:
        learner.pruner = NNrelief(alpha=wishes.alpha)
    found = (
        ("image size", f"{size} x {size}", None),
        ("backbone", name, None),
        ("epochs", _epochs_in_words(learner.train, learner.retrain, learner.rounds), wishes.epochs),
        ("batch", str(batch), wishes.batch_size),
        ("augmentation", _name_of(learner.augment, size), wishes.augment),
        ("pruning", _pruning_in_words(learner), wishes.alpha),
    )
    return tuple(Choice(what, value, "asked for" if wish else "as the model has it") for what, value, wish in found)


def augmentation(name: str, size: int) -> Augmentation | None:
    """Return the augmentation of that name for images of that size."""
    shift = PadCrop(max(1, size // 8))
    known = {"none": None, "shift": shift, "shift+flip": Chain((shift, Flip()))}
    return {**known, "crop+flip": Chain((ResizedCrop(area=(0.35, 1.0)), Flip()))}[name]


class _Made(NamedTuple):
    """A value and why it was chosen."""

    value: Any
    why: str


def _size(side: int, wishes: Options, has_gpu: bool) -> _Made:
    if wishes.size is not None:
        return _Made(wishes.size, "asked for")
    most = SIZES[-1] if has_gpu or wishes.pretrained else CPU_SIZE
    fitting = [size for size in SIZES if size <= min(side, most)]
    limit = "" if side <= most else "; larger would be slow without a GPU" if most == CPU_SIZE else ""
    return _Made(fitting[-1] if fitting else SIZES[0], f"short sides are about {side}{limit}")


def _backbone(size: int, wishes: Options) -> _Made:
    if wishes.pretrained:
        if wishes.backbone not in (None, "resnet18-large"):
            raise ValueError(f"ImageNet weights are for the backbone resnet18-large, not for {wishes.backbone}")
        return _Made("resnet18-large", "ImageNet weights fit it")
    if wishes.backbone is not None:
        return _Made(Builtin(wishes.backbone).name, "asked for")
    if size <= 16:
        return _Made("small", "images are tiny")
    return _Made("resnet18-large" if size >= SMALLEST_LARGE else "resnet18-third", "by image size")


def _batch_size(images: int, has_gpu: bool) -> int:
    return 16 if images < 400 else 32 if images < 4000 else 128 if has_gpu else 64


def _epochs(images: int, batch_size: int, wishes: Options) -> _Made:
    if wishes.epochs is not None:
        return _Made(wishes.epochs, "asked for")
    fewest, most = EPOCHS
    epochs = min(most, max(fewest, round(STEPS * batch_size / images)))
    return _Made(epochs, f"{images} images: {epochs * -(-images // batch_size):,} steps")


def _augment(size: int, is_grey: bool, wishes: Options) -> _Made:
    if wishes.augment is not None:
        return _Made(wishes.augment, "asked for")
    if is_grey:
        return _Made("shift", "grey images, where left and right may differ")
    return _Made("crop+flip" if size >= SMALLEST_LARGE else "shift+flip", "colour images")


def _half(epochs: int) -> int:
    return max(1, epochs // 2)


def _epochs_in_words(train: Training, retrain: Training, rounds: int) -> str:
    return f"{train.epochs} + {rounds} x {retrain.epochs} after pruning"


def _pruning_in_words(learner: Learner) -> str:
    return f"alpha {learner.pruner.alpha}" if isinstance(learner.pruner, NNrelief) else str(learner.pruner)


def _name_of(augment: Augmentation | None, size: int) -> str:
    return next((name for name in AUGMENTATIONS if augmentation(name, size) == augment), str(augment))
