"""The learner: Algorithms 1 and 2 of the paper."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cps.closed_form.calibration import calibrated_lda
from cps.closed_form.spaces import Pretrained
from cps.config import (
    CAPACITY,
    PRUNER,
    RETRAIN,
    ROTATIONS,
    SELECTORS,
    TRAIN,
    LearnerConfig,
    check_callback,
)
from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import ClassName, CountedExamples, Examples, read_labels
from cps.data.images import as_images
from cps.data.normalize import Normalize
from cps.data.rotations import RotationScheme
from cps.data.tasks import Task
from cps.method import Assumptions
from cps.network.architectures import Architecture
from cps.network.capacity import Capacity
from cps.network.compact.extraction import Standalone
from cps.network.draft import Draft
from cps.network.input_checks import check_images, prepare_known, prepare_task
from cps.network.masks import check_pruned, find_changed
from cps.network.model_file import bytes_by_kind, write_model
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Fingerprint, Statistics, Subnetwork
from cps.pruning.base import Pruner
from cps.pruning.calibration import calibration_batches
from cps.runtime.devices import broadcast, launch, make_fabric, on_rank_zero, required_precision
from cps.runtime.seeding import generator, seeded
from cps.selection.all_tasks import AllTasksModule, ClassScores
from cps.selection.base import Oracle, Selector
from cps.selection.gather import gather_evidence
from cps.selection.groups import consecutive_groups
from cps.selection.known_classes import add_images, check_growing, forget_class, known_tasks, rename_class
from cps.selection.predict import predict
from cps.selection.prediction import Prediction
from cps.selection.statistics import check_selectors, check_statistics, collect_statistics
from cps.selection.stream import Stream
from cps.storage.settings_codec import contains_setting
from cps.training.cached_maps import CachedMaps, cache_maps
from cps.training.checkpoint import Checkpoint, Position, Saved, identify
from cps.training.joined_head import fit_head
from cps.training.progress import Progress
from cps.training.settings import Training
from cps.training.trainer import Epoch, Trainer
from cps.unlearning import forget_task, fresh_weights

if TYPE_CHECKING:
    from lightning_fabric import Fabric

log = logging.getLogger(__name__)

HEAD, PRUNE, FIT, OBSERVE, FORGET, MAPS = range(6)  # what a seed is used for
BATCH = 256  # images per forward pass


class Learner:
    """One network that learns task after task, never forgets, and predicts without being told the task.

    >>> import torch, cps
    >>> backbone = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU())
    >>> learner = cps.Learner(backbone, rounds=1, train=cps.Training(3), retrain=cps.Training(2))
    >>> images = torch.randn(40, 8)
    >>> _ = learner.learn(cps.Task(["cat", "dog"], train=(images, ["cat", "dog"] * 20)))
    >>> _ = learner.learn(cps.Task([7, 9], train=(images + 5, [7, 9] * 20)))
    >>> len(learner.predict(images).classes)
    40
    """

    def __init__(
        self,
        backbone: nn.Module | Architecture,
        *,
        pruner: Pruner = PRUNER,
        rounds: int = 3,
        train: Training = TRAIN,
        retrain: Training = RETRAIN,
        selectors: Sequence[Selector] = SELECTORS,
        augment: Augmentation | None = None,
        rotations: RotationScheme = ROTATIONS,
        normalize: Normalize | None = None,
        prune_images: int = 1000,
        trunk: str | None = None,
        map_copies: int = 8,
        capacity: Capacity = CAPACITY,
        seed: int = 0,
        fabric: "Fabric | None" = None,
        workers: int = 0,
        on_epoch: Callable[[Progress], None] | None = None,
        architecture: Architecture | None = None,
    ):
        """Wrap a copy of a backbone (images -> features), or a builtin one, which the model file then names.

        After dense training (`train`), the pruner runs `rounds` times, each time followed by retraining (`retrain`); 0
        rounds is CP&S-frozen. Statistics are kept for all `selectors`; the first one predicts. `rotations` decides
        whether classes are also learned in rotated form, `capacity` how tasks share the weights. `prune_images` is the
        number of images the pruner sees. `trunk` names the layer of a pretrained backbone behind which subnetworks
        begin (see `cps.suggest_trunk`). The layers up to it never change, and what they compute for an image and
        `map_copies - 1` augmented copies of it is kept while the task is learned. `fabric` says where training runs
        (default: the best single device), `workers` how many processes read a data set. `on_epoch` is called
        after every epoch. `architecture` names the builtin architecture of a module that you built yourself, so that
        the model file opens without it.
        """
        self.config = LearnerConfig(
            pruner=pruner,
            rounds=rounds,
            train=train,
            retrain=retrain,
            selectors=selectors,
            augment=augment,
            rotations=rotations,
            normalize=normalize,
            prune_images=prune_images,
            trunk=trunk,
            map_copies=map_copies,
            capacity=capacity,
            seed=seed,
        )
        check_callback("on_epoch", on_epoch)
        self.workers, self.on_epoch = workers, on_epoch
        self.architecture = backbone if isinstance(backbone, Architecture) else architecture
        module = backbone.make(self.config.seed) if isinstance(backbone, Architecture) else backbone
        self.network = SharedNetwork(module, normalize=normalize, trunk=trunk)
        self.fabric = launch(fabric or make_fabric(precision=required_precision(self.network.backbone)))
        self._keep_pretrained_if_used()
        self.network.to(self.fabric.device)
        self._trainer = Trainer(self.fabric)

    name = "cps"
    assumes = Assumptions()
    is_sealed = True

    @property
    def classes(self) -> list[tuple[ClassName, ...]]:
        """The classes of each task, in the order of learning."""
        return self.network.classes

    def __repr__(self) -> str:
        return f"Learner(tasks={len(self.classes)}, classes={sum(map(len, self.classes))})"

    @property
    def selector(self) -> Selector:
        """The selector that predicts: the first of the settings."""
        return self.config.selectors[0]

    @property
    def group_selector(self) -> Selector:
        """The selector for groups of images: the same."""
        return self.selector

    @property
    def image_passes(self) -> int:
        """The number of images in all training steps of this object so far."""
        return self._trainer.image_passes

    def statistics(self, selector: str) -> list[Statistics]:
        """Return what a selector of this name has kept about each task."""
        return self.network.statistics(selector)

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept between tasks, or while a task is learned, by what they are."""
        sizes = bytes_by_kind(self.network)
        if learning:  # the weights of the draft, and those that it returns pruned ones to
            sizes["draft"] = 2 * sum(weight.nbytes for weight in self.network.weights.values())
        return sizes

    def configure(self, **settings: Any) -> None:
        """Change settings for the tasks to come, such as `train` or `pruner`; sealed tasks are not affected."""
        for name in ("normalize", "trunk"):
            if name in settings and settings[name] != getattr(self.config, name):
                raise ValueError(f"{name} cannot change: sealed subnetworks were trained with the first one")
        self.config = replace(self.config, **settings)
        self._keep_pretrained_if_used()

    def learn(
        self,
        task: Task,
        *,
        checkpoint: str | Path | None = None,
        rotations: RotationScheme | None = None,
        on_epoch: Callable[[Progress], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        new_versions: bool = False,
    ) -> Subnetwork:
        """Learn a task: Algorithm 1. If anything fails, the learner is as it was before.

        With `checkpoint`, the state is saved to that file after each epoch, and a call that finds the file resumes from
        it; delete the file once the learned model is saved. `rotations` and `on_epoch` replace the learner's for this
        task. `on_progress` is called with the number of maps that the trunk has computed, and the total. Known classes
        are refused unless `new_versions`: then the task learns a version of its own of each.

        Behind a trunk, held-out images (`task.val`) decide whether training has paid; if not, the task is learned as by
        `learn_frozen`.
        """
        check_callback("on_epoch", on_epoch)
        check_callback("on_progress", on_progress)
        config = self.config if rotations is None else replace(self.config, rotations=rotations)
        with self._learning():
            draft, examples, held_out = self._start(task, config, new_versions=new_versions)
            saver = None if checkpoint is None else self._saver(task, examples, config, Path(checkpoint))
            saved = saver and saver.load()
            if saved:
                draft.restore(saved.tensors)
            examples = examples.to(self.fabric.device)
            transform = BatchTransform(self.network.prepare, config.augment, config.rotations)
            trained = examples, transform
            if self.network.trunk is not None:
                maps = self._cached_maps(examples, config, on_progress)
                examples, trained = maps.plain, (maps.examples, maps.transform)
            first = saved.position.phase if saved else 0
            for training in (config.train, *[config.retrain] * config.rounds)[:first]:
                self._trainer.count_finished(trained[0], training)
            for phase in range(first, config.rounds + 1):
                self._train(draft, *trained, config, phase, saver, saved, on_epoch or self.on_epoch)
                saved = None
                if phase == 0:
                    draft.end_dense_training()
                if phase < config.rounds:
                    draft.prune(self._pruned_masks(draft, examples, config, phase))
            head = None if self.network.trunk is None else fit_head(self.network, draft, examples, held_out)

            def collect(sealed: Subnetwork) -> dict[str, Statistics]:
                return collect_statistics(self.network, sealed, examples, held_out, config.selectors, self.fabric)

            with self._seeded(OBSERVE):
                if head is not None and not head.has_paid:
                    log.info("training has not paid on held-out images; the task keeps the closed form")
                    return self.network.seal_frozen(task.classes, head.scores, collect)
                return self.network.seal(draft, collect, scores=head and head.scores)

    def learn_frozen(self, task: Task, *, on_progress: Callable[[int, int], None] | None = None) -> Subnetwork:
        """Learn a task without training: the backbone as it came, with a head in closed form. One pass over the images.

        All such tasks share one pass of the backbone in predictions. They take no shared weights, and tasks can be
        learned in both ways in turn, but the first one decides whether the weights that the backbone came with are
        kept: it must be learned this way, or a selector must use the space `Pretrained`. `on_progress` is called with
        the number of images done and the total.
        """
        check_callback("on_progress", on_progress)
        with self._learning():
            if self.network.input_shape is None and self.network.pretrained is None:
                self.network.keep_pretrained()
            check_statistics(self.config.selectors, self.network)
            with self._seeded(HEAD):
                examples, held_out, _ = prepare_task(task, self.network, ROTATIONS, self.workers, is_frozen=True)
            examples = examples.to(self.fabric.device)
            if on_progress is not None:
                examples = CountedExamples(examples, on_progress)
            features = gather_evidence(self.network, examples, self.fabric).features
            scores = calibrated_lda(features(Pretrained()), read_labels(examples), len(task.classes))
            return self.network.seal_frozen(
                task.classes,
                scores,
                lambda sealed: collect_statistics(
                    self.network, sealed, examples, held_out, self.config.selectors, self.fabric, features
                ),
            )

    def add(self, task: Task, *, on_progress: Callable[[int, int], None] | None = None) -> list[int]:
        """Add images of known classes (`task.train`) to the sums of selectors such as `Fusion`; return their tasks.

        The sums are then as if these images had been there when their classes were learned. Sealed subnetworks and
        their fingerprints do not change. Images of a class with several versions are added to the latest one.
        """
        check_callback("on_progress", on_progress)
        check_growing(self.config.selectors)
        with self._learning():
            with self._seeded(HEAD):
                examples: Examples = prepare_known(task, self.network, self.workers).to(self.fabric.device)
            if on_progress is not None:
                examples = CountedExamples(examples, on_progress)
            evidence = gather_evidence(self.network, examples, self.fabric)
            return add_images(self.network, task.classes, evidence, read_labels(examples), self.config.selectors)

    def predict(
        self,
        images: Any,
        *,
        task: int | None = None,
        group_size: int = 1,
        selector: Selector | None = None,
        reject: float = 0.0,
    ) -> Prediction:
        """Predict classes: Algorithm 2. The task of the images is found, unless `task` gives it.

        With `group_size` above 1, every `group_size` consecutive images are assumed to share a task. With `reject`,
        images that resemble nothing the selected task has learned get the class None, and so does that share of known
        images.
        """
        pixels = as_images(images)
        with self.network.in_use():
            evidence, selector = self._evidence(pixels), self._selector(selector, task)
            groups = consecutive_groups(len(pixels), group_size, self.network.device)
            return predict(self.network, evidence, selector, groups, reject=reject)

    def stream(self, *, selector: Selector | None = None) -> Stream:
        """Return a stream, which predicts images in order of arrival and remembers which task they probably are of."""
        return Stream(self.network, self._selector(selector), self.evidence)

    def evidence(self, images: Any) -> Evidence:
        """Return features and logits of every subnetwork for the images, computed on demand."""
        return self._evidence(as_images(images))

    def extract(self, task: int) -> Standalone:
        """Return a task's subnetwork as a small module: images, as floats from 0 to 1, -> logits."""
        return self.network.extract(task)

    def module(self, *, selector: Selector | None = None) -> ClassScores:
        """Return all subnetworks and a selector (default: the first) as a module: images -> scores of all classes.

        It holds copies, so it does not change when the learner does. Images are floats from 0 to 1, or bytes.
        """
        with self.network.in_use():
            return ClassScores(AllTasksModule(self.network, self._selector(selector)))

    def forget(self, task: int, *, fresh: nn.Module | None = None) -> None:
        """Unlearn a task; later tasks move down by one. Free weights get the values of `fresh`, or new random ones."""
        with self.network.in_use():
            self.network.check_task(task)
            weights = fresh_weights(self.network, self.architecture if fresh is None else fresh, *self._key(FORGET))
            forget_task(self.network, task, weights, self.config.selectors)
            self._trainer.release()  # it may hold what was trained last

    def forget_class(self, name: ClassName, *, fresh: nn.Module | None = None) -> None:
        """Unlearn a class: cut its outputs and take it out of sums, exactly. A task whose last class goes is forgotten.

        Weights that training gave to the other classes of its task stay as they are.
        """
        with self.network.in_use():
            for task in reversed(known_tasks(self.network, name)):
                if len(self.network.subnetworks[task].classes) == 1:
                    self.forget(task, fresh=fresh)
                else:
                    forget_class(self.network, task, name, self.config.selectors)

    def rename(self, old: ClassName, new: ClassName) -> None:
        """Give a class a new name, in all its versions. Fingerprints contain the names, so those of its tasks change.

        Raise `ValueError` if the old name is not known or the new one is.
        """
        with self.network.in_use():
            rename_class(self.network, old, new)

    def annotate(self, task: int, **notes: Any) -> Subnetwork:
        """Add notes about a task, such as the date: plain JSON data that the model file keeps."""
        with self.network.in_use():
            return self.network.annotate(task, notes)

    def fingerprint(self, task: int) -> Fingerprint:
        """Return the digests of a sealed subnetwork and of its outputs; nothing learned later changes them."""
        return self.network.fingerprint(task)

    def save(self, path: str | Path) -> None:
        """Write the model file. A previous file stays intact until the new one is complete on disk."""
        with self.network.in_use():
            on_rank_zero(self.fabric, lambda: write_model(path, self.network, self.config.encode(), self.architecture))

    def _keep_pretrained_if_used(self) -> None:
        """Keep the weights as they came if a selector needs them. Once something was learned, they are gone."""
        is_new = self.network.input_shape is None and self.network.pretrained is None
        if is_new and (self.config.trunk is not None or contains_setting(self.config.selectors, Pretrained)):
            self.network.keep_pretrained()

    def _evidence(self, images: Tensor) -> Evidence:
        with self.network.in_use():
            check_images(images, self.network)
            return self.network.evidence(images.split(BATCH))

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Undo everything if the block raises or has changed a sealed weight."""
        with torch.inference_mode(False), torch.enable_grad(), self.network.transaction() as before:
            yield
            changed = find_changed(before.weights, self.network.weights, before.taken)
            if changed is not None:
                raise RuntimeError(f"sealed weights of '{changed}' would have changed; nothing was learned")

    def _start(
        self, task: Task, config: LearnerConfig, *, new_versions: bool
    ) -> tuple[Draft, Examples, Examples | None]:
        """Check a task; return a draft of its subnetwork, its training examples, and those held out."""
        check_statistics(config.selectors, self.network)
        with self._seeded(HEAD):
            examples, held_out, features = prepare_task(
                task, self.network, config.rotations, self.workers, new_versions=new_versions
            )
        min_free = config.capacity.min_free if config.rounds else 0.0  # CP&S-frozen uses all sealed weights
        head = generator(*self._key(HEAD))
        return self.network.new_draft(task.classes, features, head, config.rotations, min_free), examples, held_out

    def _cached_maps(
        self, examples: Examples, config: LearnerConfig, on_progress: Callable[[int, int], None] | None
    ) -> CachedMaps:
        """Return the trunk's outputs for the examples and for augmented copies of them."""
        with self._seeded(MAPS):
            draw = generator(*self._key(MAPS))
            return cache_maps(
                self.network, examples, config.augment, config.map_copies, draw, self.fabric, on_progress=on_progress
            )

    def _train(
        self,
        draft: Draft,
        examples: Examples,
        transform: BatchTransform,
        config: LearnerConfig,
        phase: int,
        saver: Checkpoint | None,
        saved: Saved | None,
        on_epoch: Callable[[Progress], None] | None,
    ) -> None:
        """Train the free weights of a draft: phase 0 is dense training, each later one follows a pruning round."""
        task, training = len(self.network.subnetworks), config.train if phase == 0 else config.retrain
        lengths = (config.train.epochs, *[config.retrain.epochs] * config.rounds)

        def after_epoch(epoch: Epoch) -> None:
            if saver is not None and self.fabric.is_global_zero:
                saver.save(draft.state, epoch.optimizer_state, Position(phase, epoch.done))
            if on_epoch is not None:
                on_epoch(Progress(task, phase, epoch.done, lengths, epoch.loss))

        self._trainer.fit(
            draft.model,
            examples,
            training,
            seed=(config.seed, task, FIT, phase),
            transform=transform,
            guard=draft.guard(),
            score_range=draft.score_range,
            after_epoch=after_epoch,
            start=saved.position.epoch if saved else 0,
            optimizer_state=saved.optimizer if saved else None,
            total_epochs=sum(lengths),
        )

    def _pruned_masks(self, draft: Draft, examples: Examples, config: LearnerConfig, phase: int) -> dict[str, Any]:
        """Return the pruner's masks after training phase `phase`, limited by the budget of this round."""
        with self._seeded(PRUNE):  # the same images in every round
            batches = calibration_batches(
                examples,
                config.prune_images,
                generator(*self._key(PRUNE)),
                self.network,
                batch_size=config.train.batch_size,
                num_rotations=config.rotations.num_rotations,
            )
        masks = check_pruned(config.pruner(draft.model.backbone, draft.masks, batches), draft.masks)
        progress = (phase + 1) / config.rounds
        masks = config.capacity.limit(masks, self.network.taken, draft.weights(), len(draft.classes), progress)
        return broadcast(masks, self.fabric)

    def _saver(self, task: Task, examples: Examples, config: LearnerConfig, path: Path) -> Checkpoint:
        return Checkpoint(path, identify(self.network, task, examples, config.encode(), self.fabric))

    def _selector(self, selector: Selector | None, task: int | None = None) -> Selector:
        """Return the given selector, or the first one; the oracle if the task is given."""
        if task is None:
            return check_selectors([selector or self.config.selectors[0]])[0]
        if selector is not None:
            raise ValueError("pass either task or selector, not both")
        self.network.check_task(task)
        return Oracle(int(task))

    def _key(self, purpose: int) -> tuple[int, ...]:
        return self.config.seed, len(self.network.subnetworks), purpose

    def _seeded(self, purpose: int) -> AbstractContextManager[None]:
        """Seed the global generators, since a data set may augment its images with them."""
        return seeded(self.fabric.device, *self._key(purpose))
