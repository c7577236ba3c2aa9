"""Choose the settings of a new model from its first folder of images, except for those the user gives."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cps.app.folder_scan import FolderScan
from cps.closed_form.spaces import Pretrained
from cps.config import SELECTORS
from cps.data.augmentation import Augmentation, Chain, Flip, PadCrop, ResizedCrop
from cps.data.normalize import Normalize
from cps.learner import Learner
from cps.network.architectures import INSTALL, Architecture
from cps.network.pretrained import RESNET18, has_published_weights, preprocessing_of
from cps.pruning.nnrelief import NNrelief
from cps.selection.fusion import Fusion
from cps.selection.shared_space import SharedSpace
from cps.training.losses import SmoothedCrossEntropy
from cps.training.settings import SGD, Adam, Cosine, Training

SIZES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224)  # pixels of an image's side
LARGE_IMAGE = 96  # pixels from which the first layers of the backbone halve the image twice
MAX_CPU_SIZE = 64  # pixels; training on larger images takes hours without a GPU
PHOTO = 64  # pixels; colour images with a median short side from here on are taken for photos
TARGET_STEPS = 1000  # training steps, approximately
MIN_EPOCHS, MAX_EPOCHS = 10, 40
AUGMENTATIONS = ("none", "shift", "shift+flip", "crop+flip")
GIVEN = "given as an option"
FROM_MODEL = "stored in the model"
FROZEN_METHOD = "closed form over frozen features"
NO_WEIGHTS = (
    "the images look like photos, but no pretrained weights are on this machine, so a network is trained from scratch: "
    "it takes longer, and far fewer predictions will be right (of 300 photos of ten bird species 40% instead of 86%). "
    f"Get weights with: {INSTALL}, or choose --backbone torchvision:resnet18, which downloads them; --from-scratch "
    "hides this warning"
)


class Choice(NamedTuple):
    """A setting as text, and the reason for its value."""

    name: str
    value: str
    reason: str


FROZEN = Choice("method", FROZEN_METHOD, "one pass over the images; --minutes N trains subnetworks, too")
ONE_CLASS = Choice("method", FROZEN_METHOD, "a single class leaves a subnetwork nothing to tell apart")
BEHIND_TRUNK = Choice(
    "method", "subnetworks behind a frozen trunk", "more accurate; --minutes 0 keeps to the closed form, in seconds"
)
TRUNK_EPOCHS = 12  # of dense training behind a trunk; more gain nothing


@dataclass(frozen=True)
class Options:
    """The settings that the user gives; those that are None are chosen.

    `pretrained` tells whether a new model starts from pretrained weights. If it does, its tasks are trained for so many
    `epochs`, or for as many as fit into the `minutes`, and not at all with 0 minutes.
    """

    size: int | None = None
    backbone: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    augment: str | None = None
    alpha: float | None = None
    seed: int | None = None
    pretrained: bool | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.minutes is not None and self.epochs is not None:
            raise ValueError("--minutes and --epochs both say how long to train; give one of them")
        if self.augment is not None and self.augment not in AUGMENTATIONS:
            raise ValueError(f"unknown augmentation '{self.augment}'; choose from: {', '.join(AUGMENTATIONS)}")

    def trains(self, *, default: bool) -> bool:
        """Return True if tasks of a pretrained model are to be trained; `default` if the options leave it open."""
        return self.minutes > 0 if self.minutes is not None else default or self.epochs is not None

    def check_frozen(self) -> None:
        """Raise `ValueError` if an option has no effect without training."""
        for name in ("batch_size", "augment", "alpha"):
            if getattr(self, name) is not None:
                option = name.removesuffix("_size")
                raise ValueError(f"--{option} has no effect on frozen pretrained features; train with --minutes, too")


@dataclass(frozen=True)
class AutoConfig:
    """The configuration of a new model: image size, backbone, and the settings of its learner.

    `is_pretrained` tells whether the backbone starts from pretrained weights, `is_frozen` whether tasks are learned
    without training. `warning` is text for the user, or "".
    """

    size: int
    backbone: Architecture
    settings: dict[str, Any]
    choices: tuple[Choice, ...]
    is_pretrained: bool = False
    is_frozen: bool = False
    warning: str = ""


def choose_config(scan: FolderScan, options: Options, *, has_gpu: bool, installed: str | None = None) -> AutoConfig:
    """Choose the configuration of a new model from its first folder.

    `installed` is the name of a backbone whose pretrained weights are on this machine, or None.
    """
    sample = scan.sample
    is_photo = not sample.is_grey and sample.side >= PHOTO
    backbone = _choose_pretrained(options, is_photo=is_photo, installed=installed)
    if backbone is not None:
        return _pretrained_config(scan, options, backbone, has_gpu=has_gpu)
    if options.minutes is not None:
        raise ValueError("--minutes is for pretrained backbones; choose one with --pretrained, or give --epochs")
    size = _choose_size(sample.side, options, has_gpu)
    backbone = _choose_backbone(size.value, options)
    training, choices = _training_config(scan, options, size.value, has_gpu=has_gpu)
    settings = {**training, "normalize": Normalize(sample.mean, sample.std), "seed": options.seed or 0}
    choices = (
        Choice("image size", f"{size.value} x {size.value}", size.reason),
        Choice("backbone", backbone.value, backbone.reason),
        *choices,
    )
    is_missed = is_photo and options.pretrained is None and options.backbone is None
    warning = NO_WEIGHTS if is_missed else ""
    return AutoConfig(size.value, Architecture(backbone.value), settings, choices, warning=warning)


def _choose_pretrained(options: Options, *, is_photo: bool, installed: str | None) -> "_Chosen | None":
    """Return the name of the backbone that starts from pretrained weights, or None to train one from scratch."""
    if options.pretrained is False:
        return None
    if options.backbone is not None:
        wanted = options.pretrained or has_published_weights(Architecture(options.backbone))
        return _Chosen(options.backbone, GIVEN) if wanted else None
    if options.pretrained:
        return _Chosen(installed or RESNET18, "pretrained weights are asked for")
    return _Chosen(installed, "pretrained, since the images look like photos") if is_photo and installed else None


def _pretrained_config(scan: FolderScan, options: Options, backbone: "_Chosen", *, has_gpu: bool) -> AutoConfig:
    """Return the configuration of a new model that starts from pretrained weights."""
    architecture = Architecture(backbone.value)
    expected = preprocessing_of(architecture)
    size = expected.size if options.size is None else options.size
    reason = "that of the pretrained weights" if options.size is None else GIVEN
    training, choices = _trunk_config(scan, options)
    settings = {
        **training,
        "normalize": expected.normalize,
        "seed": options.seed or 0,
        "selectors": (Fusion(SharedSpace(Pretrained()), cascade_tasks=0), *SELECTORS[1:]),
    }
    is_frozen = not options.trains(default=has_gpu)
    if is_frozen:
        options.check_frozen()
    choices = (
        Choice("image size", f"{size} x {size}", reason),
        Choice("backbone", f"{architecture.name}, pretrained", backbone.reason),
        *((FROZEN,) if is_frozen else choices),
    )
    return AutoConfig(size, architecture, settings, choices, is_pretrained=True, is_frozen=is_frozen)


def trunk_settings(epochs: int, *, batch_size: int = 64, alpha: float = 0.95) -> dict[str, Any]:
    """Return the settings of training behind a trunk (studies/behind_trunk.py measures them)."""
    training = Training(epochs, SGD(1e-2, weight_decay=5e-4), Cosine(), batch_size, SmoothedCrossEntropy(0.1))
    return {
        "train": training,
        "retrain": replace(training, epochs=_half(epochs)),
        "rounds": 1,
        "pruner": NNrelief(alpha=alpha),
        "augment": make_augmentation("crop+flip", LARGE_IMAGE),
    }


def _trunk_config(scan: FolderScan, options: Options) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """Return the settings of training behind a trunk, and the same as text."""
    images, alpha = len(scan.files), options.alpha or 0.95
    batch_size = options.batch_size or (16 if images < 400 else 64)
    settings = trunk_settings(options.epochs or TRUNK_EPOCHS, batch_size=batch_size, alpha=alpha)
    if options.augment is not None:
        settings["augment"] = make_augmentation(options.augment, LARGE_IMAGE)
    epochs = _epochs_text(settings["train"], settings["retrain"], settings["rounds"])
    return settings, (
        BEHIND_TRUNK,
        Choice("epochs", epochs, GIVEN if options.epochs else "as many as gain accuracy, or as time allows"),
        Choice("batch size", str(batch_size), GIVEN if options.batch_size else "for this number of images"),
        Choice("augmentation", options.augment or "crop+flip", GIVEN if options.augment else "photos"),
        Choice("pruning", f"alpha {alpha}", GIVEN if options.alpha else "leaves free weights for later tasks"),
    )


def limit_epochs(learner: Learner, epochs: int) -> Choice:
    """Train a learner for fewer epochs, and return the number as text."""
    config = learner.config
    epochs = min(epochs, config.train.epochs)
    learner.configure(train=replace(config.train, epochs=epochs), retrain=replace(config.retrain, epochs=_half(epochs)))
    text = _epochs_text(learner.config.train, learner.config.retrain, config.rounds)
    return Choice("epochs", text, "as many as time allows, up to those that gain accuracy")


def _training_config(
    scan: FolderScan, options: Options, size: int, *, has_gpu: bool
) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """Return the settings of training from scratch, and the same as text."""
    images = len(scan.files)
    batch_size = _choose_batch_size(images, options, has_gpu)
    epochs = _choose_epochs(images, batch_size.value, options)
    augment = _choose_augmentation(size, scan.sample.is_grey, options)
    alpha = options.alpha or 0.75
    optimizer = Adam(2e-3, weight_decay=5e-4)
    settings: dict[str, Any] = {
        "train": Training(epochs.value, optimizer, Cosine(), batch_size.value),
        "retrain": Training(_half(epochs.value), optimizer, Cosine(), batch_size.value),
        "rounds": 2,
        "pruner": NNrelief(alpha=alpha),
        "augment": make_augmentation(augment.value, size),
    }
    return settings, (
        Choice("epochs", _epochs_text(settings["train"], settings["retrain"], 2), epochs.reason),
        Choice("batch size", str(batch_size.value), batch_size.reason),
        Choice("augmentation", augment.value, augment.reason),
        Choice("pruning", f"alpha {alpha}", GIVEN if options.alpha else "leaves free weights for later tasks"),
    )


def apply_options(options: Options, learner: Learner, size: int) -> tuple[tuple[Choice, ...], bool]:
    """Apply options to the learner of an existing model; return its settings as text, and whether it stays frozen.

    Raise `ValueError` for options that only a new model can have: image size, backbone, seed and pretrained weights.
    """
    name = learner.architecture.name if learner.architecture else "custom"
    if options.size not in (None, size):
        raise ValueError(f"the image size of the model is {size} pixels and cannot be changed to {options.size}")
    if options.backbone not in (None, name):
        raise ValueError(f"the backbone of the model is {name} and cannot be changed to {options.backbone}")
    if options.seed not in (None, learner.config.seed):
        raise ValueError(f"the seed of the model is {learner.config.seed} and cannot be changed to {options.seed}")
    if options.pretrained is not None:
        raise ValueError("only a new model can start from pretrained weights or from scratch; this one has weights")
    shape = (Choice("image size", f"{size} x {size}", FROM_MODEL), Choice("backbone", name, FROM_MODEL))
    config, network = learner.config, learner.network
    if options.minutes is not None and config.trunk is None:
        raise ValueError("--minutes is for models with a pretrained backbone; give --epochs")
    has_trained = not all(subnetwork.is_frozen for subnetwork in network.subnetworks)
    if network.pretrained is not None and not options.trains(default=has_trained or network.device.type == "cuda"):
        options.check_frozen()
        return (*shape, FROZEN), True
    epochs, batch_size = options.epochs or config.train.epochs, options.batch_size or config.train.batch_size
    retrain_epochs = _half(epochs) if options.epochs else config.retrain.epochs
    learner.configure(
        train=replace(config.train, epochs=epochs, batch_size=batch_size),
        retrain=replace(config.retrain, epochs=retrain_epochs, batch_size=batch_size),
        augment=config.augment if options.augment is None else make_augmentation(options.augment, size),
        pruner=config.pruner if options.alpha is None else NNrelief(alpha=options.alpha),
    )
    config = learner.config
    settings = (
        ("epochs", _epochs_text(config.train, config.retrain, config.rounds), options.epochs),
        ("batch size", str(batch_size), options.batch_size),
        ("augmentation", _augmentation_name(config.augment, size), options.augment),
        ("pruning", _pruning_text(learner), options.alpha),
    )
    choices = (Choice(setting, value, GIVEN if option else FROM_MODEL) for setting, value, option in settings)
    return (*shape, *choices), False


def make_augmentation(name: str, size: int) -> Augmentation | None:
    """Return the augmentation of that name for images of `size` pixels."""
    shift = PadCrop(max(1, size // 8))
    return {
        "none": None,
        "shift": shift,
        "shift+flip": Chain((shift, Flip())),
        "crop+flip": Chain((ResizedCrop(area=(0.35, 1.0)), Flip())),
    }[name]


class _Chosen(NamedTuple):
    """A value, and the reason for it."""

    value: Any
    reason: str


def _choose_size(side: int, options: Options, has_gpu: bool) -> _Chosen:
    if options.size is not None:
        return _Chosen(options.size, GIVEN)
    largest = SIZES[-1] if has_gpu else MAX_CPU_SIZE
    fitting = [size for size in SIZES if size <= min(side, largest)]
    is_limited = side > largest == MAX_CPU_SIZE
    reason = f"median short side is {side}" + ("; larger is slow without a GPU" if is_limited else "")
    return _Chosen(fitting[-1] if fitting else SIZES[0], reason)


def _choose_backbone(size: int, options: Options) -> _Chosen:
    if options.backbone is not None:
        return _Chosen(options.backbone, GIVEN)
    if size <= 16:
        return _Chosen("small", "for tiny images")
    return _Chosen("resnet18-large" if size >= LARGE_IMAGE else "resnet18-third", "for this image size")


def _choose_batch_size(images: int, options: Options, has_gpu: bool) -> _Chosen:
    if options.batch_size:
        return _Chosen(options.batch_size, GIVEN)
    batch_size = 16 if images < 400 else 32 if images < 4000 else 128 if has_gpu else 64
    return _Chosen(batch_size, "for this number of images")


def _choose_epochs(images: int, batch_size: int, options: Options) -> _Chosen:
    if options.epochs is not None:
        return _Chosen(options.epochs, GIVEN)
    epochs = min(MAX_EPOCHS, max(MIN_EPOCHS, round(TARGET_STEPS * batch_size / images)))
    return _Chosen(epochs, f"{images:,} images: {epochs * -(-images // batch_size):,} steps")


def _choose_augmentation(size: int, is_grey: bool, options: Options) -> _Chosen:
    if options.augment is not None:
        return _Chosen(options.augment, GIVEN)
    if is_grey:
        return _Chosen("shift", "grey images: a flip may change their meaning")
    return _Chosen("crop+flip" if size >= LARGE_IMAGE else "shift+flip", "colour images")


def _half(epochs: int) -> int:
    return max(1, epochs // 2)


def _epochs_text(train: Training, retrain: Training, rounds: int) -> str:
    return f"{train.epochs} + {rounds} x {retrain.epochs} after pruning"


def _pruning_text(learner: Learner) -> str:
    pruner = learner.config.pruner
    return f"alpha {pruner.alpha}" if isinstance(pruner, NNrelief) else str(pruner)


def _augmentation_name(augment: Augmentation | None, size: int) -> str:
    return next((name for name in AUGMENTATIONS if make_augmentation(name, size) == augment), str(augment))
