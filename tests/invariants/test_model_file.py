"""Invariant 6: a model file round-trips exactly; a damaged or hostile one gives a clear error and runs no code."""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import cps
from cps.network.masks import full_masks, pack, unpack
from cps.network.shared import SharedNetwork
from cps.storage import container as storage
from samples import conv_net, make_task


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Return a learner with two tasks of named classes, and its model file."""
    torch.manual_seed(0)
    training = cps.Training(1, cps.SGD(0.01), cps.Steps((1,), 0.5), batch_size=16)
    learner = cps.Learner(
        conv_net(), rounds=1, train=training, retrain=training, fabric=cps.make_fabric(accelerator="cpu"),
        normalize=cps.Normalize((0.5, 0.5), (0.2, 0.2)), augment=cps.Chain((cps.PadCrop(1), cps.Flip())),
    )  # fmt: skip
    images, labels = make_task(0).train
    learner.learn(cps.Task(["häschen", "cat\n"], train=(images, [label % 2 for label in labels])))
    learner.learn(make_task(10))
    path = tmp_path_factory.mktemp("model") / "model.cps"
    learner.save(path)
    return learner, path


def test_a_model_file_round_trips_exactly(learned, tmp_path):
    learner, path = learned
    loaded = cps.load(path, conv_net(), fabric=learner.fabric)
    for task in range(2):
        assert loaded.fingerprint(task) == learner.fingerprint(task)
        ours, theirs = learner.network.subnetworks[task], loaded.network.subnetworks[task]
        assert ours.classes == theirs.classes
        for name, kept in ours.statistics.items():
            assert all(torch.equal(value, theirs.statistics[name][key]) for key, value in kept.items())
    for part in ("weights", "initial", "taken"):
        ours, theirs = getattr(learner.network, part), getattr(loaded.network, part)
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    for name in ("train", "retrain", "pruner", "rounds", "augment", "normalize", "selectors", "seed"):
        assert getattr(loaded, name) == getattr(learner, name)
    loaded.save(tmp_path / "again.cps")
    again = cps.load(tmp_path / "again.cps", conv_net(), fabric=learner.fabric)
    assert again.fingerprint(1) == learner.fingerprint(1)


def test_a_loaded_learner_learns_on_as_the_original_would(learned, tmp_path):
    _, path = learned
    first, second = (cps.load(path, conv_net(), fabric=learned[0].fabric) for _ in range(2))
    first.learn(make_task(20))
    first.save(tmp_path / "three.cps")
    second.learn(make_task(20))
    assert first.fingerprint(2) == second.fingerprint(2)


def test_any_safetensors_reader_opens_it(learned):
    tensors = load_file(learned[1])
    assert tensors["weight/0.weight"].shape == (8, 2, 3, 3)
    assert tensors["task/1/mask/3.weight"].dtype == torch.uint8


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(learned, tmp_path, keep):
    content = learned[1].read_bytes()
    path = tmp_path / "short.cps"
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(cps.FileError, match=r"short\.cps"):
        cps.load(path, conv_net())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_flipped_bit_is_noticed(learned, tmp_path, data):
    content = bytearray(learned[1].read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped.cps"
    path.write_bytes(content)
    try:
        loaded = cps.load(path, conv_net(), fabric=learned[0].fabric)
    except cps.FileError:
        return
    # Only a flip in the padding of the header, which carries nothing, may pass.
    assert [loaded.fingerprint(t) for t in range(2)] == [learned[0].fingerprint(t) for t in range(2)]
    assert loaded.network.subnetworks[0].classes == ("häschen", "cat\n")


def test_a_flipped_bit_in_a_tensor_names_the_tensor(learned, tmp_path):
    content = bytearray(learned[1].read_bytes())
    content[-1] ^= 1
    (tmp_path / "flipped.cps").write_bytes(content)
    with pytest.raises(cps.FileError, match=r"tensor '.+' is not what was written"):
        cps.load(tmp_path / "flipped.cps", conv_net())


def rewrite(learned, path, *, tensors=None, header=None, **metadata):
    """Write a file that differs as told but has correct digests, as a hostile one would."""
    with safe_open(learned[1], framework="pt") as file:
        known = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = dict(file.metadata())
    known = {name: value for name, value in {**known, **(tensors or {})}.items() if value is not None}
    content = {**json.loads(meta["header"]), **(header or {})}
    content["digests"] = {name: storage.digest({name: value}) for name, value in known.items()}
    text = json.dumps(content)
    save_file(known, path, {**meta, "header": text, "digest": storage._sha(text), **metadata})


def nested(times):
    content = []
    for _ in range(times):
        content = [content]
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": {"weight/0.weight": torch.zeros(8, 2, 5, 5)}}, r"tensor 'weight/0.weight' is float32 \(8, 2, 5, 5\)"),
        ({"tensors": {"weight/0.weight": torch.zeros(8, 2, 3, 3, dtype=torch.float64)}}, "float64"),
        ({"tensors": {"task/1/head/bias": None}}, "'task/1/head/bias' is missing"),
        ({"tensors": {"task/7/head/bias": torch.zeros(2)}}, "unexpected tensor 'task/7/head/bias'"),
        ({"tensors": {"taken/3.weight": torch.zeros(12, dtype=torch.uint8)}}, "not marked as taken"),
        ({"tensors": {"task/0/mask/0.weight": torch.zeros(1, dtype=torch.uint8)}}, "mask/0.weight"),
        ({"tensors": {"task/0/head/weight": torch.zeros(2, 12)}}, "is not the subnetwork that was sealed"),
        ({"header": {"classes": [["a"], ["b"]]}}, "head/weight"),
        ({"header": {"classes": [["a", "b"], ["a", "c"]]}}, "appears twice"),
        ({"header": {"classes": "os.system"}}, "damaged header"),
        ({"header": {"classes": [[["a"], "b"], ["c", "d"]]}}, "damaged header"),
        ({"header": {"features": [10**12, 12]}}, "damaged header"),
        ({"header": {"input_shape": [-1]}}, "damaged header"),
        ({"header": {"settings": {"train": {"type": "Training", "epochs": 3, "evil": 1}}}}, "damaged setting"),
        ({"header": {"settings": {"train": {"type": "Training", "epochs": -3}}}}, "epochs must not be negative"),
        ({"version": "2"}, "update cps"),
        ({"version": "x"}, "damaged"),
        ({"format": "cps checkpoint"}, "not a cps model file"),
        ({"header": {"statistics": [{"MaxOutput": ["../../x"]}, {}]}}, "statistics"),
        ({"header": {"input_shape": []}}, "damaged header"),
        ({"header": {"input_shape": [2**20, 2**20]}}, "damaged header"),
        ({"header": {"features": [2**23, 12]}}, "expected float32"),
        ({"header": {"settings": {"rounds": "three"}}}, "damaged settings"),
        ({"header": {"settings": {"selectors": [{"type": "MaxOutput"}, {"type": "MaxOutput"}]}}}, "damaged settings"),
        ({"header": {"settings": {"augment": {"type": "ResizedCrop", "area": []}}}}, "damaged setting ResizedCrop"),
        ({"header": {"settings": {"augment": nested(700)}}}, "nested too deep"),
        ({"header": {"input_range": [0]}}, "damaged header"),
        ({"header": {"input_range": ["a", "b"]}}, "damaged header"),
        ({"header": {"input_range": [1, 0]}}, "damaged header"),
        ({"header": {"input_range": [0, math.inf]}}, "damaged header"),
        ({"header": {"settings": {"normalize": {"type": "Normalize", "mean": ["a"], "std": [1]}}}}, "Normalize"),
        ({"tensors": {"task/0/statistics/ImportanceSignature/mean": torch.zeros(7)}}, "damaged statistics"),
        ({"tensors": {"task/0/statistics/ImportanceSignature/mean": torch.zeros(12, dtype=torch.int64)}}, "int64"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_hostile_file_is_refused_with_what_is_wrong(learned, tmp_path, change, message):
    rewrite(learned, tmp_path / "hostile.cps", **change)
    with pytest.raises(cps.FileError, match=message):
        cps.load(tmp_path / "hostile.cps", conv_net(), fabric=learned[0].fabric)


def test_negative_control_an_unchanged_rewritten_file_loads(learned, tmp_path):
    rewrite(learned, tmp_path / "same.cps")
    loaded = cps.load(tmp_path / "same.cps", conv_net(), fabric=learned[0].fabric)
    assert loaded.fingerprint(0) == learned[0].fingerprint(0)


def test_a_setting_that_names_foreign_code_is_not_imported(learned, tmp_path):
    hostile = {"type": "subprocess.Popen", "args": ["touch", str(tmp_path / "ran")]}
    with safe_open(learned[1], framework="pt") as file:
        known = json.loads(file.metadata()["header"])["settings"]
    rewrite(learned, tmp_path / "hostile.cps", header={"settings": {**known, "pruner": hostile}})
    with pytest.raises(ValueError, match="pass pruner="):
        cps.load(tmp_path / "hostile.cps", conv_net())
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "evil.cps").write_bytes(pickle.dumps(Evil()))
    torch.save({"weights": torch.zeros(3)}, tmp_path / "torch.cps")
    for name in ("evil.cps", "torch.cps"):
        with pytest.raises(cps.FileError):
            cps.load(tmp_path / name, conv_net())
    assert not (tmp_path / "ran").exists()


def test_another_backbone_is_refused_with_the_tensor_that_differs(learned):
    wider = nn.Sequential(nn.Conv2d(2, 9, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(cps.FileError, match=r"weight/0.weight' is float32 \(8, 2, 3, 3\), expected float32 \(9"):
        cps.load(learned[1], wider)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.cps"):
        cps.load(tmp_path / "nothing.cps", conv_net())


FULL_DISK = """
import resource, sys, cps
from samples import conv_net
learner = cps.load(sys.argv[1], conv_net(), fabric=cps.make_fabric(accelerator="cpu"))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    learner.save(sys.argv[1])
except OSError as error:
    print(error)
"""


def test_a_full_disk_while_saving_loses_nothing(learned, tmp_path):
    path = tmp_path / "model.cps"
    path.write_bytes(learned[1].read_bytes())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], env=environment, capture_output=True, text=True, check=True
    )
    assert "untouched" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.cps"]
    assert cps.load(path, conv_net(), fabric=learned[0].fabric).fingerprint(1) == learned[0].fingerprint(1)


def test_whatever_is_written_in_one_step_names_the_file_and_leaves_the_old_one_when_the_disk_is_full(tmp_path):
    path = tmp_path / "graph.onnx"
    path.write_text("old")

    def fail():
        with storage.atomic_write(path) as partial:
            partial.write_text("half of the n")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"could not write '.*graph\.onnx' \(.*No space left.*untouched"):
        fail()
    assert path.read_text() == "old"
    assert [left.name for left in tmp_path.iterdir()] == ["graph.onnx"]


def test_masks_survive_packing():
    draws = torch.Generator().manual_seed(0)
    for shape in ((1,), (3, 5), (7, 3, 1, 1), (16, 16)):
        mask = torch.rand(shape, generator=draws) > 0.5
        assert torch.equal(unpack(pack(mask), shape), mask)
        assert pack(mask).numel() == -(-mask.numel() // 8)


def test_one_more_task_of_resnet18_costs_at_most_a_fifth_of_a_mebibyte_beside_norms_and_head(tmp_path):
    network = SharedNetwork(cps.resnet18())
    sizes = []
    for task in range(2):
        draft = network.grow([2 * task, 2 * task + 1], 512, torch.Generator())
        network.input_shape = (3, 8, 8)
        network.seal(draft)
        from cps.network.model_file import write_model

        write_model(tmp_path / "model.cps", network, {})
        sizes.append((tmp_path / "model.cps").stat().st_size)
        network.taken = full_masks(network.weights, on=False) if task == 0 else network.taken
    subnetwork = network.subnetworks[-1]
    own = sum(4 * np.prod(value.shape) for value in (*subnetwork.private.values(), *subnetwork.head.values()))
    assert sizes[1] - sizes[0] - own < 0.2 * 2**20


def test_saving_through_a_link_replaces_what_it_points_to(learned, tmp_path):
    (tmp_path / "real.cps").write_bytes(learned[1].read_bytes())
    (tmp_path / "link.cps").symlink_to(tmp_path / "real.cps")
    learned[0].save(tmp_path / "link.cps")
    assert (tmp_path / "link.cps").is_symlink()
    loaded = cps.load(tmp_path / "real.cps", conv_net(), fabric=learned[0].fabric)
    assert loaded.fingerprint(0) == learned[0].fingerprint(0)


def test_a_file_is_as_readable_as_any_other(learned, tmp_path):
    learned[0].save(tmp_path / "model.cps")
    (tmp_path / "other").touch()
    assert (tmp_path / "model.cps").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_model_of_a_builtin_backbone_opens_without_it_and_keeps_its_notes(tmp_path):
    learner = cps.Learner(cps.Builtin("small"), rounds=0, train=cps.Training(1))
    learner.learn(make_task(0, shape=(3, 6, 6))).notes["day"] = "2026-11-15"
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps")
    assert loaded.fingerprint(0) == learner.fingerprint(0)
    assert loaded.network.subnetworks[0].notes == {"day": "2026-11-15"}
    assert loaded.builtin == cps.Builtin("small")
    again = cps.Learner(cps.Builtin("small"), rounds=0, train=cps.Training(1))
    torch.manual_seed(5)  # a builtin backbone depends on the learner's seed alone
    again.learn(make_task(0, shape=(3, 6, 6)))
    assert again.fingerprint(0) == learner.fingerprint(0)


def test_a_model_of_a_backbone_of_ones_own_asks_for_it(learned):
    with pytest.raises(ValueError, match="backbone of your own; pass one"):
        cps.load(learned[1])


def test_a_builtin_backbone_is_one_of_a_closed_list():
    with pytest.raises(ValueError, match="no builtin backbone 'os.system'; there are: small"):
        cps.Builtin("os.system")


def test_equal_models_are_equal_files(learned, tmp_path):
    """The order of the metadata is drawn anew in each process, so in one process this may hold by chance."""
    code = "import sys; from cps.storage import container; container.write(sys.argv[1], 'test', {'b': 1, 'a': 2}, {})"
    for name in ("one", "two", "three", "four"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert storage.read(tmp_path / "one", "test")[0] == {"b": 1, "a": 2}


def test_of_two_who_write_a_file_at_once_the_last_one_wins_whole(tmp_path):
    path = tmp_path / "file"
    with storage.atomic_write(path) as first:
        first.write_text("the first")
        with storage.atomic_write(path) as second:
            second.write_text("the second one")
        assert path.read_text() == "the second one"
    assert path.read_text() == "the first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed_later_but_nothing_of_one_at_work(tmp_path):
    path = tmp_path / "model.cps"
    left, new, other = (tmp_path / f".{name}.partial" for name in ("model.cps.0a", "model.cps.0b", "other.cps.0c"))
    for file in (left, new, other):
        file.touch()
    for file in (left, other):
        os.utime(file, (0, 0))
    storage.write_text(path, "text")
    assert set(tmp_path.iterdir()) == {path, new, other}
    os.utime(new, (0, 0))
    storage.remove(path)
    assert set(tmp_path.iterdir()) == {other}


def test_a_file_that_is_replaced_while_it_is_read_is_not_called_damaged(learned, tmp_path, monkeypatch):
    path = tmp_path / "model.cps"
    path.write_bytes(learned[1].read_bytes())
    checked, calls = storage._checked_header, []

    def replacing(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            other = tmp_path / "other"
            storage.write(other, "model", {}, {"one": torch.ones(3)})
            other.replace(path)
            raise storage.FileError("parts of both")
        return checked(*arguments)

    monkeypatch.setattr(storage, "_checked_header", replacing)
    assert list(storage.read(path, "model")[1]) == ["one"]
    assert len(calls) == 2


def test_notes_that_are_not_plain_data_are_named_and_the_old_file_stays(make_learner, tmp_path):
    learner = make_learner()
    learner.learn(make_task(0)).notes["accuracy"] = float("nan")
    with pytest.raises(ValueError, match="the note 'accuracy' of task 0 is not plain data"):
        learner.save(tmp_path / "model.cps")
    assert list(tmp_path.iterdir()) == []


def test_settings_may_be_numbers_of_numpy(make_learner, tmp_path):
    learner = make_learner(rounds=np.int64(1), prune_images=np.int32(20), seed=np.int64(3))
    learner.learn(make_task())
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    assert (loaded.rounds, loaded.prune_images, loaded.seed) == (1, 20, 3)


def test_texts_too_are_written_to_what_a_link_points_to(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    storage.write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}


def test_a_file_of_before_ranges_were_noted_loads(learned, tmp_path):
    with safe_open(learned[1], framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = dict(file.metadata())
    header = json.loads(meta["header"])
    assert len(header.pop("input_range")) == 2
    text = json.dumps(header)
    save_file(tensors, tmp_path / "old.cps", {**meta, "header": text, "digest": storage._sha(text)})
    loaded = cps.load(tmp_path / "old.cps", conv_net(), fabric=learned[0].fabric)
    assert loaded.fingerprint(0) == learned[0].fingerprint(0)
