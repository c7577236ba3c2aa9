"""Checkpoints: a safetensors file with everything needed to resume training after a crash."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from cps.data.examples import Examples
from cps.data.tasks import Task
from cps.network.shared import SharedNetwork
from cps.runtime.devices import precision_of
from cps.storage import container as storage
from cps.storage.settings_codec import decode, unknown_in, upgrade_settings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

log = logging.getLogger(__name__)

GetState = Callable[[], dict[str, Any]]  # called only when the state is written
MAX_VALUE = 40  # characters of a value that an error message shows: not those of a digest
MAX_WRITING_SHARE = 0.01  # of the training time that may be spent on writing checkpoints, roughly


class Position(NamedTuple):
    """How far training is: the phase, counted from 0, and the number of epochs finished in it."""

    phase: int
    epoch: int


class Saved(NamedTuple):
    """The content of a checkpoint."""

    position: Position
    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]


@dataclass
class Checkpoint:
    """A file that is written after each epoch.

    `identity` describes what is trained, on which data and with which settings. `load` rejects a file with another
    identity. If epochs are so short that writing would take more than a small share of the time, some are skipped.
    """

    path: Path
    identity: Mapping[str, Any]
    _next_save: float = field(default=0.0, init=False)  # no earlier than this
    _started: float = field(default_factory=time.monotonic, init=False)  # moved back by the time of earlier runs

    def save(self, tensors: GetState, optimizer_state: GetState, position: Position) -> None:
        """Write the state atomically: the file has either the old state or the new one."""
        start = time.monotonic()
        if start < self._next_save:
            return
        state = optimizer_state()
        values = {f"value/{name}": value for name, value in tensors().items()}
        scalars: dict[str, dict[str, Any]] = {}
        for index, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    values[f"optimizer/{index}/{key}"] = value
                else:
                    scalars.setdefault(str(index), {})[key] = value
        header = {
            "identity": dict(self.identity),
            "at": list(position),
            "seconds": start - self._started,
            "groups": [{key: _as_number(value) for key, value in group.items()} for group in state["param_groups"]],
            "scalars": scalars,
        }
        storage.write(self.path, "checkpoint", header, values)
        end = time.monotonic()
        self._next_save = end + (end - start) / MAX_WRITING_SHARE

    def load(self) -> Saved | None:
        """Return the content of the file; None if it does not exist, is damaged or belongs to an earlier task.

        Raise `ValueError` if it has another identity.
        """
        if not self.path.exists():
            return None
        try:
            header, tensors = storage.read(self.path, "checkpoint")
        except storage.FileError as error:
            log.warning("%s; training starts from the beginning", error)
            return None
        found, wanted = header["identity"], dict(self.identity)
        if "settings" in found:
            found["settings"] = upgrade_settings(found["settings"])
            found["settings"].pop("backbone", None)  # early files have it; the digest of its tensors says more
        if found.get("task", 0) < wanted.get("task", 0):
            return None
        if found != wanted:
            differing = [change.removeprefix("settings.") for change in _changes("", found, wanted)]
            raise ValueError(
                f"the checkpoint '{self.path}' belongs to another run (it differs in: {', '.join(differing)}); "
                "repeat the call that wrote it, or delete it to start over"
            )
        for name, value in wanted.get("settings", {}).items():
            if unknown_in(decode(value)):
                log.warning(
                    "the checkpoint has only the repr of your own %s; training resumes with the present one", name
                )
        self._started -= header.get("seconds", 0.0)
        return Saved(Position(*header["at"]), _with_prefix("value/", tensors), _optimizer_state(header, tensors))


def identify(
    network: SharedNetwork, task: Task, examples: Examples, settings: Mapping[str, Any], fabric: "Fabric"
) -> dict[str, Any]:
    """Return the identity of learning a task, as JSON data: the task, the images, the settings and the initial weights.

    For a data set that is read again in each epoch, only the number of images and the known labels are compared.
    """
    return {
        "task": len(network.subnetworks),
        "classes": list(task.classes),
        "images": len(examples),
        "pixels and labels": examples.digest(),
        "settings": dict(settings),
        "backbone": storage.digest(network.initial),
        "earlier tasks": storage.digest(network.weights),
        "processes": fabric.world_size,
        "precision": precision_of(fabric),
    }


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """Return the differences between two identities or encoded settings, such as `train.epochs (10, now 11)`."""
    if isinstance(before, dict) and isinstance(now, dict) and before.get("type") == now.get("type"):
        inner = [_changes(f"{name}.{key}".removeprefix("."), before.get(key), now[key]) for key in now]
        return [change for changes in inner for change in changes]
    if before == now:
        return []
    are_short = not any(isinstance(value, dict | list) or len(str(value)) > MAX_VALUE for value in (before, now))
    return [f"{name} ({before}, now {now})" if are_short else name]


def _optimizer_state(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(index): dict(v) for index, v in header["scalars"].items()}
    for name, value in _with_prefix("optimizer/", tensors).items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": header["groups"]}


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
