"""The model file: a shared network, its subnetworks and the learner's settings, in one file.

docs/file-format.md describes it. Names in the file never change, so some keys keep words that the code no longer uses:
"mirrors" holds the tasks with `flips`, "turns" their `num_rotations`, and "fingerprints" the digests.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cps.network.architectures import Architecture
from cps.network.masks import Masks, full_masks, is_subset, masks_like, pack, union_of, unpack
from cps.network.partition import set_tensors
from cps.network.shared import NetworkState, SharedNetwork
from cps.network.subnetwork import Subnetwork, check_sealed
from cps.storage import container as storage
from cps.storage.container import FileError
from cps.storage.settings_codec import decode, encode, upgrade_settings

TASK_KINDS = {  # the tensors of a task: name -> what they are
    "mask": "masks", "private": "weights", "head": "weights", "pretrained_head": "weights", "statistics": "statistics",
}  # fmt: skip


def write_model(
    path: str | Path, network: SharedNetwork, settings: Mapping[str, Any], architecture: Architecture | None
) -> None:
    """Write the network and the learner's encoded settings to a model file.

    Raise `RuntimeError` if a sealed subnetwork has changed, and `ValueError` if a note is not JSON data.
    """
    network.check_sealed()
    for index, subnetwork in enumerate(network.subnetworks):
        _check_notes(index, subnetwork.notes)
    tensors, is_unchanged = model_tensors(network)
    header = network_header(network, is_unchanged) | {"settings": {**settings, "backbone": encode(architecture)}}
    storage.write(path, "model", header, tensors)


def network_header(network: SharedNetwork, is_unchanged: bool) -> dict[str, Any]:
    """Return what the header of a file says about a network; `is_unchanged` if its weights are as they came."""
    return {
        "classes": [list(subnetwork.classes) for subnetwork in network.subnetworks],
        "statistics": [
            {name: sorted(kept) for name, kept in subnetwork.statistics.items()} for subnetwork in network.subnetworks
        ],
        "notes": [dict(subnetwork.notes) for subnetwork in network.subnetworks],
        "mirrors": [index for index, subnetwork in enumerate(network.subnetworks) if subnetwork.flips],
        "frozen": [index for index, subnetwork in enumerate(network.subnetworks) if subnetwork.is_frozen],
        "pretrained_heads": [index for index, each in enumerate(network.subnetworks) if each.pretrained_head],
        "unchanged": is_unchanged,
        "turns": {str(i): sub.num_rotations for i, sub in enumerate(network.subnetworks) if sub.num_rotations > 1},
        "features": [subnetwork.head["weight"].shape[1] for subnetwork in network.subnetworks],
        "input_shape": list(network.input_shape or ()),
        "input_range": list(network.input_range or ()),
        "fingerprints": [subnetwork.digest for subnetwork in network.subnetworks],
    }


def model_tensors(network: SharedNetwork) -> tuple[dict[str, Tensor], bool]:
    """Return the tensors of a model file by name, and whether the weights are still as they came."""
    tensors = {f"weight/{name}": value for name, value in network.weights.items()}
    tensors |= {f"initial/{name}": value for name, value in network.initial.items()}
    tensors |= {f"trunk/{name}": value for name, value in network.trunk_tensors().items()}
    pretrained = network.pretrained
    is_unchanged = pretrained is not None and _are_equal(pretrained, network.weights)
    if pretrained is not None and not is_unchanged:
        tensors |= {f"pretrained/{name}": value for name, value in pretrained.items()}
    tensors |= {f"taken/{name}": pack(mask) for name, mask in network.taken.items()}
    for index, subnetwork in enumerate(network.subnetworks):
        tensors |= {f"task/{index}/{name}": value for name, value in _subnetwork_tensors(subnetwork).items()}
    return tensors, is_unchanged


def bytes_by_kind(network: SharedNetwork) -> dict[str, int]:
    """Return the bytes of a model file's tensors by what they are."""
    kinds = {"weight": "weights", "trunk": "weights", "pretrained": "weights", "initial": "weights", "taken": "masks"}
    sizes: dict[str, int] = {}
    for name, value in model_tensors(network)[0].items():
        first, *rest = name.split("/")
        kind = kinds.get(first) or TASK_KINDS[rest[1]]
        sizes[kind] = sizes.get(kind, 0) + value.nbytes
    return sizes


def read_model(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header of a model file, with its settings decoded, and its tensors. Raise `FileError` if damaged."""
    header, tensors = storage.read(path, "model")
    check_header(path, header)
    try:
        settings = upgrade_settings(header["settings"])
        header["settings"] = {name: decode(value) for name, value in settings.items()}
    except ValueError as error:
        raise FileError(f"'{path}' has a {error}") from None
    except RecursionError:
        raise FileError(f"'{path}' has damaged settings: they are nested too deep") from None
    return header, tensors


class ModelContent(NamedTuple):
    """The tensors of a model file, by what they are."""

    weights: dict[str, Tensor]
    initial: dict[str, Tensor]
    trunk: dict[str, Tensor]
    pretrained: dict[str, Tensor] | None
    taken: Masks
    subnetworks: list[Subnetwork]

    def check(self, path: str | Path) -> None:
        """Raise `FileError` if a subnetwork uses free weights or differs from its digest."""
        if not is_subset(union_of((subnetwork.masks for subnetwork in self.subnetworks), self.taken), self.taken):
            raise FileError(f"'{path}' is inconsistent: a subnetwork uses weights that are not marked as taken")
        try:
            pretrained = {**self.trunk, **self.initial, **(self.pretrained or {})}
            check_sealed(self.subnetworks, self.weights, pretrained)
        except RuntimeError as error:
            raise FileError(f"'{path}' is inconsistent: {error}") from None


def parse_model(path: str | Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> ModelContent:
    """Return the content of a model file without its backbone; the shapes of all tensors are checked."""
    shared, private, trunk = (
        {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}
        for kind in ("weight/", "initial/", "trunk/")
    )
    no_masks = full_masks(shared, on=False)
    return _parse(_Reader(path, tensors, "is inconsistent"), header, shared, private, trunk, no_masks)


def fill_network(network: SharedNetwork, path: str | Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Set the weights and subnetworks of a new network from a model file, checking every tensor."""
    network.make_private([name for name in network.weights if f"initial/{name}" in tensors])
    if not network.weights:
        raise FileError(f"'{path}' does not fit this backbone: it shares no weight")
    reader = _Reader(path, tensors, "does not fit this backbone")
    no_masks = masks_like(network.taken, on=False)
    content = _parse(reader, header, network.weights, network.initial, network.trunk_tensors(), no_masks)
    content.check(path)
    input_range = header.get("input_range")  # missing in early files
    network.set_state(
        NetworkState(
            weights=content.weights,
            taken=content.taken,
            subnetworks=content.subnetworks,
            input_shape=tuple(header["input_shape"]) or None,
            input_range=(input_range[0], input_range[1]) if input_range else None,
            initial=content.initial,
            parts=network.parts,
            pretrained=content.pretrained,
        )
    )
    if network.trunk is not None:
        set_tensors(network.trunk, content.trunk)


def _parse(
    reader: "_Reader",
    header: dict[str, Any],
    shared: Mapping[str, Tensor],
    private: Mapping[str, Tensor],
    in_trunk: Mapping[str, Tensor],
    no_masks: Masks,
) -> ModelContent:
    """Return the content of a file for a network whose tensors and masks have these shapes and dtypes."""
    weights, initial = reader.take_all("weight", shared), reader.take_all("initial", private)
    trunk = reader.take_all("trunk", in_trunk)
    pretrained = None
    if header.get("unchanged"):  # missing in early files
        pretrained = {name: value.clone() for name, value in weights.items()}
    elif any(name.startswith("pretrained/") for name in reader.rest):
        pretrained = reader.take_all("pretrained", shared)
    taken = reader.masks("taken", no_masks)
    subnetworks = [_subnetwork(reader, header, task, initial, no_masks) for task in range(len(header["classes"]))]
    if pretrained is None and any(subnetwork.uses_pretrained for subnetwork in subnetworks):
        raise FileError(f"'{reader.path}' {reader.problem}: a task needs the pretrained weights, which it lacks")
    reader.check_all_taken()
    return ModelContent(weights, initial, trunk, pretrained, taken, subnetworks)


def _subnetwork(
    reader: "_Reader",
    header: dict[str, Any],
    task: int,
    initial: Mapping[str, Tensor],
    no_masks: Masks,
) -> Subnetwork:
    """Return the subnetwork of a task; all frozen ones share `no_masks`."""
    is_frozen = task in header.get("frozen", [])  # missing in early files
    names, features = header["classes"][task], header["features"][task]
    outputs = len(names) * header["turns"].get(str(task), 1)
    head = {
        "weight": reader.take(f"task/{task}/head/weight", (outputs, features)),
        "bias": reader.take(f"task/{task}/head/bias", (outputs,)),
    }
    pretrained_head = {}
    if task in header.get("pretrained_heads", []):  # missing in early files
        pretrained_head = {"weight": reader.take(f"task/{task}/pretrained_head/weight")}
        if tuple(pretrained_head["weight"].shape[:1]) != (outputs,) or pretrained_head["weight"].ndim != 2:
            raise FileError(f"'{reader.path}' {reader.problem}: the pretrained head of task {task} has another shape")
    private = {}
    if not is_frozen:
        private = reader.take_all(f"task/{task}/private", initial)
    statistics = {
        selector: {key: reader.take(f"task/{task}/statistics/{selector}/{key}") for key in keys}
        for selector, keys in header["statistics"][task].items()
    }
    masks = no_masks if is_frozen else reader.masks(f"task/{task}/mask", no_masks)
    return Subnetwork(
        tuple(names),
        masks,
        private,
        head,
        statistics,
        notes=header["notes"][task],
        flips=task in header["mirrors"],
        digest=header["fingerprints"][task],
        is_frozen=is_frozen,
        pretrained_head=pretrained_head,
    )


def _are_equal(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def _check_notes(task: int, notes: Mapping[str, Any]) -> None:
    """Raise `ValueError` for notes that are not JSON data."""
    for key, value in notes.items():
        try:
            json.dumps({key: value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"note {key!r} of task {task} must be JSON data: {error}") from None


def _subnetwork_tensors(subnetwork: Subnetwork) -> dict[str, Tensor]:
    """Return the tensors of a subnetwork by their names in the file, without the prefix of the task."""
    masks = {} if subnetwork.is_frozen else subnetwork.masks
    tensors = {f"mask/{name}": pack(mask) for name, mask in masks.items()}
    tensors |= {f"private/{name}": value for name, value in subnetwork.private.items()}
    tensors |= {f"head/{name}": value for name, value in subnetwork.head.items()}
    tensors |= {f"pretrained_head/{name}": value for name, value in subnetwork.pretrained_head.items()}
    for selector, kept in subnetwork.statistics.items():
        tensors |= {f"statistics/{selector}/{key}": value for key, value in kept.items()}
    return tensors


class _Reader:
    """Takes tensors out of a file one by one, checks each, and finds those that are left over.

    Errors say that the file has the `problem`.
    """

    def __init__(self, path: str | Path, tensors: dict[str, Tensor], problem: str):
        self.path, self.problem = path, problem
        self.rest = dict(tensors)

    def take(self, name: str, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        value = self.rest.pop(name, None)
        if value is None:
            raise FileError(f"'{self.path}' {self.problem}: tensor '{name}' is missing")
        expected = value.shape if shape is None else tuple(shape)
        if tuple(value.shape) != tuple(expected) or value.dtype != dtype:
            raise FileError(
                f"'{self.path}' {self.problem}: tensor '{name}' is "
                f"{_describe(value.dtype, value.shape)}, expected {_describe(dtype, expected)}"
            )
        return value

    def take_all(self, prefix: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.take(f"{prefix}/{name}", value.shape, value.dtype) for name, value in like.items()}

    def masks(self, prefix: str, like: Masks) -> Masks:
        masks = {}
        for name, mask in like.items():
            packed = self.take(f"{prefix}/{name}", ((mask.numel() + 7) // 8,), torch.uint8)
            masks[name] = unpack(packed, mask.shape)
        return masks

    def check_all_taken(self) -> None:
        if self.rest:
            raise FileError(f"'{self.path}' {self.problem}: unexpected tensor '{min(self.rest)}'")


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def check_header(path: str | Path, header: dict[str, Any]) -> None:
    """Raise `FileError` for a header whose parts have the wrong types or lengths."""
    lists = [header.get(key) for key in ("classes", "statistics", "features", "fingerprints", "notes")]
    is_valid = (
        all(isinstance(part, list) and len(part) == len(lists[0] or []) for part in lists)
        and all(isinstance(notes, dict) for notes in header["notes"])
        and all(_all_are((str, int), names) for names in header["classes"])
        and all(isinstance(s, dict) and _all_are(str, *s.values()) for s in header["statistics"])
        and _all_are(
            int,
            header["features"],
            header.get("input_shape"),
            header.get("mirrors"),
            header.get("frozen", []),
            header.get("pretrained_heads", []),
        )
        and _all_are((int, float), header.get("input_range", []))
        and _is_range(header.get("input_range", []))
        and _all_are(str, header["fingerprints"])
        and isinstance(header.get("settings"), dict)
        and isinstance(header.get("turns"), dict)
        and isinstance(header.get("unchanged", False), bool)
        and all(num_rotations == 4 for num_rotations in header["turns"].values())
        and all(0 < number < 2**24 for number in (*header["features"], *header["input_shape"]))
        and ((0 < math.prod(header["input_shape"]) < 2**28 and bool(header["input_shape"])) or not header["classes"])
    )
    if not is_valid:
        raise FileError(f"'{path}' has a damaged header")
    if any(len(set(names)) != len(names) or not names for names in header["classes"]):
        raise FileError(f"'{path}' has a damaged header: a task has a class twice, or no class")


def _is_range(values: list[float]) -> bool:
    """Return True for two finite numbers in order, or for an empty list, as in early files."""
    return not values or (len(values) == 2 and -math.inf < values[0] <= values[1] < math.inf)


def _all_are(kinds: Any, *lists: Any) -> bool:
    return all(
        isinstance(items, list) and all(isinstance(i, kinds) and not isinstance(i, bool) for i in items)
        for items in lists
    )
