"""Checks that every pruner, selector and method must pass, including your own: call them from your tests."""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from cps.data.tasks import Task
from cps.method import Method, predict
from cps.network.backbones import SmallConvNet
from cps.network.masks import Masks, full_masks, is_subset
from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Subnetwork
from cps.pruning.base import Pruner
from cps.selection.base import GraphSelector, LazySelector, Selector
from cps.selection.groups import consecutive_groups
from cps.training import checkpoint as checkpoints


def check_pruner(pruner: Pruner) -> None:
    """Raise `AssertionError` if a pruner breaks a rule that the learner relies on."""
    for backbone, batches in _networks():
        masks = full_masks({n: p for n, p in backbone.named_parameters() if p.ndim > 1}, on=True)
        before = {name: value.clone() for name, value in backbone.state_dict().items()}
        first = pruner(backbone, dict(masks), batches)
        _require(isinstance(first, dict), f"a pruner must return masks by name, got {type(first).__name__}")
        _require(set(first) == set(masks), "a pruner must return a mask for every weight it was given")
        for name, mask in first.items():
            is_valid = mask.shape == masks[name].shape and mask.dtype == torch.bool
            _require(is_valid, f"the mask of '{name}' must be a bool tensor of shape {tuple(masks[name].shape)}")
        _require(is_subset(first, masks), "a pruner must only switch connections off")
        _require(any(bool(mask.any()) for mask in first.values()), "a pruner must keep at least one connection")
        _require(_are_equal(before, backbone.state_dict()), "a pruner must not change the backbone")
        _require(all(bool(mask.all()) for mask in masks.values()), "a pruner must not change the masks it is given")
        again = pruner(backbone, dict(masks), batches)
        _require(_are_equal(first, again), "a pruner must return the same masks for the same network and images")
        _apply_masks(backbone, first)
        second = pruner(backbone, dict(first), batches)
        _require(is_subset(second, first), "a second round must not switch connections on again")


def check_selector(selector: Selector) -> None:
    """Raise `AssertionError` if a selector breaks a rule that the learner relies on."""
    generator = torch.Generator().manual_seed(0)
    subnetworks = [_subnetwork(classes, generator) for classes in (2, 3, 2)]
    statistics = []
    for task, subnetwork in enumerate(subnetworks):
        evidence = _evidence(subnetworks[: task + 1], generator, images=40)
        kept = selector.observe(subnetwork, evidence, torch.arange(40) % len(subnetwork.classes), statistics)
        _require(
            all(isinstance(key, str) and isinstance(value, Tensor) for key, value in kept.items()),
            "`observe` must return a dict of tensors by name",
        )
        kept = {key: value.float() for key, value in kept.items()}  # as the learner and a model file do
        largest = max((value.numel() for value in kept.values()), default=0)
        _require(
            largest < 40 * 8 * (task + 1),
            "`observe` must return statistics of a task, not its images or their features",
        )
        statistics.append(kept)
    evidence = _evidence(subnetworks, generator, images=7)
    for size, groups in ((1, 7), (3, 3), (10, 1)):
        scores = selector(evidence, statistics, consecutive_groups(7, size))
        _require(tuple(scores.shape) == (groups, 3), f"scores must have shape (groups, tasks), got {scores.shape}")
        _require(bool(torch.isfinite(scores).all()), "scores must be finite")
        again = selector(evidence, statistics, consecutive_groups(7, size))
        _require(torch.equal(scores, again), "the same evidence must give the same scores")
    singles = selector(evidence, statistics, torch.arange(7))  # scores of groups of one image
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    shuffled = Evidence.of(
        [Outputs(*(part[order] for part in outputs)) for outputs in evidence],
        lambda space: evidence.features(space)[order],
    )
    are_same = torch.allclose(selector(shuffled, statistics, torch.arange(7)), singles[order], atol=1e-5)
    _require(are_same, "the score of a group must not depend on other groups or on the order of groups")
    if isinstance(selector, GraphSelector):
        exported = selector.score_images(evidence, selector.precompute(statistics))
        needed = selector.needed(evidence, statistics, torch.arange(7)) if isinstance(selector, LazySelector) else None
        ran = torch.ones_like(exported, dtype=torch.bool) if needed is None else needed
        are_close = torch.allclose(exported[ran], singles[ran], rtol=1e-3, atol=1e-4)
        _require(are_close, "`score_images` must return the scores of a call with groups of one")
    fewer = selector(evidence.first(2), statistics[:2], torch.arange(7))
    _require(tuple(fewer.shape) == (7, 2), "a selector must accept the evidence and statistics of the first tasks only")


def check_method(make: Callable[[nn.Module], Method]) -> None:
    """Raise `AssertionError` if a method breaks a rule that comparisons rely on.

    `make` returns a new method with a copy of the backbone it is given (images (N, 2, 6, 6) -> features). It is called
    several times, so choose a short training, and a memory that holds at least one image of each of seven classes.
    """
    backbone, (tests, tasks) = _networks()[0][0], _method_tasks()
    method = make(backbone)
    earlier: list[list[Outputs]] = []
    for number, task in enumerate(tasks, start=1):
        passes, data = method.image_passes, task.train
        method.learn(task)
        data.close()  # reading an image now raises
        _require(method.image_passes >= passes, "`image_passes` must not fall")
        _require(list(method.classes) == [each.classes for each in tasks[:number]], "`classes` must have every task")
        _check_kept(method)
        earlier.append(list(method.evidence(tests)))
        _check_outputs(earlier[-1], [len(each.classes) for each in tasks[:number]], len(tests))
        if method.is_sealed:
            _require(
                all(_same(before, after) for row in earlier for before, after in zip(row, earlier[-1], strict=False)),
                "the outputs of a method that is sealed must not change, to the bit",
            )
    evidence, order = earlier[-1], torch.randperm(len(tests), generator=torch.Generator().manual_seed(1))
    _require(_close(evidence, list(method.evidence(tests[order])), order), "the order of images must not matter")
    alone = [list(method.evidence(tests[index : index + 1])) for index in range(3)]
    singles = [Outputs(*map(torch.cat, zip(*of_task, strict=True))) for of_task in zip(*alone, strict=True)]
    _require(_close(evidence, singles, torch.arange(3)), "an image alone must give the same outputs as in a batch")
    names = {name for task in tasks for name in task.classes}
    for group_size in (1, 5):
        found = predict(method, tests, group_size=group_size).classes
        _require(len(found) == len(tests) and set(found) <= names, "predictions must be classes that were learned")
    _require(_same_everywhere(evidence, _learned(make(backbone))), "the same seed must give the same bits")
    _check_interruption(make, backbone, evidence)
    _check_failure(method, tests, evidence)


def _learned(method: Method, **options: Any) -> list[Outputs]:
    """Return the outputs of a method for the test images after it has learned all tasks."""
    tests, tasks = _method_tasks()
    for task in tasks[len(method.classes) :]:
        method.learn(task, **options)
    return list(method.evidence(tests))


class _ClosingDataset(Dataset):
    """Images and labels that cannot be read any more once it is closed."""

    def __init__(self, images: Tensor, targets: list[int]):
        self.images, self.targets, self.is_open = images, targets, True

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        _require(self.is_open, "a method must not read the images of a task after it has learned it")
        return self.images[index], self.targets[index]

    def close(self) -> None:
        """Let every later read raise."""
        self.is_open = False


def _method_tasks() -> tuple[Tensor, list[Task]]:
    """Return test images, and tasks of three, two and two classes: noise around one pattern for each class."""
    draws = torch.Generator().manual_seed(0)
    patterns = torch.randn(7, 2, 6, 6, generator=draws)
    tasks = []
    for classes in ([0, 1, 2], [3, 4], [5, 6]):
        labels = [name for name in classes for _ in range(12)]
        images = patterns[labels] + 0.5 * torch.randn(len(labels), 2, 6, 6, generator=draws)
        tasks.append(Task(classes, train=_ClosingDataset(images, labels)))
    return patterns.repeat(3, 1, 1, 1) + 0.5 * torch.randn(21, 2, 6, 6, generator=draws), tasks


def _check_kept(method: Method) -> None:
    for learning in (False, True):
        kept = method.kept(learning=learning)
        are_sizes = all(isinstance(size, int) and size >= 0 for size in kept.values())
        _require(are_sizes, "`kept` must return numbers of bytes by what they are")
    has_images = method.kept().get("exemplars", 0) > 0
    _require(has_images <= method.assumes.replay, "a method that keeps images must say so: `assumes.replay`")


def _check_outputs(outputs: list[Outputs], sizes: list[int], images: int) -> None:
    _require(len(outputs) == len(sizes), "`evidence` must have outputs of every task")
    for each, classes in zip(outputs, sizes, strict=True):
        shape = tuple(each.logits.shape)
        _require(shape == (images, classes), f"scores must have shape {(images, classes)}, got {shape}")
        _require(each.features.ndim == 2 and len(each.features) == images, "features must have shape (N, d)")
        _require(bool(each.logits.isfinite().all()), "scores must be finite")


def _check_interruption(make: Callable[[nn.Module], Method], backbone: nn.Module, expected: list[Outputs]) -> None:
    """Interrupt the second task after each of its epochs, and resume."""
    for stop in _epochs_of_second_task(make, backbone):
        with tempfile.TemporaryDirectory() as folder, _every_epoch_saved():
            method, checkpoint, done = make(backbone), Path(folder) / "checkpoint", 0
            tests, tasks = _method_tasks()
            method.learn(tasks[0])

            def interrupt(at: Any, stop: int = stop) -> None:
                nonlocal done
                done += 1
                if done == stop:
                    raise KeyboardInterrupt

            try:
                method.learn(tasks[1], checkpoint=checkpoint, on_epoch=interrupt)
            except KeyboardInterrupt:
                _require(len(method.classes) == 1, "an interrupted task must not count as learned")
            method.learn(tasks[1], checkpoint=checkpoint)
            checkpoint.unlink(missing_ok=True)
            method.learn(tasks[2])
            _require(
                _same_everywhere(expected, list(method.evidence(tests))),
                "a task that was interrupted and resumed must end with the same bits",
            )


@contextmanager
def _every_epoch_saved() -> Iterator[None]:
    """Write a checkpoint after every epoch, however short: otherwise a later phase would never be resumed."""
    share = checkpoints.MAX_WRITING_SHARE
    checkpoints.MAX_WRITING_SHARE = math.inf
    try:
        yield
    finally:
        checkpoints.MAX_WRITING_SHARE = share


def _epochs_of_second_task(make: Callable[[nn.Module], Method], backbone: nn.Module) -> Iterator[int]:
    """Return the numbers of the epochs of the second task: none if the method has no epochs."""
    method, (_, tasks), epochs = make(backbone), _method_tasks(), []
    method.learn(tasks[0])
    method.learn(tasks[1], on_epoch=epochs.append)
    return iter(range(1, len(epochs) + 1))


def _check_failure(method: Method, tests: Tensor, expected: list[Outputs]) -> None:
    """Learn a class that is known already."""
    task = _method_tasks()[1][0]
    try:
        method.learn(task)
    except ValueError:
        _require(_same_everywhere(expected, list(method.evidence(tests))), "a failed task must change nothing")
    else:
        raise AssertionError("a class that is known already must raise ValueError")


def _same(first: Outputs, second: Outputs) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _same_everywhere(first: list[Outputs], second: list[Outputs]) -> bool:
    return all(_same(one, other) for one, other in zip(first, second, strict=True))


def _close(expected: list[Outputs], found: list[Outputs], images: Tensor) -> bool:
    pairs = zip(expected, found, strict=True)
    return all(torch.allclose(one.logits[images], other.logits, rtol=1e-3, atol=1e-4) for one, other in pairs)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise AssertionError(rule)


def _networks() -> list[tuple[nn.Module, list[Tensor]]]:
    """Return small networks with batches of images for them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the CPU only: `fork_rng` restores no GPU here
        conv = SmallConvNet(channels=2, widths=(4, 6))
        dense = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6))
        return [(conv.eval(), [torch.randn(8, 2, 6, 6)]), (dense.eval(), [torch.randn(8, 5), torch.randn(4, 5)])]


def _subnetwork(classes: int, generator: torch.Generator) -> Subnetwork:
    head = {
        "weight": torch.randn(classes, 8, generator=generator),
        "bias": torch.randn(classes, generator=generator),
    }
    return Subnetwork(tuple(range(classes)), {}, {}, head)


def _evidence(subnetworks: list[Subnetwork], generator: torch.Generator, *, images: int) -> Evidence:
    outputs = []
    for subnetwork in subnetworks:
        features = torch.randn(images, 8, generator=generator)
        logits = features @ subnetwork.head["weight"].T + subnetwork.head["bias"]
        outputs.append(Outputs(features, logits))
    shared = torch.randn(images, 6, generator=generator)
    return Evidence.of(outputs, lambda space: shared)


def _are_equal(first: dict[str, Tensor] | Masks, second: dict[str, Tensor] | Masks) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def _apply_masks(backbone: nn.Module, masks: Masks) -> None:
    for name, parameter in backbone.named_parameters():
        if name in masks:
            parameter.masked_fill_(~masks[name], 0.0)
