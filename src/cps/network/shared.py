"""The shared network and its subnetworks."""

import copy
import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.data.examples import ClassName
from cps.data.normalize import Normalize, Prepare
from cps.data.rotations import RotationScheme, Upright
from cps.network.backbone_checks import has_place_for
from cps.network.capacity import check_capacity, is_crowded
from cps.network.classifier import fresh_head
from cps.network.compact.cache import CompactCache
from cps.network.compact.extraction import Standalone, whole
from cps.network.draft import Draft
from cps.network.masks import full_masks, share_on, union, weights_on
from cps.network.outputs import Evidence, Outputs, concatenate, finite
from cps.network.partition import (
    Parts,
    copy_like,
    move,
    move_all,
    named_tensors,
    own_memory,
    partition,
    put_channels_last,
)
from cps.network.subnetwork import Fingerprint, Subnetwork
from cps.runtime.devices import cuda_device, deterministic_cudnn, full_precision, without_autocast
from cps.runtime.locks import CopyableLock
from cps.storage.container import digest

log = logging.getLogger(__name__)

AT_ONCE = 256  # images in one pass, each look at one counted


class SharedNetwork:
    """One backbone whose weights all tasks share, and the sealed subnetworks in it.

    The backbone is copied. `weights` are the shared values, `taken` the connections that belong to sealed
    subnetworks: those never change again. A frozen weight of the user's counts as taken from the start.
    """

    def __init__(self, backbone: nn.Module, *, normalize: Normalize | None = None):
        self.parts: Parts = partition(backbone)
        self.backbone = copy.deepcopy(backbone)
        own_memory(self.backbone)
        self.normalize = normalize
        tensors = named_tensors(self.backbone)
        self.weights = {name: tensors[name].detach().clone() for name in self.parts.shared}
        self.initial = {name: tensors[name].detach().clone() for name in self.parts.private}
        self.prepare = Prepare(normalize, next(iter(self.weights.values())).dtype)
        self.taken = full_masks(self.weights, on=False)
        for name in self.parts.shared:
            if not tensors[name].requires_grad:
                self.taken[name].fill_(True)
        self.subnetworks: list[Subnetwork] = []
        self.input_shape: tuple[int, ...] | None = None  # of the images learned first, and their values, roughly
        self.input_range: tuple[float, float] | None = None
        self.other_shapes: set[tuple[int, ...]] = set()  # that it was seen to process, too
        self.is_changing, self.warned = False, set[str]()
        self._takes_noise: bool | None = None  # not known yet
        self._turns = CopyableLock()
        self._compact = CompactCache(self.backbone, self.tensors_of, self._two_images)

    @property
    def device(self) -> torch.device:
        """The device that the network is on."""
        return next(iter(self.weights.values())).device

    def to(self, device: torch.device) -> None:
        """Move everything to a device."""
        self.clear_compact()
        move(self.backbone, device)
        if device.type == "cuda":
            put_channels_last(self.backbone)
        for tensors in (self.weights, self.initial, *(sub.private for sub in self.subnetworks)):
            move_all(tensors, device, channels_last=device.type == "cuda")
        for sub in self.subnetworks:
            for tensors in (sub.masks, sub.head, *sub.statistics.values()):
                move_all(tensors, device)
        move_all(self.taken, device)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the backbone, which every prediction and all training put their tensors into: other threads wait.

        Neither an autocast of the caller's nor cuDNN's search for kernels reaches what is computed meanwhile.
        """
        with self._turns, without_autocast(self.device), cuda_device(self.device), deterministic_cudnn():
            yield

    def warn_once(self, what: str) -> None:
        """Warn of something that is so for as long as the network is."""
        if what not in self.warned:
            log.warning(what)
        self.warned.add(what)

    def make_private(self, names: Collection[str]) -> None:
        """Let every task have its own copy of some weights, before any is learned."""
        self.parts = self.parts.with_private(names)
        self.initial = {**self.initial, **{name: self.weights[name] for name in names}}
        self.weights = {name: value for name, value in self.weights.items() if name not in names}
        self.taken = {name: value for name, value in self.taken.items() if name not in names}

    def clear_compact(self) -> None:
        """Make small networks anew when they are next asked for."""
        self._compact.forget()

    def pixels(self, images: Tensor) -> Tensor:
        """Return what the backbone sees of raw images: on its device, scaled and normalised."""
        return self.prepare(images.to(self.device))

    def grow(
        self,
        classes: Sequence[ClassName],
        features: int,
        generator: torch.Generator,
        rotations: RotationScheme | None = None,
        crowded: float = 0.0,
    ) -> Draft:
        """Start the subnetwork of a new task, with every connection on and a fresh head.

        Where layers have less than a share of `crowded` free, it is to learn which sealed connections it uses.
        """
        moving = {name for name, value in self.backbone.named_parameters() if value.requires_grad}
        free = {name: share for name, share in self.free().items() if name in moving}
        is_choosing = bool(self.subnetworks) and is_crowded(free, self.weights, crowded)
        if self.subnetworks and moving:
            learns = not moving.isdisjoint(self.parts.private)
            check_capacity(free, self.weights, len(self.subnetworks), learns=learns, chooses=is_choosing)
        rotations = rotations or Upright()
        return Draft(
            self.backbone,
            fresh_head(features, len(classes) * rotations.num_rotations, generator).to(self.device),
            self.parts,
            classes=classes,
            flips=rotations.flips,
            weights=self.weights,
            taken=self.taken,
            private=self.initial,
            is_choosing=is_choosing,
        )

    @torch.no_grad()
    def seal(self, draft: Draft) -> Subnetwork:
        """Finish a draft: its weights are taken, and nothing of it ever changes again."""
        draft.check_finite()
        live = draft.weights()
        warm = live if draft.warm is None else draft.warm
        for name, weight in self.weights.items():
            own = draft.masks[name] & ~self.taken[name]
            free = torch.where(self.taken[name], weight, warm[name])
            self.weights[name] = copy_like(weight, torch.where(own, live[name], free))
        self.taken = union(self.taken, draft.masks)
        head = {name: value.detach().clone() for name, value in draft.model.head.named_parameters()}
        private = {name: copy_like(self.initial[name], value) for name, value in draft.private().items()}
        finished = Subnetwork(draft.classes, draft.masks, private, head, flips=draft.flips)
        self.subnetworks.append(dataclasses.replace(finished, digest=finished.digest_in(self.weights)))
        return self.subnetworks[-1]

    def check_sealed(self) -> None:
        """Refuse to go on if anything of a sealed subnetwork is not as it was sealed, by its digest."""
        for subnetwork in self.subnetworks:
            subnetwork.check_sealed(self.weights)

    def tensors_of(self, task: int) -> dict[str, Tensor]:
        """Return the tensors that turn the backbone into that task's: masked weights and private parts."""
        return self.subnetworks[task].tensors(self.weights)

    @torch.no_grad()
    def outputs(self, batches: Iterable[Tensor], tasks: Sequence[int]) -> list[Outputs]:
        """Return what some subnetworks say about batches of images: those with small networks all at once."""
        with self.in_use():
            small = {task: self.subnetworks[task] for task in tasks if self._compact.is_worthwhile(task)}
            found = finite(self._compact.outputs(map(self.pixels, batches), small))
            # The others have no small network, or features too large for half precision, in which it may compute.
            return [found[task] if task in found else self.whole_outputs(batches, task) for task in tasks]

    @torch.no_grad()
    def whole_outputs(self, batches: Iterable[Tensor], task: int) -> Outputs:
        """Return the same from the backbone with the task's masked weights in it: slow and plain."""
        with self.in_use():
            subnetwork, tensors = self.subnetworks[task], self.tensors_of(task)
            self.backbone.eval()
            size = max(1, AT_ONCE // len(subnetwork.views))
            stretches = (stretch for pixels in map(self.pixels, batches) for stretch in pixels.split(size))
            network = partial(functional_call, self.backbone, tensors)
            return concatenate([subnetwork.say(subnetwork.look(stretch, network)) for stretch in stretches])

    def check_task(self, task: int) -> None:
        """Refuse the index of a task that was not learned."""
        known = len(self.subnetworks)
        if not hasattr(task, "__index__") or isinstance(task, bool):
            raise TypeError(f"a task is a number, counted from 0, got {task!r}")
        if not 0 <= task < known:
            raise ValueError(f"there is no task {task}: {known} were learned, counted from 0")

    def extract(self, task: int) -> Standalone:
        """Return a subnetwork as a plain module of its own, without the channels that it does not use."""
        with self.in_use():
            self.check_task(task)
            small = self._compact.extracted(task)
            backbone = whole(self.backbone, self.tensors_of(task)) if small is None else small
            return Standalone(backbone, self.subnetworks[task], self.prepare)

    def _noise(self, images: int) -> Tensor:
        """Return images of noise, or of zeros where the backbone cannot look at noise."""
        noise = torch.randn(images, *(self.input_shape or ()), generator=torch.Generator().manual_seed(0))
        if self._takes_noise is None:
            self._takes_noise = has_place_for(self.backbone, self.prepare(noise[:1]))
        return noise if self._takes_noise else torch.zeros_like(noise)

    def _two_images(self) -> Tensor:
        return self.pixels(self._noise(2))

    def release_images(self) -> None:
        """Keep no pixel of what was looked at."""
        self._compact.release_images()

    def evidence(self, batches: Iterable[Tensor]) -> Evidence:
        """Return the outputs of every subnetwork for batches of images; those asked together read them once."""
        known = [*self.subnetworks]

        def compute(tasks: Sequence[int]) -> list[Outputs]:
            with self.in_use():
                if known != self.subnetworks[: len(known)]:
                    raise RuntimeError("tasks were forgotten since this evidence was asked for; ask for it again")
                return self.outputs(batches, tasks)

        return Evidence(compute, len(known))

    def statistics(self, selector: str) -> list[dict[str, Tensor]]:
        """Return what the selector of that name keeps about each task."""
        return [subnetwork.statistics.get(selector, {}) for subnetwork in self.subnetworks]

    def density(self, task: int) -> float:
        """Return the share of all shared weights that a task's subnetwork uses."""
        return share_on(self.subnetworks[task].masks, self.weights)

    def free_share(self) -> float:
        """Return the share of all shared weights that no subnetwork has taken."""
        return 1 - share_on(self.taken, self.weights)

    def free(self) -> dict[str, float]:
        """Return, for each shared weight, the share that no subnetwork has taken."""
        return {name: 1 - weights_on(self.taken[name], w) / w.numel() for name, w in self.weights.items()}

    def fingerprint(self, task: int) -> Fingerprint:
        """Return the digests of a sealed subnetwork; they never change, whatever is learned later."""
        with self.in_use(), full_precision():
            self.check_task(task)
            outputs = self.whole_outputs([self._noise(4)], task)
            return Fingerprint(self.subnetworks[task].digest_in(self.weights), digest(outputs._asdict()))
