"""The shared network: one backbone, the weights that all tasks share, and the sealed subnetworks in them."""

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.closed_form.classifiers import LinearScores
from cps.closed_form.spaces import Pretrained, Space, default_space, root_normalize
from cps.data.examples import ClassName
from cps.data.normalize import Normalize, Prepare
from cps.data.rotations import RotationScheme, Upright
from cps.network.backbone_checks import accepts_noise
from cps.network.capacity import check_capacity, is_short_of_weights
from cps.network.classifier import RootHead, make_head
from cps.network.compact.cache import CompactCache
from cps.network.compact.extraction import Standalone, copy_with_tensors
from cps.network.draft import Draft
from cps.network.masks import (
    Masks,
    MaskShape,
    count_weights,
    density,
    full_masks,
    mask_shape,
    masks_like,
    union,
    union_of,
)
from cps.network.outputs import Evidence, Outputs, concatenate, finite_outputs, join_tasks, split_by_task
from cps.network.partition import (
    CHANNELS_LAST,
    Parts,
    as_channels_last,
    copy_like,
    make_contiguous,
    move_module,
    move_tensors,
    named_tensors,
    partition,
    put_channels_last,
    set_tensors,
    uncompiled,
)
from cps.network.subnetwork import Fingerprint, Statistics, Subnetwork, check_sealed, stand_in
from cps.network.trunk import Maps, keep_maps, split_backbone
from cps.runtime.devices import cuda_device, deterministic_cudnn, fast_photos, full_precision, without_autocast
from cps.runtime.process_state import CopyableLock
from cps.storage.container import digest

log = logging.getLogger(__name__)

MAX_BATCH = 256  # images per pass of the whole backbone, counting every view
CPU_BATCH_VALUES = 2**22  # numbers of the images of a pass through a space on a CPU: 27 photos
NO_IMAGES = -1e4  # logit of a class without images in a head in closed form


class NetworkState(NamedTuple):
    """Everything of a network that learning or forgetting a task may change."""

    weights: dict[str, Tensor]
    taken: Masks
    subnetworks: list[Subnetwork]
    input_shape: tuple[int, ...] | None
    input_range: tuple[float, float] | None
    initial: dict[str, Tensor]
    parts: Parts
    pretrained: dict[str, Tensor] | None


class SharedNetwork:
    """One backbone whose weights all tasks share, and the sealed subnetworks in it.

    The backbone is copied. `weights` holds the shared values, and `taken` marks the connections of sealed subnetworks,
    which never change again. Weights that the user froze are taken from the start. `initial` holds the private
    parameters that every new task starts from, and `pretrained` the shared weights as they came, or None if they are
    not kept. Only the methods of this class change these attributes.

    With a trunk, named by its last layer, `backbone` is what follows that layer. The trunk never changes, belongs to no
    task and runs once for an image. `shape` gives the shape of the masks over a weight.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        normalize: Normalize | None = None,
        trunk: str | None = None,
        shape: MaskShape = mask_shape,
    ):
        backbone = uncompiled(backbone)
        self.trunk: nn.Module | None = None
        if trunk is not None:
            self.trunk, backbone = split_backbone(backbone, trunk)
            make_contiguous(self.trunk)
        self.parts: Parts = partition(backbone)
        self.backbone = copy.deepcopy(backbone)
        make_contiguous(self.backbone)
        tensors = named_tensors(self.backbone)
        self.weights = {name: tensors[name].detach().clone() for name in self.parts.shared}
        self.initial = {name: tensors[name].detach().clone() for name in self.parts.private}
        self.pretrained: dict[str, Tensor] | None = None
        self.prepare = Prepare(normalize, next(iter(self.weights.values())).dtype)
        self.taken = full_masks(self.weights, on=False, shape=shape)
        for name in self.parts.shared:
            if not tensors[name].requires_grad:
                self.taken[name].fill_(True)
        self.subnetworks: list[Subnetwork] = []
        self.input_shape: tuple[int, ...] | None = None  # of the first images that were learned
        self.input_range: tuple[float, float] | None = None  # their approximate values
        self.accepted_shapes: set[tuple[int, ...]] = set()  # other shapes that the backbone was seen to process
        self._is_changing = False
        self._warned: set[str] = set()
        self._accepts_noise: bool | None = None  # not known yet
        self._lock = CopyableLock()
        self._compact = CompactCache(self.backbone, self.tensors_of, self._two_images, self._fast_photos)
        self._spaces: dict[Space | None, nn.Module] = {}

    @property
    def device(self) -> torch.device:
        """The device that the network is on."""
        return next(iter(self.weights.values())).device

    @property
    def _modules(self) -> list[nn.Module]:
        """The trunk, if there is one, and the backbone."""
        return [self.backbone] if self.trunk is None else [self.trunk, self.backbone]

    def to(self, device: torch.device) -> None:
        """Move everything to a device."""
        self.clear_compact()
        self._spaces.clear()
        is_channels_last = device.type in CHANNELS_LAST
        for module in self._modules:
            move_module(module, device)
            if is_channels_last:
                put_channels_last(module)
        pretrained = self.pretrained or {}
        for tensors in (self.weights, pretrained, self.initial, *(sub.private for sub in self.subnetworks)):
            move_tensors(tensors, device, channels_last=is_channels_last)
        for sub in self.subnetworks:
            for tensors in (sub.masks, sub.head, sub.pretrained_head, *sub.statistics.values()):
                move_tensors(tensors, device)
        move_tensors(self.taken, device)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lock the network: predictions and training put their tensors into the one backbone, so threads take turns.

        The caller's autocast and cuDNN's benchmark mode are off inside.
        """
        with self._lock, without_autocast(self.device), cuda_device(self.device), deterministic_cudnn():
            yield

    def warn_once(self, message: str) -> None:
        """Log a warning once per network."""
        if message not in self._warned:
            log.warning(message)
        self._warned.add(message)

    def mute(self, message: str) -> None:
        """Do not log this warning."""
        self._warned.add(message)

    def clear_compact(self) -> None:
        """Discard the compact subnetworks; they are made again when next needed."""
        self._compact.clear()

    def release_images(self) -> None:
        """Release all memory that may hold pixels of past images."""
        self._compact.release_images()

    @contextmanager
    def transaction(self) -> Iterator[NetworkState]:
        """Yield the present state, and restore it if the block raises. Other threads see the old state or the new."""
        with self.in_use():
            if self._is_changing:
                raise RuntimeError("a task is being learned or forgotten; until it ends, the learner can only predict")
            before = NetworkState(*(getattr(self, name) for name in NetworkState._fields))
            self.weights, self.subnetworks = {**before.weights}, [*before.subnetworks]
            self._is_changing = True
            try:
                yield before
            except BaseException:
                self.set_state(before)
                raise
            finally:
                self._is_changing = False

    def set_state(self, state: NetworkState) -> None:
        """Replace weights, masks and subnetworks, for instance by those of a model file."""
        for name, value in state._asdict().items():
            setattr(self, name, value)
        self._spaces.clear()
        self.clear_compact()

    def make_private(self, names: Collection[str]) -> None:
        """Give every task its own copy of some shared weights; only possible before the first task."""
        self.parts = self.parts.with_private(names)
        self.initial = {**self.initial, **{name: self.weights[name] for name in names}}
        self.weights = {name: value for name, value in self.weights.items() if name not in names}
        self.taken = {name: value for name, value in self.taken.items() if name not in names}
        if self.pretrained is not None:
            self._set_pretrained({name: self.pretrained[name] for name in self.weights})

    def keep_pretrained(self) -> None:
        """Keep the shared weights as they came, for the space `Pretrained`; only possible before the first task."""
        self._set_pretrained({name: value.clone() for name, value in self.weights.items()})

    def _set_pretrained(self, weights: dict[str, Tensor]) -> None:
        self.pretrained = weights
        self._spaces.clear()

    def set_input(self, shape: tuple[int, ...], value_range: tuple[float, float]) -> None:
        """Record the shape and value range of the first images; later calls change nothing."""
        if self.input_shape is None:
            self.input_shape = shape
            self._spaces.clear()
        if not self.subnetworks:
            self.input_range = self.input_range or value_range

    def accept_shape(self, shape: tuple[int, ...]) -> None:
        """Record that the backbone can process images of another shape."""
        self.accepted_shapes.add(shape)

    def new_draft(
        self,
        classes: Sequence[ClassName],
        features: int,
        generator: torch.Generator,
        rotations: RotationScheme | None = None,
        min_free: float = 0.0,
    ) -> Draft:
        """Start the subnetwork of a new task, with every connection on and a new head.

        If layers have less than a share `min_free` of free weights, the draft learns which sealed connections to use.
        """
        trainable = {name for name, value in self.backbone.named_parameters() if value.requires_grad}
        free = {name: share for name, share in self.free_by_layer().items() if name in trainable}
        learns_masks = bool(self.subnetworks) and is_short_of_weights(free, self.weights, min_free)
        if self.subnetworks and trainable:
            has_private = not trainable.isdisjoint(self.parts.private)
            check_capacity(
                free, self.weights, len(self.subnetworks), has_private=has_private, learns_masks=learns_masks
            )
        return self.open_draft(classes, features, generator, rotations or Upright(), learns_masks=learns_masks)

    def open_draft(
        self,
        classes: Sequence[ClassName],
        features: int,
        generator: torch.Generator,
        rotations: RotationScheme,
        *,
        learns_masks: bool = False,
    ) -> Draft:
        """Start the subnetwork of a new task, whether or not there are free weights."""
        kind = nn.Linear if self.trunk is None else RootHead
        return Draft(
            self.backbone,
            make_head(features, len(classes) * rotations.num_rotations, generator, kind).to(self.device),
            self.parts,
            classes=classes,
            flips=rotations.flips,
            weights=self.weights,
            taken=self.taken,
            private=self.initial,
            learns_masks=learns_masks,
        )

    def seal(
        self,
        draft: Draft,
        collect: Callable[[Subnetwork], dict[str, Statistics]] | None = None,
        *,
        scores: LinearScores | None = None,
    ) -> Subnetwork:
        """Make a draft a sealed subnetwork: its weights are taken and never change again.

        `collect` returns the statistics to keep about it. It is called when the new subnetwork can already run, as the
        last one of the network. With `scores` of the `joined_features`, these replace the head of the draft.
        """
        draft.check_finite()
        with torch.no_grad():
            self._take_weights(draft)
        head = {name: value.detach().clone() for name, value in draft.model.head.named_parameters()}
        pretrained_head: dict[str, Tensor] = {}
        if scores is not None:
            own = head["weight"].shape[1]
            head = self._head(scores)
            joined = head.pop("weight")
            head["weight"] = joined[:, :own].contiguous()
            pretrained_head = {"weight": joined[:, own:].contiguous()}
        private = {name: copy_like(self.initial[name], value) for name, value in draft.private().items()}
        sealed = Subnetwork(
            draft.classes, draft.masks, private, head, flips=draft.flips, pretrained_head=pretrained_head
        )
        return self._append(sealed, collect)

    @torch.no_grad()
    def joined_features(self, draft: Draft, batches: Iterable[Tensor | Maps]) -> Tensor:
        """Return the features (N, 2 d) of a draft and, beside them, those of the backbone as it came."""
        module = draft.model.backbone.eval()
        with self.in_use(), full_precision(), self._fast_photos():
            parts = []
            for pixels in map(self.pixels, batches):
                own, pretrained = root_normalize(module(pixels).float()), self.space_module(Pretrained())(pixels)
                parts.append(torch.cat([own, pretrained], dim=1))
            return torch.cat(parts)

    def seal_frozen(
        self,
        classes: Sequence[ClassName],
        scores: LinearScores,
        collect: Callable[[Subnetwork], dict[str, Statistics]] | None = None,
    ) -> Subnetwork:
        """Add a subnetwork that is the backbone as it came, with scores of its features in the space `Pretrained`."""
        head = self._head(scores)
        return self._append(Subnetwork(tuple(classes), self._no_masks(), {}, head, is_frozen=True), collect)

    def _head(self, scores: LinearScores) -> dict[str, Tensor]:
        """Return the weight and the bias of a head that computes these scores."""
        head = {"weight": scores.weights.T, "bias": scores.offsets - scores.centre @ scores.weights}
        head = {name: value.to(self.device, torch.float32).contiguous() for name, value in head.items()}
        head["bias"].clamp_(min=NO_IMAGES)  # a class without images has minus infinity
        return head

    def _append(self, sealed: Subnetwork, collect: Callable[[Subnetwork], dict[str, Statistics]] | None) -> Subnetwork:
        """Add a sealed subnetwork, with its digest and the statistics that `collect` returns."""
        sealed = dataclasses.replace(sealed, digest=self._digest(sealed))
        self.subnetworks.append(sealed)
        if collect is not None:
            self.subnetworks[-1] = dataclasses.replace(sealed, statistics=collect(sealed))
            self.release_images()
        return self.subnetworks[-1]

    def _no_masks(self) -> Masks:
        """Return the masks of frozen subnetworks, which they all share."""
        known = (subnetwork.masks for subnetwork in self.subnetworks if subnetwork.is_frozen)
        return next(known, None) or masks_like(self.taken, on=False)

    def _digest(self, subnetwork: Subnetwork) -> str:
        """Return the digest of everything that belongs to a subnetwork."""
        came = {**self.trunk_tensors(), **self._all_pretrained()} if subnetwork.uses_pretrained else {}
        return subnetwork.digest_in(self.weights, stand_in(came))

    def trunk_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the trunk; none without one."""
        return {} if self.trunk is None else named_tensors(self.trunk)

    def _all_pretrained(self) -> dict[str, Tensor]:
        """Return all tensors of the backbone as it came, without the trunk."""
        if self.pretrained is None:
            raise ValueError(
                "the weights that the backbone came with were not kept; a selector with the space Pretrained must be "
                "among the learner's selectors, or the first task learned by learn_frozen"
            )
        return {**self.initial, **self.pretrained}

    def _take_weights(self, draft: Draft) -> None:
        """Write the draft's own weights into the shared ones; free weights get the values of dense training."""
        live = draft.weights()
        dense = live if draft.dense_weights is None else draft.dense_weights
        for name, weight in self.weights.items():
            own = draft.masks[name] & ~self.taken[name]
            free = torch.where(self.taken[name], weight, dense[name])
            self.weights[name] = copy_like(weight, torch.where(own, live[name], free))
        self.taken = union(self.taken, draft.masks)

    def annotate(self, task: int, notes: Mapping[str, Any]) -> Subnetwork:
        """Add notes to a subnetwork: plain JSON data that the model file keeps; return the subnetwork with them."""
        self.check_task(task)
        subnetwork = self.subnetworks[task]
        self.subnetworks[task] = dataclasses.replace(subnetwork, notes={**subnetwork.notes, **notes})
        return self.subnetworks[task]

    def set_statistics(self, task: int, statistics: dict[str, Statistics]) -> None:
        """Replace the statistics of a task."""
        self.subnetworks[task] = dataclasses.replace(self.subnetworks[task], statistics=statistics)

    def rename_class(self, task: int, old: ClassName, new: ClassName) -> None:
        """Give a class of a task another name. The digest of the subnetwork, which names its classes, changes."""
        classes = self.subnetworks[task].classes
        self._reseal(task, classes=tuple(new if name == old else name for name in classes))

    def cut_class(self, task: int, index: int, statistics: dict[str, Statistics]) -> None:
        """Remove a class of a task and its outputs; `statistics` replaces those of the task."""
        subnetwork = self.subnetworks[task]
        rotations = subnetwork.num_rotations
        stay = torch.arange(len(subnetwork.head["bias"]), device=self.device) // rotations != index
        heads = {"head": subnetwork.head, "pretrained_head": subnetwork.pretrained_head}
        self._reseal(
            task,
            classes=(*subnetwork.classes[:index], *subnetwork.classes[index + 1 :]),
            statistics=statistics,
            **{each: {name: value[stay].contiguous() for name, value in head.items()} for each, head in heads.items()},
        )

    def _reseal(self, task: int, **changes: Any) -> None:
        """Replace parts of a sealed subnetwork other than its features, and give it a new digest."""
        subnetwork = self.subnetworks[task]
        if self._digest(subnetwork) != subnetwork.digest:
            raise RuntimeError(f"task {task} has changed since it was sealed")
        changed = dataclasses.replace(subnetwork, **changes)
        self.subnetworks[task] = dataclasses.replace(changed, digest=self._digest(changed))
        self.clear_compact()

    @property
    def classes(self) -> list[tuple[ClassName, ...]]:
        """The classes of each task, in the order of learning."""
        return [subnetwork.classes for subnetwork in self.subnetworks]

    def tasks_of(self, name: ClassName) -> list[int]:
        """Return the tasks that have learned a class: more than one if it has several versions."""
        return [task for task, subnetwork in enumerate(self.subnetworks) if name in subnetwork.classes]

    def version(self, task: int, name: ClassName | None) -> int | None:
        """Return how many tasks up to this one have learned a class: its version, from 1; None for no class."""
        return None if name is None else sum(name in each.classes for each in self.subnetworks[: task + 1])

    @torch.no_grad()
    def remove(self, task: int, fresh: Mapping[str, Tensor], statistics: Sequence[dict[str, Statistics]]) -> None:
        """Remove a subnetwork; every weight that is then free gets its value from `fresh`.

        `statistics` replaces that of the remaining subnetworks, in order.
        """
        frozen = self._frozen_weights()
        others = [subnetwork for index, subnetwork in enumerate(self.subnetworks) if index != task]
        self.subnetworks = [
            dataclasses.replace(other, statistics=kept) for other, kept in zip(others, statistics, strict=True)
        ]
        taken = union_of((subnetwork.masks for subnetwork in self.subnetworks), self.taken)
        self.taken = {name: torch.ones_like(mask) if name in frozen else mask for name, mask in taken.items()}
        for name, weight in self.weights.items():
            free = torch.where(self.taken[name], weight, fresh[name].to(weight))
            self.weights[name] = copy_like(weight, free)
        set_tensors(self.backbone, {**self.weights, **self.initial})  # it still held the last draft
        self.clear_compact()

    def _frozen_weights(self) -> set[str]:
        """Return the names of weights that the user froze: they are taken whole, whichever subnetworks use them."""
        used = union_of((subnetwork.masks for subnetwork in self.subnetworks), self.taken)
        live = named_tensors(self.backbone)
        return {name for name in self.weights if not live[name].requires_grad or (self.taken[name] & ~used[name]).any()}

    def pixels(self, images: Tensor | Maps) -> Tensor:
        """Return the backbone's input for raw images: on its device, scaled and normalised, after the trunk if any."""
        if self.trunk is None and isinstance(images, Tensor):
            return self.prepare(images.to(self.device))
        return self.maps(images).values.to(self.device, self.prepare.dtype)

    @torch.no_grad()
    def maps(self, images: Tensor | Maps) -> Maps:
        """Return the outputs of the trunk for raw images; those of photos in bfloat16 on a CPU that is fast in it."""
        if isinstance(images, Maps):
            return images
        assert self.trunk is not None
        with self.in_use(), full_precision(), fast_photos(self.device, images.shape[1:]):
            pixels = (self.prepare(part.to(self.device)) for part in self._parts(images))
            return Maps(torch.cat([self.trunk(as_channels_last(part)) for part in pixels]))

    def tensors_of(self, task: int) -> dict[str, Tensor]:
        """Return the tensors that turn the backbone into a task's subnetwork: masked weights and private parts."""
        subnetwork = self.subnetworks[task]
        return self._all_pretrained() if subnetwork.is_frozen else subnetwork.tensors(self.weights)

    def evidence(
        self, batches: Iterable[Tensor | Maps], features: Callable[[Space | None], Tensor] | None = None
    ) -> Evidence:
        """Return the outputs of every subnetwork for batches of images, computed on demand.

        `features` returns the features of these images in a space, if they are known from an earlier evidence.
        """
        known = [*self.subnetworks]
        if self.trunk is not None:
            batches = keep_maps(batches, self.maps)
        features = features or cache(partial(self.features, batches))

        def check() -> None:
            if [each.digest for each in known] != [each.digest for each in self.subnetworks[: len(known)]]:
                raise RuntimeError("a task was forgotten since this evidence was made; compute it again")

        def forward(tasks: Sequence[int]) -> list[Outputs]:
            with self.in_use():
                check()
                return self.outputs(batches, tasks, features)

        if not isinstance(batches, Sequence):  # read from files, so one image alone is not cheaper to get
            return Evidence(forward, len(known), features)

        def forward_some(images: Mapping[int, Tensor]) -> dict[int, Outputs]:
            with self.in_use():
                check()
                return self.outputs_for(batches, images, features)

        return Evidence(forward, len(known), features, forward_some, sum(map(len, batches)))

    @torch.no_grad()
    def features(self, batches: Iterable[Tensor | Maps], space: Space | None) -> Tensor:
        """Return the features (N, d) of batches of images in a space that no task owns."""
        with self.in_use(), full_precision():
            module, parts = self.space_module(space), (part for batch in batches for part in self._parts(batch))
            features = torch.cat([module(pixels) for pixels in map(self.pixels, parts)])
            if features.ndim != 2:
                raise ValueError(f"{space} must return features of shape (N, d), got {tuple(features.shape)}")
            return features

    def _parts(self, batch: Any) -> Sequence[Any]:
        """Split a batch of large images on a CPU, whose caches and memory its activations would exceed."""
        if self.device.type != "cpu" or isinstance(batch, Maps):
            return [batch]
        return batch.split(max(1, CPU_BATCH_VALUES // math.prod(batch.shape[1:])))

    def space_module(self, space: Space | None) -> nn.Module:
        """Return the module that computes the features of a space, or the default one, from the backbone's input."""
        shape = self.input_shape or ()
        if space not in self._spaces:
            default = default_space(shape) if self.trunk is None else Pretrained()
            module = (space or default).make(shape, self.pretrained_backbone)
            self._spaces[space] = module.to(self.device).eval().requires_grad_(False)
        return self._spaces[space]

    def pretrained_backbone(self) -> nn.Module:
        """Return a copy of the backbone with the weights it came with, without the trunk."""
        return copy_with_tensors(self.backbone, self._all_pretrained())

    @torch.no_grad()
    def outputs(
        self,
        batches: Iterable[Tensor | Maps],
        tasks: Sequence[int],
        features: Callable[[Space | None], Tensor] | None = None,
    ) -> list[Outputs]:
        """Run the subnetworks of `tasks` on batches of images: the compact ones together, the others one by one.

        All frozen ones share the features in the space `Pretrained`, which `features` returns if they are known.
        """
        features = features or cache(partial(self.features, batches))
        with self.in_use():
            frozen = self._frozen_outputs(tasks, features)
            others = [task for task in tasks if task not in frozen]
            compact = {task: self.subnetworks[task] for task in others if self._compact.is_worthwhile(task)}
            outputs = finite_outputs(self._compact.outputs(map(self.pixels, batches), compact))
            # The others have no compact form, or features too large for the half precision it may compute in.
            outputs |= {
                task: self._full_outputs(map(self.pixels, batches), task) for task in others if task not in outputs
            }
            outputs = frozen | {task: self._with_pretrained(task, each, features) for task, each in outputs.items()}
            return [outputs[task] for task in tasks]

    def _with_pretrained(
        self, task: int, outputs: Outputs, features: Callable[[Space | None], Tensor], images: Tensor | None = None
    ) -> Outputs:
        """Return outputs for all images, or for some, whose logits include those of the pretrained head, if any."""

        def pretrained() -> Tensor:
            every = features(Pretrained())
            return every if images is None else every[images.to(every.device)]

        return self.subnetworks[task].with_pretrained(outputs, pretrained)

    def _frozen_outputs(self, tasks: Iterable[int], features: Callable[[Space | None], Tensor]) -> dict[int, Outputs]:
        """Return the outputs of the frozen subnetworks among `tasks`: their heads on features that they share."""
        frozen = {task: self.subnetworks[task] for task in tasks if self.subnetworks[task].is_frozen}
        return {task: each.outputs(features(Pretrained())[None]) for task, each in frozen.items()}

    @torch.no_grad()
    def outputs_for(
        self,
        batches: Sequence[Tensor | Maps],
        images: Mapping[int, Tensor],
        features: Callable[[Space | None], Tensor] | None = None,
    ) -> dict[int, Outputs]:
        """Run subnetworks on some of the images each, given as indices in order: the compact ones concurrently.

        `features` is that of `outputs`.
        """
        features = features or cache(partial(self.features, batches))
        with self.in_use():
            frozen = self._frozen_outputs(images, features)
            chosen = {
                task: Outputs(*(part[images[task].to(part.device)] for part in outputs))
                for task, outputs in frozen.items()
            }
            others = {task: indices for task, indices in images.items() if task not in frozen}
            found: dict[int, list[Outputs]] = {task: [] for task in others}
            first, (rows, tasks) = 0, join_tasks(others)
            for batch in batches:
                here = (rows >= first) & (rows < first + len(batch))
                if not here.any():
                    first += len(batch)
                    continue
                pixels = as_channels_last(self.pixels(batch[rows[here] - first]))
                for task, outputs in self._outputs_of_parts(split_by_task(pixels, tasks[here])).items():
                    found[task].append(outputs)
                first += len(batch)
            own = {
                task: self._with_pretrained(task, concatenate(outputs), features, images[task])
                for task, outputs in found.items()
            }
        return chosen | own

    def _outputs_of_parts(self, parts: Mapping[int, Tensor]) -> dict[int, Outputs]:
        """Run each task's subnetwork on pixels of its own."""
        compact = {task: self.subnetworks[task] for task in parts if self._compact.is_worthwhile(task)}
        found = finite_outputs(self._compact.outputs_for(parts, compact))
        return {
            task: found[task] if task in found else self._full_outputs([part], task) for task, part in parts.items()
        }

    @torch.no_grad()
    def full_outputs(self, batches: Iterable[Tensor | Maps], task: int) -> Outputs:
        """Run a subnetwork as the whole backbone with the task's masked weights: the slow reference."""
        with self.in_use():
            if self.trunk is not None:
                batches = keep_maps([*batches], self.maps)
            outputs = self._full_outputs(map(self.pixels, batches), task)
            return self._with_pretrained(task, outputs, partial(self.features, batches))

    def _full_outputs(self, pixels: Iterable[Tensor], task: int) -> Outputs:
        subnetwork = self.subnetworks[task]
        if subnetwork.is_frozen:
            network: Callable[[Tensor], Tensor] = self.space_module(Pretrained())
        else:
            self.backbone.eval()
            network = partial(functional_call, self.backbone, self.tensors_of(task))
        size = max(1, MAX_BATCH // len(subnetwork.views))
        chunks = (chunk for batch in pixels for chunk in batch.split(size))
        with self._fast_photos():
            return concatenate([subnetwork.outputs(subnetwork.view_features(chunk, network)) for chunk in chunks])

    def _fast_photos(self) -> AbstractContextManager[None]:
        """Return the context in which subnetworks behind a trunk compute, as the trunk does."""
        return fast_photos(self.device, () if self.trunk is None else self.input_shape or ())

    def extract(self, task: int) -> Standalone:
        """Return a subnetwork as a small, plain module, without the channels it does not use."""
        with self.in_use():
            self.check_task(task)
            subnetwork, trunk = self.subnetworks[task], copy.deepcopy(self.trunk)
            pretrained = copy.deepcopy(self.space_module(Pretrained())) if subnetwork.uses_pretrained else None
            if subnetwork.is_frozen and pretrained is not None:
                return Standalone(pretrained, subnetwork, self.prepare, trunk=trunk)
            return Standalone(self._own_backbone(task), subnetwork, self.prepare, trunk=trunk, pretrained=pretrained)

    def extract_own(self, task: int) -> Standalone:
        """Return only what a subnetwork does not share with others: without the trunk and the pretrained features."""
        with self.in_use():
            subnetwork = self.subnetworks[task]
            own = nn.Identity() if subnetwork.is_frozen else self._own_backbone(task)
            return Standalone(own, subnetwork, self.prepare)

    def _own_backbone(self, task: int) -> nn.Module:
        """Return the backbone of a subnetwork, where possible without the channels that it does not use."""
        compact = self._compact.extract(task)
        return copy_with_tensors(self.backbone, self.tensors_of(task)) if compact is None else compact

    def with_trunk(self, backbone: nn.Module) -> nn.Module:
        """Return a backbone behind a copy of the trunk, if there is one: a module that reads normalised images."""
        return backbone if self.trunk is None else nn.Sequential(copy.deepcopy(self.trunk), backbone)

    def fingerprint(self, task: int) -> Fingerprint:
        """Return the digests of a sealed subnetwork; nothing that is learned later changes them."""
        with self.in_use(), full_precision():
            self.check_task(task)
            outputs = self.full_outputs([self._noise(4)], task)
            return Fingerprint(self._digest(self.subnetworks[task]), digest(outputs._asdict()))

    def _noise(self, images: int) -> Tensor:
        """Return images of noise, or zeros if the backbone does not accept noise."""
        noise = torch.randn(images, *(self.input_shape or ()), generator=torch.Generator().manual_seed(0))
        if self._accepts_noise is None:
            self._accepts_noise = accepts_noise(self.backbone, self.pixels(noise[:1]))
        return noise if self._accepts_noise else torch.zeros_like(noise)

    def _two_images(self) -> Tensor:
        return self.pixels(self._noise(2))

    def check_task(self, task: int) -> None:
        """Raise an error unless `task` is the index of a learned task."""
        known = len(self.subnetworks)
        if not hasattr(task, "__index__") or isinstance(task, bool):
            raise TypeError(f"task must be an integer index from 0, got {task!r}")
        if not 0 <= task < known:
            raise ValueError(f"task must be an index below {known}, the number of learned tasks, got {task}")

    def check_sealed(self) -> None:
        """Raise `RuntimeError` if any sealed subnetwork has changed since it was sealed, by its digest."""
        check_sealed(
            self.subnetworks, self.weights, {**self.trunk_tensors(), **self.initial, **(self.pretrained or {})}
        )

    def statistics(self, selector: str) -> list[Statistics]:
        """Return the statistics that a selector keeps about each task."""
        return [subnetwork.statistics.get(selector, {}) for subnetwork in self.subnetworks]

    def density(self, task: int) -> float:
        """Return the share of all shared weights that a task's subnetwork uses."""
        return density(self.subnetworks[task].masks, self.weights)

    def free_share(self) -> float:
        """Return the share of all shared weights that no subnetwork has taken."""
        return 1 - density(self.taken, self.weights)

    def free_by_layer(self) -> dict[str, float]:
        """Return, for each shared weight, the share that no subnetwork has taken."""
        return {name: 1 - count_weights(self.taken[name], w) / w.numel() for name, w in self.weights.items()}
