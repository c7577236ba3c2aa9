"""Checkpoints: everything that training needs to go on after a crash, as a safetensors file."""

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
from cps.storage.settings_codec import decode, encode, unknown_in, upgrade_settings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

log = logging.getLogger(__name__)

State = Callable[[], dict[str, Any]]  # asked for only when it is written
BUSY_SHARE = 0.01  # writing checkpoints takes at most about this share of the time


class Position(NamedTuple):
    """How far training has come: the phase, from 0, and the epochs done in it."""

    phase: int
    epoch: int


class Saved(NamedTuple):
    """What a checkpoint holds."""

    at: Position
    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]


@dataclass
class Checkpoint:
    """A file that is written after each epoch.

    `identity` says what is being trained, on what and how; a file that says otherwise is refused. Where
    epochs are so short that writing would take more than a small share of the time, some are skipped.
    """

    path: Path
    identity: Mapping[str, Any]
    _free_at: float = field(default=0.0, init=False)
    _since: float = field(default_factory=time.monotonic, init=False)  # less what earlier calls took

    def save(self, tensors: State, optimizer_state: State, at: Position) -> None:
        """Write the state; the file holds the old one or the new one, never a mixture."""
        began = time.monotonic()
        if began < self._free_at:
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
            "at": list(at),
            "seconds": began - self._since,
            "groups": [{key: _plain(value) for key, value in group.items()} for group in state["param_groups"]],
            "scalars": scalars,
        }
        storage.write(self.path, "checkpoint", header, values)
        done = time.monotonic()
        self._free_at = done + (done - began) / BUSY_SHARE

    def load(self) -> Saved | None:
        """Return what the file holds; None if there is none, or only a damaged one or one of earlier work."""
        if not self.path.exists():
            return None
        try:
            header, tensors = storage.read(self.path, "checkpoint")
        except storage.FileError as error:
            log.warning("%s; training starts from its beginning", error)
            return None
        found, wanted = header["identity"], dict(self.identity)
        if "settings" in found:
            found["settings"] = upgrade_settings(found["settings"])
            found["settings"].pop("backbone", None)  # which early ones name; its tensors tell more
        if found.get("task", 0) < wanted.get("task", 0):
            return None
        if found != wanted:
            differing = [key for key, value in wanted.items() if found.get(key) != value and key != "settings"]
            differing += _changes("", found.get("settings", {}), wanted.get("settings", {}))
            raise ValueError(
                f"the checkpoint '{self.path}' is of other work (it differs in: {', '.join(differing)}); "
                "repeat the call that made it, or delete it to start again"
            )
        for name, value in wanted.get("settings", {}).items():
            if unknown_in(decode(value)):
                log.warning(
                    "a checkpoint knows your own %s only by how it prints; it goes on with what it is now", name
                )
        self._since -= header.get("seconds", 0.0)
        return Saved(Position(*header["at"]), _under("value/", tensors), _optimizer_state(header, tensors))


def identify(
    network: SharedNetwork, task: Task, examples: Examples, settings: Mapping[str, Any], fabric: "Fabric"
) -> dict[str, Any]:
    """Return what learning a task starts from, and with what: plain data that another start would not equal.

    Of a data set that is read anew in each epoch, only the number of images and the labels it tells are compared.
    """
    return {
        "task": len(network.subnetworks),
        "classes": list(task.classes),
        "images": len(examples),
        "pixels and labels": examples.digest(),
        "settings": {name: encode(value) for name, value in settings.items() if name != "backbone"},
        "backbone": storage.digest(network.initial),
        "earlier tasks": storage.digest(network.weights),
        "processes": fabric.world_size,
        "precision": precision_of(fabric),
    }


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """Return what differs between settings as plain data, in words: `train.epochs (10, now 11)`."""
    if isinstance(before, dict) and isinstance(now, dict) and before.get("type") == now.get("type"):
        inner = [_changes(f"{name}.{key}".removeprefix("."), before.get(key), now[key]) for key in now]
        return [change for changes in inner for change in changes]
    if before == now:
        return []
    are_short = not any(isinstance(value, dict | list) for value in (before, now))
    return [f"{name} ({before}, now {now})" if are_short else name]


def _optimizer_state(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(index): dict(v) for index, v in header["scalars"].items()}
    for name, value in _under("optimizer/", tensors).items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": header["groups"]}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
