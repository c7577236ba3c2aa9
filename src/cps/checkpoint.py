"""Checkpoints: everything a task in the making needs to go on after a crash, as a safetensors file."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cps import storage
from cps.draft import Draft
from cps.masks import pack, unpack
from cps.partition import named_tensors

log = logging.getLogger(__name__)

BUSY_SHARE = 0.1  # writing checkpoints takes at most about this share of the time


class Position(NamedTuple):
    """How far learning has come: the phase (0: dense, then one per round) and the epochs done in it."""

    phase: int
    epoch: int


@dataclass
class Checkpoint:
    """Where a draft is saved after each epoch.

    `identity` says what is being learned, from what and how; a file that says otherwise is refused. Where
    epochs are so short that writing would take longer than a tenth of the time, some are skipped.
    """

    path: Path
    identity: Mapping[str, Any]
    _free_at: float = field(default=0.0, init=False)

    def save(self, draft: Draft, optimizer: torch.optim.Optimizer, at: Position, *, last: bool) -> None:
        """Write the draft and its optimizer; the file holds the old state or the new, never a mixture."""
        began = time.monotonic()
        if began < self._free_at and not last:
            return
        state = optimizer.state_dict()
        tensors = {f"value/{name}": value for name, value in named_tensors(draft.model).items()}
        tensors |= {f"mask/{name}": pack(mask) for name, mask in draft.masks.items()}
        tensors |= {f"warm/{name}": value for name, value in (draft.warm or {}).items()}
        scalars: dict[str, dict[str, Any]] = {}
        for index, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{index}/{key}"] = value
                else:
                    scalars.setdefault(str(index), {})[key] = value
        header = {
            "identity": dict(self.identity),
            "position": list(at),
            "groups": state["param_groups"],
            "scalars": scalars,
        }
        storage.write(self.path, "checkpoint", header, tensors)
        done = time.monotonic()
        self._free_at = done + (done - began) / BUSY_SHARE

    def load(self, draft: Draft) -> tuple[Position, dict[str, Any]] | None:
        """Restore the draft from the file; return where it stood and the optimizer's state, if there is one."""
        if not self.path.exists():
            return None
        try:
            header, tensors = storage.read(self.path, "checkpoint")
        except storage.FileError as error:
            log.warning("%s; the task starts from its beginning", error)
            return None
        if header["identity"] != dict(self.identity):
            differing = [key for key, value in self.identity.items() if header["identity"].get(key) != value]
            raise ValueError(
                f"the checkpoint '{self.path}' is of other work (it differs in: {', '.join(differing)}); "
                "repeat the call that made it, or delete it to start the task again"
            )
        masks = {
            name: unpack(tensors[f"mask/{name}"], mask.shape).to(mask.device)
            for name, mask in draft.masks.items()
        }
        warm = {name: value.to(draft_device(draft)) for name, value in _under("warm/", tensors).items()}
        draft.restore(masks, _under("value/", tensors), warm or None)
        return Position(*header["position"]), _optimizer_state(header, tensors)


def draft_device(draft: Draft) -> torch.device:
    """Return the device a draft is on."""
    return next(draft.model.parameters()).device


def _optimizer_state(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(index): dict(v) for index, v in header["scalars"].items()}
    for name, value in _under("optimizer/", tensors).items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": header["groups"]}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
