"""The frame of methods with one shared network, in which every task has a subnetwork that never changes again.

A method says how it trains a draft and which of its weights the task keeps. Checks, checkpoints, sealing, statistics of
selectors, files, predictions and the accounts of bytes and image passes are the same for all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.closed_form.spaces import Space
from cps.config import check_callback
from cps.data.examples import Examples, as_examples, iterate_batches
from cps.data.images import as_images
from cps.data.rotations import Upright
from cps.data.tasks import Task
from cps.method import Assumptions
from cps.methods.blocks.held_out import hold_out
from cps.methods.blocks.scores import MaskRule, ScoredWeights
from cps.methods.blocks.subnetwork_objective import SubnetworkObjective
from cps.methods.blocks.task_checks import check_classes
from cps.methods.task_training import PhaseProgress, TaskTraining, with_prefix
from cps.methods.trained_method import BATCH, HEAD, HELD_OUT, KIND, OBSERVE, TrainedMethod
from cps.network.draft import Draft
from cps.network.freezing import Guard, Protected
from cps.network.input_checks import check_images, prepare_task
from cps.network.masks import Masks, find_changed, single_weights
from cps.network.model_file import bytes_by_kind, check_header, fill_network, model_tensors, network_header
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Fingerprint, Statistics, Subnetwork, local_labels
from cps.runtime.devices import on_rank_zero
from cps.runtime.seeding import generator, seeded
from cps.selection.base import Selector
from cps.selection.max_output import MaxOutput
from cps.selection.statistics import check_selectors, collect_statistics
from cps.storage import container
from cps.storage.container import FileError
from cps.training.objective import Objective, Trained
from cps.training.settings import MakeOptimizer, Training


@dataclass(eq=False)
class TaskSubnetworks(TrainedMethod):
    """A shared network with a subnetwork for each task: its masks over single weights, its norm layers and its head.

    The settings are those of `TrainedMethod`. Statistics are kept for all `selectors`; the first one predicts. With
    `shared_norms`, tasks after the first use its norm layers and biases, which stay as they are.

    A method overrides `train_task`, which trains the draft of a task by `fit` and prunes it to what the task keeps.
    `buffers` holds what else it keeps between tasks, tensors by name.
    """

    _: KW_ONLY
    selectors: Sequence[Selector] = (MaxOutput(),)
    shared_norms: bool = False

    assumes = Assumptions(task_given=True)
    is_sealed = True
    copies_while_learning = 1  # of the weights: the draft

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selectors = check_selectors(self.selectors)
        self.network = SharedNetwork(self.new_backbone(), normalize=self.normalize, shape=single_weights)
        self.network.to(self.device)
        self.buffers: dict[str, Tensor] = {}
        self._draft: Draft | None = None

    def new_backbone(self) -> nn.Module:
        """Return the backbone that the network copies."""
        return self.backbone

    @property
    def draft(self) -> Draft:
        """The subnetwork of the task that is being learned."""
        assert self._draft is not None, "no task is being learned"
        return self._draft

    @property
    def selector(self) -> Selector:
        """The selector that predicts: the first of the settings."""
        return self.selectors[0]

    @property
    def group_selector(self) -> Selector:
        """The selector for groups of images: the same."""
        return self.selector

    def learn(
        self,
        task: Task,
        *,
        checkpoint: str | Path | None = None,
        on_epoch: Callable[[PhaseProgress], None] | None = None,
    ) -> Subnetwork:
        """Learn the classes of a task. If anything fails, the method is as it was before.

        With `checkpoint`, the state is saved to that file after each epoch, and a call that finds the file resumes from
        it. `on_epoch` replaces that of the method for this task.
        """
        check_callback("on_epoch", on_epoch)
        with self._learning():
            examples, held_out = self._begin(task)
            new = len(task.classes)
            training = TaskTraining(self, examples, new, on_epoch or self.on_epoch, checkpoint, held_out)
            self.train_task(training)

            def collect(sealed: Subnetwork) -> dict[str, Statistics]:
                network, fabric = self.network, self.device_fabric
                return collect_statistics(network, sealed, examples, held_out, self.selectors, fabric)

            with seeded(self.device, self.seed, training.index, OBSERVE):
                return self.network.seal(self.draft, collect)

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Undo everything if the block raises or has changed a sealed weight."""
        classes, passes, buffers = list(self.classes), self.image_passes, dict(self.buffers)
        try:
            with torch.inference_mode(False), torch.enable_grad(), self.network.transaction() as before:
                yield
                changed = find_changed(before.weights, self.network.weights, before.taken)
                if changed is not None:
                    raise RuntimeError(f"sealed weights of '{changed}' would have changed; nothing was learned")
        except BaseException:
            self.classes, self.trainer.image_passes, self.buffers = classes, passes, buffers
            raise
        finally:
            self._draft = None

    def _begin(self, task: Task) -> tuple[Examples, Examples | None]:
        """Check a task and open its draft; return its training examples, and those held out."""
        classes = check_classes(task, self.classes)
        if len(classes) < 2:
            raise ValueError(
                f"{self.name} trains a head for each task, which needs two classes or more, got {list(classes)}; learn "
                "it together with another class"
            )
        with seeded(self.device, self.seed, len(self.classes), HEAD):
            examples, held_out, features = prepare_task(task, self.network, Upright(), self.workers)
        draws = generator(self.seed, len(self.classes), HEAD)
        self._draft = self.network.open_draft(classes, features, draws, Upright())
        if self.has_frozen_norms:
            self._draft.set_private(self.network.subnetworks[0].private)
        self.classes.append(classes)
        if held_out is not None:  # with labels, which not everything that holds images out needs
            held_out = as_examples(task.val, partial(local_labels, classes), workers=self.workers)
        return examples, held_out

    def train_task(self, task: TaskTraining) -> None:
        """Train the draft, and prune it to what the task keeps: by default, all weights that are on."""
        self.fit(task, self.train)

    def fit(
        self,
        task: TaskTraining,
        training: Training,
        *,
        objective: Objective | None = None,
        examples: Examples | None = None,
        phase: str = "training",
        share: float = 1.0,
    ) -> bool:
        """Train the draft for a phase; what is sealed or pruned stays as it is. By default, on all images.

        Return what `TaskTraining.fit` does.
        """
        model = objective or self.objective()
        guard = self.guard()
        if isinstance(model, Objective):
            guard = {f"backbone.{name}": kept for name, kept in guard.items()}
        return task.fit(model, examples or task.examples, training, phase=phase, share=share, guard=guard)

    def hold_out(self, task: TaskTraining, share: float) -> tuple[Examples, Examples]:
        """Return the images to train on and those to choose by: `task.val`, or else a share of those of each class."""
        if task.held_out is not None:
            return task.examples, task.held_out
        return hold_out(task.examples, share, task.generator(HELD_OUT))

    @torch.no_grad()
    def accuracy(self, examples: Examples, tensors: Mapping[str, Tensor] | None = None) -> float:
        """Return the share of examples whose class the draft finds, with some other tensors in it if given."""
        model, right = self.draft.model.eval(), 0
        for images, labels in iterate_batches(examples):
            found = functional_call(model, dict(tensors or {}), (self.prepare(images.to(self.device)),)).argmax(dim=1)
            right += int((found == labels.to(self.device)).sum())
        return right / len(examples)

    def objective(self) -> Trained:
        """Return what training minimises, unless a phase says otherwise: the loss of the training settings."""
        return SubnetworkObjective(self.draft.model, freezes_norms=True) if self.has_frozen_norms else self.draft.model

    def scored(
        self,
        scores: Mapping[str, Tensor],
        rule: MaskRule,
        optimizer: MakeOptimizer,
        choosable: Masks | None = None,
    ) -> ScoredWeights:
        """Return the objective that trains scores with the draft."""
        return ScoredWeights(
            self.draft.model, scores, rule, optimizer, choosable=choosable, freezes_norms=self.has_frozen_norms
        ).to(self.device)

    def guard(self) -> Guard:
        """Return what training must not move: sealed and pruned weights, and shared norm layers and biases."""
        guard = dict(self.draft.guard())
        if self.has_frozen_norms:
            for name, value in self.draft.model.backbone.named_parameters():
                if name not in guard:
                    mask = torch.ones_like(value, dtype=torch.bool)
                    guard[name] = Protected(mask, value.detach().clone(), ~mask)
        return guard

    @property
    def has_frozen_norms(self) -> bool:
        """Whether the task that is being learned uses the norm layers and biases of the first."""
        return self.shared_norms and bool(self.network.subnetworks)

    def evidence(self, images: Any) -> Evidence:
        """Return features and logits of every task's subnetwork for the images, computed on demand."""
        pixels = as_images(images)
        with self.network.in_use():
            check_images(pixels, self.network)
            batches = pixels.split(BATCH)
            return self.network.evidence(batches, cache(partial(self.features, batches)))

    def features(self, batches: Sequence[Tensor], space: Space | None) -> Tensor:
        """Return features (N, d) of batches of images that no task owns."""
        return self.network.features(batches, space)

    def statistics(self, selector: str) -> list[Statistics]:
        """Return what a selector of this name has kept about each task."""
        return self.network.statistics(selector)

    def fingerprint(self, task: int) -> Fingerprint:
        """Return the digests of a sealed subnetwork and of its outputs; nothing learned later changes them."""
        return self.network.fingerprint(task)

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept between tasks, or while a task is learned, by what they are.

        Statistics are those of the selector that predicts; those of others serve comparisons.
        """
        sizes = bytes_by_kind(self.network)
        statistics = (value.nbytes for kept in self.statistics(self.selector.name) for value in kept.values())
        sizes["statistics"] = sum(statistics)
        if self.shared_norms:  # each task has a copy of those of the first
            copies = (value.nbytes for each in self.network.subnetworks[1:] for value in each.private.values())
            sizes["weights"] -= sum(copies)
        if self.buffers:
            sizes["scores"] = sum(value.nbytes for value in self.buffers.values())
        if learning:
            weights = sum(weight.nbytes for weight in self.network.weights.values())
            sizes["draft"] = weights * self.copies_while_learning
        return sizes

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that learning a task changes before it is sealed, by name."""
        draft = {} if self._draft is None else {f"draft/{name}": value for name, value in self._draft.state().items()}
        return draft | {f"buffer/{name}": value for name, value in self.buffers.items()}

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned, in a task that is resumed."""
        self.draft.restore(with_prefix("draft/", tensors))
        buffers = with_prefix("buffer/", tensors)
        self.buffers = {name: value.to(self.device).clone() for name, value in buffers.items()}

    def digest(self) -> str:
        """Return a digest of everything learned so far."""
        sealed = {f"network/{name}": value for name, value in model_tensors(self.network)[0].items()}
        return container.digest({**self.tensors(), **sealed})

    def save(self, path: str | Path) -> None:
        """Write everything learned to a file. A previous file stays intact until the new one is complete on disk."""
        with self.network.in_use():
            self.network.check_sealed()
            tensors, is_unchanged = model_tensors(self.network)
            header = {**network_header(self.network, is_unchanged), **self.describe()}
            header["image_passes"] = self.image_passes
            on_rank_zero(self.device_fabric, lambda: container.write(path, KIND, header, {**tensors, **self.tensors()}))

    def load(self, path: str | Path) -> None:
        """Continue from a file that `save` wrote; raise `ValueError` if its method has other settings."""
        header, tensors = self.read_file(path)
        check_header(path, header)
        buffers = with_prefix("buffer/", tensors)
        try:
            passes = int(header["image_passes"])
            own = {name: value for name, value in tensors.items() if not name.startswith("buffer/")}
            fill_network(self.network, path, header, own)
        except (KeyError, TypeError) as error:
            raise FileError(f"'{path}' does not fit this method: {error}") from error
        self.network.to(self.device)
        self.buffers = {name: value.to(self.device) for name, value in buffers.items()}
        self.classes, self.trainer.image_passes = list(self.network.classes), passes
