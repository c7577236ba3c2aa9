"""What all methods that train a network have in common: settings, budget, predictions and the header of their file."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from cps.config import check_callback
from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import ClassName
from cps.data.normalize import Normalize, Prepare
from cps.method import Assumptions, Method, predict
from cps.methods.blocks.trunk_maps import TrunkMaps
from cps.methods.task_training import PhaseProgress
from cps.runtime.devices import launch, make_fabric, required_precision
from cps.selection.base import Selector
from cps.selection.predict import Prediction
from cps.storage import container
from cps.storage.settings_codec import encode
from cps.training.settings import SGD, Cosine, Training
from cps.training.trainer import Trainer

if TYPE_CHECKING:
    from lightning_fabric import Fabric

KIND = "method"  # of the file
TRAIN = Training(70, SGD(0.1, weight_decay=5e-4), Cosine())
BATCH = 256  # images per forward pass
HEAD, CHOOSE, OBSERVE, SCORES, HELD_OUT, CALIBRATION, FRESH = range(
    1000, 1007
)  # purposes of a seed, beside the numbers of phases
NOT_STORED = ("backbone", "fabric", "workers", "on_epoch")  # settings of a machine, or in the tensors


@dataclass(eq=False)
class TrainedMethod:
    """A method that learns a task by a `TaskTraining`: training in one phase or several.

    `backbone` is a module (images -> features), which is copied. `train` is the training of a task. With `passes`, all
    training steps of a task together see `passes` times as many images as the task has, whatever the epochs of its
    phases; that is how methods are compared at the same cost. `on_epoch` is called after every epoch.
    """

    backbone: nn.Module
    _: KW_ONLY
    train: Training = TRAIN
    passes: float | None = None
    augment: Augmentation | None = None
    normalize: Normalize | None = None
    seed: int = 0
    fabric: "Fabric | None" = None
    workers: int = 0
    on_epoch: Callable[[PhaseProgress], None] | None = None

    name = "method"
    assumes = Assumptions()
    is_sealed = False
    positive: ClassVar[Sequence[str]] = ()  # settings that must be above 0; other numbers may be 0

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, nn.Module):
            raise TypeError(f"the backbone must be an nn.Module, got {self.backbone!r}")
        self._check_numbers()
        check_callback("on_epoch", self.on_epoch)
        if self.passes is not None and not self.passes > 0:
            raise ValueError(f"passes must be a positive number of passes over the images of a task, got {self.passes}")
        self.device_fabric = launch(self.fabric or make_fabric(precision=required_precision(self.backbone)))
        self.device = self.device_fabric.device
        self.trainer = Trainer(self.device_fabric)
        self.maps: TrunkMaps | None = None  # of a frozen trunk, if there is one
        dtype = next((each.dtype for each in self.backbone.parameters()), torch.float32)
        self.prepare: Callable[[Tensor], Tensor] = Prepare(self.normalize, dtype)  # from images to what is trained on
        self.transform = BatchTransform(self.prepare, self.augment)
        self.classes: list[tuple[ClassName, ...]] = []  # of each task, with those of the task being learned

    def _check_numbers(self) -> None:
        """Raise `ValueError` for a number that is too small."""
        for field in fields(self):
            value, is_positive = getattr(self, field.name), field.name in self.positive
            if isinstance(value, int | float) and not (value > 0 if is_positive else value >= 0):
                must = "above 0" if is_positive else "0 or more"
                raise ValueError(f"{field.name} of {self.name} must be {must}, got {value!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tasks={len(self.classes)}, classes={self.num_classes})"

    @property
    def num_classes(self) -> int:
        """The number of classes of all tasks so far."""
        return sum(map(len, self.classes))

    @property
    def image_passes(self) -> int:
        """The number of images in all training steps so far."""
        return self.trainer.image_passes

    def predict(
        self, images: Any, *, task: int | None = None, group_size: int = 1, selector: Selector | None = None
    ) -> Prediction:
        """Predict classes; the task of the images is found, unless `task` gives it."""
        return predict(cast(Method, self), images, task=task, group_size=group_size, selector=selector)

    def describe(self) -> dict[str, Any]:
        """Return the name and the settings as JSON data."""
        settings = {field.name: encode(getattr(self, field.name)) for field in fields(self)}
        return {"method": self.name, "settings": {name: settings[name] for name in settings if name not in NOT_STORED}}

    def read_file(self, path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the header and the tensors of a file; raise `ValueError` if its method has other settings."""
        header, tensors = container.read(path, KIND)
        found, wanted = {name: header.get(name) for name in ("method", "settings")}, self.describe()
        if found != wanted:
            raise ValueError(f"'{path}' has another method or other settings: {found}, not {wanted}")
        return header, tensors

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that learning a task changes, by name."""
        raise NotImplementedError

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return a digest of everything learned so far."""
        return container.digest(self.tensors())
