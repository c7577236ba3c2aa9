"""Make model files that are damaged by chance, or built on purpose to break the reader."""

import copy
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import cps
from cps.storage import container as storage

ODD_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**24, 2**31, 2**63, 2**64, 10**30, 1e308, -0.0, 0.5, float("nan"), float("inf"),
    "", "x", "x" * 5000, "../../etc/passwd", "/dev/zero", "\x00", "\ud800", "ä", [], {}, [[]], [1], ["a"], [None], [-1],
    [2**40, 2**40], {"a": 1}, {"type": None}, {"type": []}, {"type": "Popen", "args": "ls"}, {"type": "Training"},
    {"type": "Training", "epochs": 10**9}, {"type": "Architecture", "name": "resnet32"},
    {"type": "Architecture", "name": 5}, {"type": "Architecture", "name": "timm:../x"},
    {"type": "Architecture", "name": "small", "channels": 1.5}, {"type": "MaxOutput"}, [{"type": "MaxOutput"}] * 3,
    {"type": "Normalize", "mean": [0.0], "std": [1.0]}, {"type": "Normalize", "mean": [], "std": []},
    {"type": "Normalize", "mean": [1e308] * 3, "std": [1e-308] * 3}, {"type": "ImportanceSignature", "norm": 1},
]  # fmt: skip
TYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


class ModelFile:
    """A valid model file, and its parts: the safetensors header (outer), cps's own header (inner) and the tensors."""

    def __init__(self, content: bytes, learner: cps.Learner):
        self.content, self.learner = content, learner
        length = int.from_bytes(content[:8], "little")
        self.outer: dict[str, Any] = json.loads(content[8 : 8 + length])
        self.data = content[8 + length :]
        self.inner: dict[str, Any] = json.loads(self.outer["__metadata__"]["header"])

    def sort_header(self) -> bytes:
        """Return the file with its header's keys sorted, since safetensors writes them in no fixed order."""
        return self.with_outer(json.dumps(self.outer, sort_keys=True))

    def with_outer(self, text: str, data: bytes | None = None) -> bytes:
        """Return the file with the text `text` as its outer header."""
        raw = text.encode("utf-8", "surrogatepass")
        return len(raw).to_bytes(8, "little") + raw + (self.data if data is None else data)

    def with_inner(self, text: str) -> bytes:
        """Return the file with the text `text` as its inner header, and the correct digest of it."""
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        metadata = {**self.outer["__metadata__"], "header": text, "digest": digest}
        return self.with_outer(json.dumps({**self.outer, "__metadata__": metadata}))


def make_model(folder: Path) -> ModelFile:
    """Learn two tasks with the smallest builtin backbone, save them to `folder`/sound.cps and return the file."""
    generator = torch.Generator().manual_seed(0)
    quick = cps.Training(1, batch_size=8)
    learner = cps.Learner(
        cps.Architecture("small"), rounds=1, train=quick, retrain=quick, fabric=cps.make_fabric(accelerator="cpu"),
        normalize=cps.Normalize((0.5,) * 3, (0.2,) * 3), augment=cps.Chain((cps.PadCrop(1), cps.Flip())),
    )  # fmt: skip
    for task, names in enumerate((["cat", "dog"], [7, 9])):
        images = torch.rand(8, 3, 6, 6, generator=generator)
        learner.learn(cps.Task(names, train=(images, names * 4)))
        learner.annotate(task, images=8)
    learner.save(folder / "sound.cps")
    return ModelFile(ModelFile((folder / "sound.cps").read_bytes(), learner).sort_header(), learner)


def change_bytes(model: ModelFile, rng: random.Random) -> bytes:
    """Change some bytes, mostly in the headers."""
    content = bytearray(model.content)
    end = len(content) if rng.random() < 0.3 else len(content) - len(model.data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        content[rng.randrange(end)] = rng.randrange(256)
    return bytes(content)


def cut_or_repeat(model: ModelFile, rng: random.Random) -> bytes:
    """Truncate or extend the file; remove, repeat or zero a part of it."""
    content = model.content
    start, stop = sorted(rng.randrange(len(content)) for _ in range(2))
    return rng.choice((
        content[:start], content[start:], content + content[start:stop], content[:start] + content[stop:],
        content[:start] + bytes(stop - start) + content[stop:], b"",
        rng.randbytes(rng.randrange(200)) + content[start:],
        rng.randrange(2**64).to_bytes(8, "little") + content[8:],
    ))  # fmt: skip


def edit_outer_header(model: ModelFile, rng: random.Random) -> bytes:
    """Edit the types, shapes, offsets and names of the tensors in the outer header."""
    outer = json.loads(json.dumps(model.outer))
    entry = outer[rng.choice([name for name in outer if name != "__metadata__"])]
    edit = rng.randrange(6)
    if edit == 0:
        entry["dtype"] = rng.choice(("F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", 3, None))
    elif edit == 1:
        entry["shape"] = rng.choice(([], [0], [2**63], [2**40, 2**40], [-1], [1] * 70, "x", [0, 2**62], [1.5]))
    elif edit == 2:
        entry["data_offsets"] = rng.choice(([0, 0], [5, 2], [0, 2**63], [-4, 4], [0], None, [0, len(model.data)]))
    elif edit == 3:
        _edit_json(outer, rng)
    elif edit == 4:
        return model.with_outer(_add_duplicate_key(json.dumps(outer), rng))
    else:
        return model.with_outer(_insert_deep_value(json.dumps(outer), rng), model.data * rng.choice((0, 1, 2)))
    return model.with_outer(json.dumps(outer))


def edit_inner_header(model: ModelFile, rng: random.Random) -> bytes:
    """Edit the inner header and correct its digest, as an attacker who knows the format would do."""
    inner = json.loads(json.dumps(model.inner))
    if rng.random() < 0.5:  # otherwise most edits would hit the long list of digests
        key = rng.choice(("settings", "classes", "statistics", "features", "input_shape", "notes", "fingerprints"))
        edited = {key: inner[key]}
        _edit_json(edited, rng)
        inner = {**{name: value for name, value in inner.items() if name != key}, **edited}
    for _ in range(rng.choice((1, 1, 2, 4))):
        _edit_json(inner, rng)
    text = json.dumps(inner)
    draw = rng.random()
    if draw < 0.1:
        text = _add_duplicate_key(text, rng)
    elif draw < 0.2:
        text = _insert_deep_value(text, rng)
    return model.with_inner(text)


def edit_tensors(model: ModelFile, rng: random.Random, folder: Path) -> bytes:
    """Change the values, shapes, types or names of some tensors, and correct all digests."""
    header = {name: value for name, value in model.inner.items() if name != "digests"}
    tensors = storage.read(folder / "sound.cps", "model")[1]
    for _ in range(rng.choice((1, 1, 3))):
        name = rng.choice(list(tensors))
        value = tensors.pop(name)
        shape = rng.choice(([], [0], [1], [7], [3, 0, 2], [*value.shape, 1], [2 * n for n in value.shape][:2]))
        tensors |= rng.choice((
            {}, {name: value.to(rng.choice(TYPES))}, {name: torch.zeros(shape, dtype=value.dtype)},
            {rng.choice((f"{name}/x", "../x", "", "task/9/head/bias", "é\n")): value}, {name: value, "x": value},
            {name: torch.full_like(value, rng.choice((0, 1, 255)))},
            {name: value * float("nan") if value.is_floating_point() else value},
            {name: value * 1e38 if value.is_floating_point() else value.roll(1)},
        ))  # fmt: skip
    storage.write(folder / "made.cps", "model", header, tensors)
    return ModelFile((folder / "made.cps").read_bytes(), model.learner).sort_header()


def edit_learner(model: ModelFile, rng: random.Random, folder: Path) -> bytes:
    """Change a learner and save it: the file is consistent, but no learner could have become like this."""
    learner = cps.load(folder / "sound.cps", fabric=model.learner.fabric)
    edits = (_edit_input_shape, _edit_setting, _edit_statistics, _edit_parameters, _edit_backbone, _edit_tasks)
    rng.choice(edits)(learner, rng)
    reseal(learner)
    learner.save(folder / "made.cps")
    return ModelFile((folder / "made.cps").read_bytes(), model.learner).sort_header()


def reseal(learner: cps.Learner) -> None:
    """Recompute the digests of all subnetworks, as if they had been sealed in their present state."""
    network = learner.network
    network.subnetworks = [replace(each, digest=network._digest(each)) for each in network.subnetworks]


def _edit_input_shape(learner: cps.Learner, rng: random.Random) -> None:
    shapes = ((3,), (3, 6), (1, 6, 6), (3, 1, 1), (3, 2, 900), (3, 6, 6, 6), (4, 9, 9), (2**23,), (3, 2**12, 2**12))
    learner.network.input_shape = rng.choice(shapes)


def _edit_setting(learner: cps.Learner, rng: random.Random) -> None:
    names = ("selectors", "rounds", "seed", "augment", "prune_images", "train", "retrain", "pruner", "normalize")
    values = (0, -1, True, None, "x", 2**70, (), (5,), (cps.MaxOutput(),), cps.Flip(), cps.Steps((1,), 0.5),
              cps.Normalize((1e38,) * 3, (1e-38,) * 3), cps.Normalize((0.5,), (1.0,)))  # fmt: skip
    config = copy.copy(learner.config)
    object.__setattr__(config, rng.choice(names), rng.choice(values))  # without the checks of `configure`
    learner.config = config


def _edit_statistics(learner: cps.Learner, rng: random.Random) -> None:
    for statistics in rng.choice(learner.network.subnetworks).statistics.values():
        for key, value in statistics.items():
            statistics[key] = rng.choice((value * float("nan"), value[:3], value[None], value.new_zeros(0), value[0]))


def _edit_parameters(learner: cps.Learner, rng: random.Random) -> None:
    network = learner.network
    subnetwork = rng.choice(network.subnetworks)
    for tensors in (network.weights, network.initial, subnetwork.private, subnetwork.head):
        for name in tensors:
            tensors[name] = tensors[name] * rng.choice((1.0, float("nan"), float("inf"), 1e30, -1.0))


def _edit_backbone(learner: cps.Learner, rng: random.Random) -> None:
    if rng.random() < 0.5:
        rng.choice(learner.network.subnetworks).head["weight"] = torch.zeros(2, rng.choice((1, 63, 65, 4096)))
    else:
        architectures = (
            None,
            cps.Architecture("small", 1),
            cps.Architecture("small", 64),
            cps.Architecture("resnet32"),
        )
        learner.architecture = rng.choice(architectures)


def _edit_tasks(learner: cps.Learner, rng: random.Random) -> None:
    subnetworks = learner.network.subnetworks
    subnetworks[:] = rng.choice(([], subnetworks[::-1], subnetworks[1:], subnetworks * 2))


def _edit_json(tree: Any, rng: random.Random) -> None:
    """Replace, remove, swap or add one value somewhere in JSON data, in place."""
    value = json.loads(json.dumps(rng.choice(ODD_VALUES)))
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        tree.update(x=value) if isinstance(tree, dict) else tree.append(value)
        return
    key, other = rng.choice(keys), rng.choice(keys)
    if isinstance(tree[key], dict | list) and rng.random() < 0.75:
        _edit_json(tree[key], rng)
    elif rng.random() < 0.2:
        del tree[key]
    elif rng.random() < 0.2:
        tree[key], tree[other] = tree[other], tree[key]
    else:
        tree[key] = value


def _add_duplicate_key(text: str, rng: random.Random) -> str:
    """Add a second value for a key, which JSON does not forbid."""
    return text.replace("{", '{"classes": ' + json.dumps(rng.choice(ODD_VALUES)) + ", ", rng.choice((1, 2, 3)))


def _insert_deep_value(text: str, rng: random.Random) -> str:
    """Insert a deeply nested or very long value somewhere into a JSON text."""
    depth = rng.choice((10, 1000, 100_000))
    deep = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * depth, "[" * depth))
    positions = [index for index, character in enumerate(text) if character in ":,["]
    position = rng.choice(positions) + 1
    return text[:position] + deep + ("," if rng.random() < 0.5 else "") + text[position:]


KINDS: dict[str, Callable[..., bytes]] = {  # the names appear in stored results
    "flipped": change_bytes, "cut": cut_or_repeat, "retold": edit_outer_header, "rewritten": edit_inner_header,
    "replaced": edit_tensors, "consistent": edit_learner,
}  # fmt: skip


def make_case(model: ModelFile, number: int, folder: Path) -> tuple[str, bytes]:
    """Return the kind and the content of a case, which depend on its number only."""
    rng = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    arguments = (model, rng, folder) if kind in ("replaced", "consistent") else (model, rng)
    return kind, KINDS[kind](*arguments)
