"""Model files that are damaged by chance or made on purpose to break what reads them."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import cps
from cps.storage import container as storage

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**24, 2**31, 2**63, 2**64, 10**30, 1e308, -0.0, 0.5, float("nan"), float("inf"),
    "", "x", "x" * 5000, "../../etc/passwd", "/dev/zero", "\x00", "\ud800", "ä", [], {}, [[]], [1], ["a"], [None], [-1],
    [2**40, 2**40], {"a": 1}, {"type": None}, {"type": []}, {"type": "Popen", "args": "ls"}, {"type": "Training"},
    {"type": "Training", "epochs": 10**9}, {"type": "Builtin", "name": "resnet32"}, {"type": "Builtin", "name": 5},
    {"type": "Builtin", "name": "small", "channels": 1.5}, {"type": "MaxOutput"}, [{"type": "MaxOutput"}] * 3,
    {"type": "Normalize", "mean": [0.0], "std": [1.0]}, {"type": "Normalize", "mean": [], "std": []},
    {"type": "Normalize", "mean": [1e308] * 3, "std": [1e-308] * 3}, {"type": "ImportanceSignature", "norm": 1},
]  # fmt: skip
TYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


class Model:
    """A sound model file in its parts: outer header, inner header, tensors and bytes."""

    def __init__(self, content: bytes, learner: cps.Learner):
        self.content, self.learner = content, learner
        length = int.from_bytes(content[:8], "little")
        self.outer: dict[str, Any] = json.loads(content[8 : 8 + length])
        self.data = content[8 + length :]
        self.inner: dict[str, Any] = json.loads(self.outer["__metadata__"]["header"])

    @property
    def ordered(self) -> bytes:
        """The same file with the names of its header in order; safetensors writes them in any."""
        return self.with_outer(json.dumps(self.outer, sort_keys=True))

    def with_outer(self, text: str, data: bytes | None = None) -> bytes:
        """Return a file with another outer header, whatever it says."""
        raw = text.encode("utf-8", "surrogatepass")
        return len(raw).to_bytes(8, "little") + raw + (self.data if data is None else data)

    def with_inner(self, text: str) -> bytes:
        """Return a file with another inner header, whose digest is right."""
        sha = storage._sha(text.encode("utf-8", "replace").decode())
        metadata = {**self.outer["__metadata__"], "header": text, "digest": sha}
        return self.with_outer(json.dumps({**self.outer, "__metadata__": metadata}))


def make_model(folder: Path) -> Model:
    """Return a model of two tasks, as small as the builtin backbones allow."""
    draws = torch.Generator().manual_seed(0)
    quick = cps.Training(1, batch_size=8)
    learner = cps.Learner(
        cps.Builtin("small"), rounds=1, train=quick, retrain=quick, fabric=cps.make_fabric(accelerator="cpu"),
        normalize=cps.Normalize((0.5,) * 3, (0.2,) * 3), augment=cps.Chain((cps.PadCrop(1), cps.Flip())),
    )  # fmt: skip
    for names in (["cat", "dog"], [7, 9]):
        images = torch.rand(8, 3, 6, 6, generator=draws)
        learner.learn(cps.Task(names, train=(images, names * 4))).notes["images"] = 8
    learner.save(folder / "sound.cps")
    return Model(Model((folder / "sound.cps").read_bytes(), learner).ordered, learner)


def flipped(model: Model, chance: random.Random) -> bytes:
    """Change some bytes, more often where the headers are."""
    content = bytearray(model.content)
    end = len(content) if chance.random() < 0.3 else len(content) - len(model.data)
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        content[chance.randrange(end)] = chance.randrange(256)
    return bytes(content)


def cut(model: Model, chance: random.Random) -> bytes:
    """Cut the file short, make it longer, repeat or blank a stretch of it."""
    content = model.content
    start, stop = sorted(chance.randrange(len(content)) for _ in range(2))
    return chance.choice((
        content[:start], content[start:], content + content[start:stop], content[:start] + content[stop:],
        content[:start] + bytes(stop - start) + content[stop:], b"",
        chance.randbytes(chance.randrange(200)) + content[start:],
        chance.randrange(2**64).to_bytes(8, "little") + content[8:],
    ))  # fmt: skip


def retold(model: Model, chance: random.Random) -> bytes:
    """Edit the outer header: types, shapes, places and names of the tensors."""
    outer = json.loads(json.dumps(model.outer))
    entry = outer[chance.choice([name for name in outer if name != "__metadata__"])]
    what = chance.randrange(6)
    if what == 0:
        entry["dtype"] = chance.choice(
            ("F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", 3, None)
        )
    elif what == 1:
        entry["shape"] = chance.choice(([], [0], [2**63], [2**40, 2**40], [-1], [1] * 70, "x", [0, 2**62], [1.5]))
    elif what == 2:
        entry["data_offsets"] = chance.choice(([0, 0], [5, 2], [0, 2**63], [-4, 4], [0], None, [0, len(model.data)]))
    elif what == 3:
        _change(outer, chance)
    elif what == 4:
        return model.with_outer(_doubled(json.dumps(outer), chance))
    else:
        return model.with_outer(_nested(json.dumps(outer), chance), model.data * chance.choice((0, 1, 2)))
    return model.with_outer(json.dumps(outer))


def rewritten(model: Model, chance: random.Random) -> bytes:
    """Edit the inner header, with the right digest: what somebody who knows the format would do."""
    inner = json.loads(json.dumps(model.inner))
    if chance.random() < 0.5:  # elsewhere than in the long list of digests
        part = chance.choice(("settings", "classes", "statistics", "features", "input_shape", "notes", "fingerprints"))
        box = {part: inner[part]}
        _change(box, chance)
        inner = {**{name: value for name, value in inner.items() if name != part}, **box}
    for _ in range(chance.choice((1, 1, 2, 4))):
        _change(inner, chance)
    text = json.dumps(inner)
    what = chance.random()
    return model.with_inner(_doubled(text, chance) if what < 0.1 else _nested(text, chance) if what < 0.2 else text)


def replaced(model: Model, chance: random.Random, folder: Path) -> bytes:
    """Change the values, shape or type of some tensors, or their names, with the right digests everywhere."""
    header = {name: value for name, value in model.inner.items() if name != "digests"}
    tensors = storage.read(folder / "sound.cps", "model")[1]
    for _ in range(chance.choice((1, 1, 3))):
        name = chance.choice(list(tensors))
        value = tensors.pop(name)
        shape = chance.choice(([], [0], [1], [7], [3, 0, 2], [*value.shape, 1], [2 * n for n in value.shape][:2]))
        tensors |= chance.choice((
            {}, {name: value.to(chance.choice(TYPES))}, {name: torch.zeros(shape, dtype=value.dtype)},
            {chance.choice((f"{name}/x", "../x", "", "task/9/head/bias", "é\n")): value}, {name: value, "x": value},
            {name: torch.full_like(value, chance.choice((0, 1, 255)))},
            {name: value * float("nan") if value.is_floating_point() else value},
            {name: value * 1e38 if value.is_floating_point() else value.roll(1)},
        ))  # fmt: skip
    storage.write(folder / "made.cps", "model", header, tensors)
    return Model((folder / "made.cps").read_bytes(), model.learner).ordered


def consistent(model: Model, chance: random.Random, folder: Path) -> bytes:
    """Change a learner and save it: nothing in the file contradicts anything else, and yet it is odd."""
    learner = cps.load(folder / "sound.cps", fabric=model.learner.fabric)
    chance.choice((_odd_images, _odd_setting, _odd_statistics, _odd_numbers, _odd_backbone, _odd_tasks))(
        learner, chance
    )
    reseal(learner)
    learner.save(folder / "made.cps")
    return Model((folder / "made.cps").read_bytes(), model.learner).ordered


def reseal(learner: cps.Learner) -> None:
    """Make what was changed look as if it had been sealed so."""
    network = learner.network
    network.subnetworks = [replace(each, digest=each.digest_in(network.weights)) for each in network.subnetworks]


def _odd_images(learner: cps.Learner, chance: random.Random) -> None:
    shapes = ((3,), (3, 6), (1, 6, 6), (3, 1, 1), (3, 2, 900), (3, 6, 6, 6), (4, 9, 9), (2**23,), (3, 2**12, 2**12))
    learner.network.input_shape = chance.choice(shapes)


def _odd_setting(learner: cps.Learner, chance: random.Random) -> None:
    names = ("selectors", "rounds", "seed", "augment", "prune_images", "train", "retrain", "pruner", "normalize")
    values = (0, -1, True, None, "x", 2**70, (), (5,), (cps.MaxOutput(),), cps.Flip(), cps.Steps((1,), 0.5),
              cps.Normalize((1e38,) * 3, (1e-38,) * 3), cps.Normalize((0.5,), (1.0,)))  # fmt: skip
    setattr(learner, chance.choice(names), chance.choice(values))


def _odd_statistics(learner: cps.Learner, chance: random.Random) -> None:
    for kept in chance.choice(learner.network.subnetworks).statistics.values():
        for key, value in kept.items():
            kept[key] = chance.choice((value * float("nan"), value[:3], value[None], value.new_zeros(0), value[0]))


def _odd_numbers(learner: cps.Learner, chance: random.Random) -> None:
    network = learner.network
    chosen = chance.choice(network.subnetworks)
    for tensors in (network.weights, network.initial, chosen.private, chosen.head):
        for name in tensors:
            tensors[name] = tensors[name] * chance.choice((1.0, float("nan"), float("inf"), 1e30, -1.0))


def _odd_backbone(learner: cps.Learner, chance: random.Random) -> None:
    if chance.random() < 0.5:
        chance.choice(learner.network.subnetworks).head["weight"] = torch.zeros(2, chance.choice((1, 63, 65, 4096)))
    else:
        others = (None, cps.Builtin("small", 1), cps.Builtin("small", 64), cps.Builtin("resnet32"))
        learner.builtin = chance.choice(others)


def _odd_tasks(learner: cps.Learner, chance: random.Random) -> None:
    known = learner.network.subnetworks
    known[:] = chance.choice(([], known[::-1], known[1:], known * 2))


def _change(tree: Any, chance: random.Random) -> None:
    """Replace, remove, swap or add one thing somewhere in a tree of JSON."""
    odd = json.loads(json.dumps(chance.choice(ODD)))
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        tree.update(x=odd) if isinstance(tree, dict) else tree.append(odd)
        return
    key, other = chance.choice(keys), chance.choice(keys)
    if isinstance(tree[key], dict | list) and chance.random() < 0.75:
        _change(tree[key], chance)
    elif chance.random() < 0.2:
        del tree[key]
    elif chance.random() < 0.2:
        tree[key], tree[other] = tree[other], tree[key]
    else:
        tree[key] = odd


def _doubled(text: str, chance: random.Random) -> str:
    """Name something twice, which JSON does not forbid."""
    return text.replace("{", '{"classes": ' + json.dumps(chance.choice(ODD)) + ", ", chance.choice((1, 2, 3)))


def _nested(text: str, chance: random.Random) -> str:
    """Put something deep or long somewhere into a JSON text."""
    depth = chance.choice((10, 1000, 100_000))
    deep = chance.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * depth, "[" * depth))
    places = [index for index, letter in enumerate(text) if letter in ":,["]
    place = chance.choice(places) + 1
    return text[:place] + deep + ("," if chance.random() < 0.5 else "") + text[place:]


KINDS: dict[str, Callable[..., bytes]] = {
    "flipped": flipped, "cut": cut, "retold": retold, "rewritten": rewritten, "replaced": replaced,
    "consistent": consistent,
}  # fmt: skip


def make_case(model: Model, number: int, folder: Path) -> tuple[str, bytes]:
    """Return the kind and the content of a case; its number alone decides both."""
    chance = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    arguments = (model, chance, folder) if kind in ("replaced", "consistent") else (model, chance)
    return kind, KINDS[kind](*arguments)
