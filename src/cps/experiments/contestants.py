"""The methods that `cps compare` knows, by name, and how each is made for a recipe.

A method of your own joins a comparison with an entry in `CONTESTANTS` (examples/own_method.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from cps.closed_form.spaces import Pretrained
from cps.data.augmentation import Flip
from cps.experiments.recipes import Recipe
from cps.learner import Learner
from cps.loading import load
from cps.method import Method
from cps.methods.blocks.memory import Memory
from cps.methods.closed_form import ClosedForm
from cps.methods.expansion.der import DER
from cps.methods.expansion.foster import FOSTER
from cps.methods.expansion.progressive_net import ProgressiveNet
from cps.methods.finetuning import Finetuning
from cps.methods.joint import Joint
from cps.methods.regularization.ewc import EWC
from cps.methods.regularization.lwf import LwF
from cps.methods.regularization.lwm import LwM
from cps.methods.regularization.mas import MAS
from cps.methods.regularization.r_ewc import REWC
from cps.methods.regularization.rwalk import RWalk
from cps.methods.regularization.synaptic_intelligence import SynapticIntelligence
from cps.methods.replay.afc import AFC
from cps.methods.replay.bic import BiC
from cps.methods.replay.eeil import EEIL
from cps.methods.replay.experience_replay import ExperienceReplay
from cps.methods.replay.icarl import ICaRL
from cps.methods.replay.il2m import IL2M
from cps.methods.replay.itaml import ITAML
from cps.methods.replay.lucir import LUCIR
from cps.methods.replay.podnet import PODNet, PODNetNME
from cps.methods.replay.weight_aligning import WeightAligning
from cps.methods.single_head import SingleHead
from cps.methods.subnetworks.clnp import CLNP
from cps.methods.subnetworks.cpg import CPG
from cps.methods.subnetworks.packnet import PackNet
from cps.methods.subnetworks.piggyback import Piggyback
from cps.methods.subnetworks.spacenet import SpaceNet
from cps.methods.subnetworks.supsup import SupSup
from cps.methods.subnetworks.wsn import WSN
from cps.methods.task_subnetworks import TaskSubnetworks
from cps.methods.trained_method import TRAIN
from cps.network.architectures import Architecture
from cps.network.freezing import freeze_weights
from cps.selection.base import Selector
from cps.storage.settings_codec import contains_setting
from cps.training.settings import Cosine, Training, scale_like

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Loadable = TypeVar("Loadable", SingleHead, TaskSubnetworks)


@dataclass(frozen=True)
class Setting:
    """What all methods of a comparison have in common.

    `budget` is "equal", so that the training steps of every method see as many images as those of cps with the recipe,
    by the recipe's optimizer, or "own", so that every method is trained as it was published; one that was not is
    trained by the recipe. `memory` is that of methods that keep images, None for the one that each was published with.
    `weights` is a file of pretrained weights. `tasks` and `classes` are the numbers of those in all, for methods that
    are given them before the first task.
    """

    recipe: Recipe
    fabric: "Fabric"
    budget: str = "equal"
    memory: Memory | None = None
    seed: int = 0
    weights: Path | None = None
    tasks: int | None = None
    classes: int | None = None

    def make_backbone(self) -> nn.Module:
        """Return the backbone that every method starts with."""
        backbone = self.recipe.make_backbone(self.seed)
        if self.recipe.pretrained is not None:
            self.recipe.pretrained(backbone, self.weights)
        return backbone

    @property
    def passes(self) -> int | None:
        """The passes over the images of a task that its training takes, or None if every method has its own number."""
        recipe = self.recipe
        return recipe.train.epochs + recipe.rounds * recipe.retrain.epochs if self.budget == "equal" else None

    @property
    def train(self) -> Training:
        """The training of every method with an equal budget."""
        return replace(self.recipe.train, epochs=self.passes or self.recipe.train.epochs, schedule=Cosine())


@dataclass(frozen=True)
class Contestant:
    """A method of a comparison: `make` returns it before the first task, and `load` the one that a file holds.

    `about` is the line that `cps compare --list` shows.
    """

    make: Callable[[Setting], Method]
    load: Callable[[Setting, Path], Method]
    about: str


def find_contestants(names: Sequence[str]) -> dict[str, Contestant]:
    """Return contestants by name; "all" stands for all. Raise `ValueError` for an unknown name."""
    chosen = [each for name in names for each in (CONTESTANTS if name == "all" else [name])]
    for name in chosen:
        if name not in CONTESTANTS:
            nearest = get_close_matches(name, list(CONTESTANTS), n=3)
            hint = f" (did you mean {' or '.join(nearest)}?)" if nearest else ""
            raise ValueError(f"unknown method '{name}'{hint}; choose from: {', '.join(CONTESTANTS)}, or all")
    return {name: CONTESTANTS[name] for name in dict.fromkeys(chosen)}


def first_sentence(kind: type) -> str:
    """Return the first line of the docstring of a class."""
    return (getdoc(kind) or kind.__name__).splitlines()[0]


def single_head(kind: type[SingleHead], *, phases: Sequence[str] = (), **options: Any) -> Contestant:
    """Return a contestant with one network and one head; `options` are settings of the method.

    `phases` are the settings of further phases that train the whole network. With an equal budget they use the
    recipe's optimizer, too.
    """
    defaults: dict[str, Any] = {each.name: each.default for each in fields(kind)}
    keeps_images, is_published = defaults["memory"] is not None, defaults["train"] is not TRAIN

    def make(setting: Setting) -> SingleHead:
        recipe, settings = setting.recipe, dict(options)
        if setting.budget == "equal":
            settings |= {"train": setting.train, "passes": setting.passes}
            settings |= {name: scale_like(setting.train, defaults["train"], defaults[name]) for name in phases}
        elif not is_published:
            settings["train"] = (recipe.joint if kind is Joint else None) or recipe.train
        if keeps_images and setting.memory is not None:
            settings["memory"] = setting.memory
        if "tasks" in defaults and setting.tasks is not None:
            settings["tasks"] = setting.tasks
        if "total_classes" in defaults and setting.classes is not None:
            settings["total_classes"] = setting.classes
        return kind(
            setting.make_backbone(),
            augment=recipe.augment,
            normalize=recipe.normalize,
            trunk=recipe.trunk,
            map_copies=recipe.map_copies,
            seed=setting.seed,
            fabric=setting.fabric,
            **settings,
        )

    return _loadable(kind, make)


def task_subnetworks(
    kind: type[TaskSubnetworks], *, phases: Sequence[str] = (), like_train: Sequence[str] = (), **options: Any
) -> Contestant:
    """Return a contestant with a subnetwork for each task; `options` are settings of the method.

    It keeps statistics for the selectors of the recipe, too. `phases` are the settings of further phases, as in
    `single_head`, and `like_train` those of phases with the epochs and the learning rate of `train`.
    """
    defaults: dict[str, Any] = {each.name: each.default for each in fields(kind)}

    def make(setting: Setting) -> TaskSubnetworks:
        recipe, settings = setting.recipe, dict(options)
        if setting.budget == "equal" or defaults["train"] is TRAIN:
            train = setting.train if setting.budget == "equal" else recipe.train
            settings |= {"train": train, "passes": setting.passes, **dict.fromkeys(like_train, train)}
            settings |= {name: scale_like(train, defaults["train"], defaults[name]) for name in phases}
        if "tasks" in defaults:
            settings["tasks"] = setting.tasks
        own: Sequence[Selector] = defaults["selectors"]
        selectors = {each.name: each for each in (*own, *recipe.selectors)}
        backbone = setting.make_backbone()
        if recipe.pretrained is not None and kind is Piggyback:
            freeze_weights(backbone)
        return kind(
            backbone,
            selectors=tuple(selectors.values()),
            augment=recipe.augment,
            normalize=recipe.normalize,
            seed=setting.seed,
            fabric=setting.fabric,
            **settings,
        )

    return _loadable(kind, make)


def _loadable(kind: type[Loadable], make: Callable[[Setting], Loadable]) -> Contestant:
    """Return a contestant whose files are read by a new method with the same settings."""

    def load_from(setting: Setting, path: Path) -> Loadable:
        method = make(setting)
        method.load(path)
        return method

    return Contestant(make, load_from, first_sentence(kind))


def _learner_settings(setting: Setting) -> dict[str, Any]:
    backbone = setting.recipe.backbone
    return {
        **setting.recipe.learner_settings(),
        "seed": setting.seed,
        "fabric": setting.fabric,
        "architecture": backbone if isinstance(backbone, Architecture) else None,
    }


def make_learner(setting: Setting) -> Learner:
    """Return a learner with the settings of the recipe."""
    return Learner(setting.make_backbone(), **_learner_settings(setting))


def load_learner(setting: Setting, path: Path) -> Learner:
    """Return the learner that a model file holds."""
    return load(path, setting.make_backbone(), **_learner_settings(setting))


def make_closed_form(setting: Setting) -> ClosedForm:
    """Return the closed form that recipes are compared with: over pretrained features, if the recipe has them."""
    has_weights = setting.recipe.pretrained is not None
    return ClosedForm(
        Pretrained() if has_weights else None,
        backbone=setting.make_backbone() if has_weights else None,
        normalize=setting.recipe.normalize,
        flips=contains_setting(setting.recipe.augment, Flip),
        pooled=True,  # no task is forgotten here
        device=setting.fabric.device,
    )


def _load_closed_form(setting: Setting, path: Path) -> ClosedForm:
    backbone = setting.make_backbone() if setting.recipe.pretrained is not None else None
    return ClosedForm.load(path, backbone=backbone, device=setting.fabric.device)


CLOSED_FORM = "closed-form"  # always among the methods of a comparison
CONTESTANTS: dict[str, Contestant] = {
    "cps": Contestant(make_learner, load_learner, "Continual prune-and-select, with the recipe's settings."),
    CLOSED_FORM: Contestant(make_closed_form, _load_closed_form, first_sentence(ClosedForm)),
    "finetuning": single_head(Finetuning),
    "joint": single_head(Joint),
    "er": single_head(ExperienceReplay),
    "wa": single_head(WeightAligning),
    "icarl": single_head(ICaRL),
    "lwf": single_head(LwF),
    "lwm": single_head(LwM),
    "eeil": single_head(EEIL, phases=("balance",)),
    "bic": single_head(BiC),
    "lucir": single_head(LUCIR),
    "podnet-cnn": single_head(PODNet),
    "podnet-nme": single_head(PODNetNME),
    "afc": single_head(AFC),
    "itaml": single_head(ITAML),
    "il2m": single_head(IL2M),
    "der": single_head(DER),
    "foster": single_head(FOSTER, phases=("first", "compress")),
    "progressivenet": single_head(ProgressiveNet),
    "ewc": single_head(EWC),
    "r-ewc": single_head(REWC),
    "si": single_head(SynapticIntelligence),
    "mas": single_head(MAS),
    "rwalk": single_head(RWalk),
    "spacenet": single_head(SpaceNet),
    "packnet": task_subnetworks(PackNet, phases=("retrain",)),
    "clnp": task_subnetworks(CLNP),
    "piggyback": task_subnetworks(Piggyback, like_train=("mask_train",)),
    "cpg": task_subnetworks(CPG, phases=("retrain",)),
    "supsup": task_subnetworks(SupSup),
    "wsn": task_subnetworks(WSN),
}
