"""The learner: Algorithms 1 and 2 of the paper."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from cps.config import SETTINGS, check_forms
from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import ClassName, Examples
from cps.data.images import as_images
from cps.data.normalize import Normalize
from cps.data.rotations import RotationScheme, Upright
from cps.data.tasks import Task
from cps.network.backbones import Builtin
from cps.network.capacity import Capacity
from cps.network.compact.extraction import Standalone
from cps.network.draft import Draft
from cps.network.input_checks import check_images, some_pixels, take_in
from cps.network.masks import check_pruned
from cps.network.model_file import write_model
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Fingerprint, Subnetwork
from cps.network.transaction import learning
from cps.pruning.nnrelief import NNrelief, Pruner
from cps.runtime.devices import broadcast, make_fabric, on_rank_zero, ready
from cps.runtime.seeding import generator, seeded
from cps.selection.base import ImportanceSignature, MaxOutput, Oracle, Selector, select
from cps.selection.cascade import Cascade
from cps.selection.groups import consecutive_groups
from cps.selection.predict import Prediction, classify
from cps.selection.statistics import check_selectors, check_statistics, observe_last
from cps.selection.stream import Stream
from cps.training.checkpoint import Checkpoint, Position, Saved, identify
from cps.training.progress import Progress
from cps.training.settings import Adam, Steps, Training
from cps.training.trainer import Epoch, Trainer
from cps.unlearning import forget_task, fresh_weights

if TYPE_CHECKING:
    from lightning_fabric import Fabric

HEAD, PRUNE, FIT, OBSERVE, FORGET = range(5)  # what a seed is for


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
        backbone: nn.Module | Builtin,
        *,
        pruner: Pruner | None = None,
        rounds: int = 3,
        train: Training | None = None,
        retrain: Training | None = None,
        selectors: Sequence[Selector] = (Cascade(), MaxOutput(), ImportanceSignature()),
        augment: Augmentation | None = None,
        rotations: RotationScheme | None = None,
        normalize: Normalize | None = None,
        prune_images: int = 1000,
        capacity: Capacity | None = None,
        seed: int = 0,
        fabric: "Fabric | None" = None,
        workers: int = 0,
        watch: Callable[[Progress], None] | None = None,
    ):
        """Wrap a copy of a backbone (images -> features), or a builtin one, which the model file then names.

        `pruner` and `rounds`: how often, after dense training as `train` says, connections are pruned and
        the rest retrained as `retrain` says; 0 rounds is CP&S-frozen. `selectors`: those to keep numbers
        for; the first one predicts. `views`: whether classes are learned in their four turns. `capacity`: how tasks
        share the room there is. `fabric`: where training runs; by default one device, the best there is. `workers`:
        processes that read a torch `Dataset`. `watch` is called after every epoch.
        """
        check_forms(pruner=pruner, rounds=rounds, train=train, retrain=retrain, augment=augment, rotations=rotations)
        check_forms(normalize=normalize, prune_images=prune_images, capacity=capacity, seed=seed, watch=watch)
        self.pruner: Pruner = pruner or NNrelief()
        self.rounds = int(rounds)
        self.train = train or Training(70, Adam(), Steps((20, 40, 60), 0.2))
        self.retrain = retrain or Training(50, Adam(), Steps((15, 25, 40), 0.2))
        self.selectors = check_selectors(selectors)
        self.rotations: RotationScheme = rotations or Upright()
        self.augment, self.normalize = augment, normalize
        self.prune_images = int(prune_images)
        self.capacity = capacity or Capacity()
        self.seed = int(seed)
        self.fabric = ready(fabric or make_fabric())
        self._trainer = Trainer(self.fabric)
        self.workers, self.watch = workers, watch
        self.builtin = backbone if isinstance(backbone, Builtin) else None
        module = backbone.drawn(self.seed) if isinstance(backbone, Builtin) else backbone
        self.network = SharedNetwork(module, normalize=normalize)
        self.network.to(self.fabric.device)

    @property
    def classes(self) -> list[tuple[ClassName, ...]]:
        """The classes of each task, in the order of learning."""
        return [subnetwork.classes for subnetwork in self.network.subnetworks]

    def __repr__(self) -> str:
        return f"Learner(tasks={len(self.classes)}, classes={sum(map(len, self.classes))})"

    def learn(self, task: Task, *, checkpoint: str | Path | None = None) -> Subnetwork:
        """Learn a task: Algorithm 1. If anything goes wrong, the learner is as it was before.

        With a `checkpoint`, the state is saved there after each epoch, and a call that finds one goes on
        from it; delete it once the learned model is saved.
        """
        with learning(self.network):
            draft, examples, held_out = self._begin(task)
            saver = None if checkpoint is None else self._saver(task, examples, Path(checkpoint))
            examples = examples.to(self.fabric.device)
            saved = saver and saver.load()
            if saved:
                draft.restore(saved.tensors)
            for phase in range(saved.at.phase if saved else 0, self.rounds + 1):
                self._fit(draft, examples, phase, saver, saved)
                saved = None
                if phase == 0:
                    draft.end_dense_training()
                if phase < self.rounds:
                    self._prune(draft, examples, (phase + 1) / self.rounds)
            subnetwork = self.network.seal(draft)
            with self._seeded(OBSERVE):
                observe_last(self.network, examples, held_out, self.selectors, self.fabric)
            return subnetwork

    def predict(
        self,
        images: Any,
        *,
        task: int | None = None,
        group_size: int = 1,
        selector: Selector | None = None,
        reject: float = 0.0,
    ) -> Prediction:
        """Predict classes: Algorithm 2. Nobody says which task the images are from, unless `task` does.

        With `group_size` above 1, every so many consecutive images are assumed to share a task. With `reject`,
        images that look like none that were learned get the class None, and so does that share of known ones.
        """
        images = as_images(images)
        with self.network.in_use():
            evidence = self.evidence(images)
            chosen = self._chosen(selector, task)
            groups = consecutive_groups(len(images), group_size, self.network.device)
            selected = select(chosen, evidence, self.network.statistics(chosen.name), groups)
            return classify(self.network, evidence, *selected, reject=reject)

    def stream(self, *, selector: Selector | None = None) -> Stream:
        """Return a stream, which predicts images in the order they arrive and remembers what their task may be."""
        return Stream(self.network, self._chosen(selector), self.evidence)

    def evidence(self, images: Any) -> Evidence:
        """Return features and logits of every subnetwork for the images, each computed when asked for."""
        tensor = as_images(images)
        with self.network.in_use():
            check_images(tensor, self.network)
            return self.network.evidence(tensor.split(256))

    def extract(self, task: int) -> Standalone:
        """Return a task's subnetwork as a small module of its own: images, as floats from 0 to 1, -> logits."""
        return self.network.extract(task)

    def forget(self, task: int, *, fresh: nn.Module | None = None) -> None:
        """Drop a task; later ones move down by one. Free weights get the values of `fresh`, or others drawn anew."""
        with self.network.in_use():
            self.network.check_task(task)
            drawn = fresh_weights(self.network, self.builtin if fresh is None else fresh, *self._key(FORGET))
            forget_task(self.network, task, drawn, self.selectors)
            self._trainer.forget()  # what was trained last

    def fingerprint(self, task: int) -> Fingerprint:
        """Return the digests of a sealed subnetwork and of its outputs; nothing learned later changes them."""
        return self.network.fingerprint(task)

    def save(self, path: str | Path) -> None:
        """Write the model file; an old file stays whole until the new one is complete on the disk."""
        with self.network.in_use():
            on_rank_zero(self.fabric, lambda: write_model(path, self.network, self._settings()))

    def _key(self, purpose: int) -> tuple[int, ...]:
        return self.seed, len(self.network.subnetworks), purpose

    def _seeded(self, purpose: int) -> AbstractContextManager[None]:
        """Read examples with a seed of their own, since a data set may augment by torch's generator."""
        return seeded(self.fabric.device, *self._key(purpose))

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS} | {"backbone": self.builtin}

    def _chosen(self, selector: Selector | None, task: int | None = None) -> Selector:
        """Return the selector that was asked for, or the first; or the oracle, where the task is known."""
        if task is None:
            return check_selectors([selector or self.selectors[0]])[0]
        if selector is not None:
            raise ValueError("give the task, or a selector that finds it, not both")
        self.network.check_task(task)
        return Oracle(int(task))

    def _begin(self, task: Task) -> tuple[Draft, Examples, Examples | None]:
        """Look at a task and start its subnetwork; return that, the examples to train on and those held out."""
        check_statistics(self.selectors, self.network)
        with self._seeded(HEAD):
            examples, held_out, features = take_in(task, self.network, self.rotations, self.workers)
        crowded = self.capacity.crowded if self.rounds else 0.0  # CP&S-frozen uses all that is sealed
        head = generator(*self._key(HEAD))
        return self.network.grow(task.classes, features, head, self.rotations, crowded), examples, held_out

    def _saver(self, task: Task, examples: Examples, path: Path) -> Checkpoint:
        return Checkpoint(path, identify(self.network, task, examples, self._settings(), self.fabric))

    def _fit(self, draft: Draft, examples: Examples, phase: int, saver: Checkpoint | None, saved: Saved | None) -> None:
        """Train what may move of a draft; after each epoch save it and tell whoever watches."""
        index, training = len(self.network.subnetworks), self.train if phase == 0 else self.retrain
        lengths = (self.train.epochs, *[self.retrain.epochs] * self.rounds)

        def after_epoch(epoch: Epoch) -> None:
            if saver is not None and self.fabric.is_global_zero:
                saver.save(draft.state, epoch.optimizer_state, Position(phase, epoch.done))
            if self.watch is not None:
                self.watch(Progress(index, phase, epoch.done, lengths, epoch.loss))

        self._trainer.fit(
            draft.model,
            examples,
            training,
            seed=(self.seed, index, FIT, phase),
            show=BatchTransform(self.network.prepare, self.augment, self.rotations),
            guard=draft.guard(),
            reach=draft.reach,
            after_epoch=after_epoch,
            start=saved.at.epoch if saved else 0,
            optimizer_state=saved.optimizer if saved else None,
            epochs_in_all=sum(lengths),
        )

    def _prune(self, draft: Draft, examples: Examples, progress: float) -> None:
        """Switch off connections that carry little, and those beyond the budget of this share of the rounds."""
        draws, size, num_rotations = generator(*self._key(PRUNE)), self.train.batch_size, self.rotations.num_rotations
        with self._seeded(PRUNE):  # the same images in every round
            batches = some_pixels(
                examples, self.prune_images, draws, self.network, batch_size=size, num_rotations=num_rotations
            )
        masks = check_pruned(self.pruner(draft.model.backbone, draft.masks, batches), draft.masks)
        masks = self.capacity.within(masks, self.network.taken, draft.weights(), len(draft.classes), progress)
        draft.narrow(broadcast(masks, self.fabric))
