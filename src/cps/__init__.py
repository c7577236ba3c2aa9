"""Continual Prune-and-Select: one network learns task after task and never forgets.

Names are imported when they are first used, so `import cps` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "augmentation": ["Augmentation", "Chain", "Colour", "Flip", "PadCrop", "ResizedCrop", "Rotate"],
    "backbones": ["Builtin", "SmallConvNet", "resnet18", "resnet32"],
    "capacity": ["Capacity", "CapacityError", "CapacityWarning"],
    "cascade": ["Cascade"],
    "checklist": ["check_pruner", "check_selector"],
    "decoding": ["ImageError", "read_image"],
    "devices": ["make_fabric"],
    "evaluation": ["evaluate"],
    "evidence": ["Evidence", "Outputs"],
    "exporting": ["Export", "export_all", "export_task"],
    "extraction": ["Standalone"],
    "folders": ["FolderImages", "ImageFolder", "read_folder"],
    "learner": ["Learner"],
    "loading": ["load"],
    "losses": ["Contrastive", "CrossEntropy", "Loss"],
    "masks": ["Masks"],
    "network": ["SharedNetwork"],
    "pixels": ["Normalize"],
    "plain": ["setting"],
    "prediction": ["Prediction"],
    "progress": ["Progress"],
    "pruning": ["Magnitude", "NNrelief", "Pruner"],
    "scenario": ["Scenario", "Task", "split_by_class"],
    "selection": ["GraphSelector", "ImportanceSignature", "LinkedSelector", "MaxOutput", "Oracle", "Selector"],
    "settings": ["SGD", "Adam", "AdamW", "Constant", "Cosine", "Steps", "Training"],
    "storage": ["FileError"],
    "stream": ["Stream"],
    "subnetwork": ["Fingerprint", "Subnetwork"],
    "views": ["Rotations", "Upright", "Views"],
}
__all__ = [
    "Adam", "AdamW", "Augmentation", "Builtin", "Capacity", "CapacityError", "CapacityWarning", "Cascade", "Chain",
    "Colour", "Constant", "Contrastive", "Cosine", "CrossEntropy", "Evidence", "Export", "FileError", "Fingerprint",
    "Flip", "FolderImages", "GraphSelector", "ImageError", "ImageFolder", "ImportanceSignature", "Learner",
    "LinkedSelector", "Loss", "Magnitude", "Masks", "MaxOutput", "NNrelief", "Normalize", "Oracle", "Outputs",
    "PadCrop", "Prediction", "Progress", "Pruner", "ResizedCrop", "Rotate", "Rotations", "SGD", "Scenario",
    "Selector", "SharedNetwork", "SmallConvNet", "Standalone", "Steps", "Stream", "Subnetwork", "Task", "Training",
    "Upright", "Views", "check_pruner", "check_selector", "evaluate", "export_all", "export_task", "load",
    "make_fabric", "read_folder", "read_image", "resnet18", "resnet32", "setting", "split_by_class",
]  # fmt: skip

if TYPE_CHECKING:
    from cps.augmentation import Augmentation, Chain, Colour, Flip, PadCrop, ResizedCrop, Rotate
    from cps.backbones import Builtin, SmallConvNet, resnet18, resnet32
    from cps.capacity import Capacity, CapacityError, CapacityWarning
    from cps.cascade import Cascade
    from cps.checklist import check_pruner, check_selector
    from cps.decoding import ImageError, read_image
    from cps.devices import make_fabric
    from cps.evaluation import evaluate
    from cps.evidence import Evidence, Outputs
    from cps.exporting import Export, export_all, export_task
    from cps.extraction import Standalone
    from cps.folders import FolderImages, ImageFolder, read_folder
    from cps.learner import Learner
    from cps.loading import load
    from cps.losses import Contrastive, CrossEntropy, Loss
    from cps.masks import Masks
    from cps.network import SharedNetwork
    from cps.pixels import Normalize
    from cps.plain import setting
    from cps.prediction import Prediction
    from cps.progress import Progress
    from cps.pruning import Magnitude, NNrelief, Pruner
    from cps.scenario import Scenario, Task, split_by_class
    from cps.selection import GraphSelector, ImportanceSignature, LinkedSelector, MaxOutput, Oracle, Selector
    from cps.settings import SGD, Adam, AdamW, Constant, Cosine, Steps, Training
    from cps.storage import FileError
    from cps.stream import Stream
    from cps.subnetwork import Fingerprint, Subnetwork
    from cps.views import Rotations, Upright, Views


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"cps.{module}"), name)
    raise AttributeError(f"module 'cps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
