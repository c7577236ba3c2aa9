"""Invariant 6: a model file round-trips exactly; a damaged or hostile one raises a clear error and runs no code."""

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

import cps
from cps.network.masks import full_masks
from cps.network.model_file import write_model
from cps.network.shared import SharedNetwork
from cps.storage import container as storage
from samples import conv_net, make_task


def test_a_model_file_round_trips_exactly(saved, tmp_path):
    learner, path = saved
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
        assert getattr(loaded.config, name) == getattr(learner.config, name)
    loaded.save(tmp_path / "again.cps")
    again = cps.load(tmp_path / "again.cps", conv_net(), fabric=learner.fabric)
    assert again.fingerprint(1) == learner.fingerprint(1)


def test_any_safetensors_reader_opens_a_model_file(saved):
    tensors = load_file(saved[1])
    assert tensors["weight/0.weight"].shape == (8, 2, 3, 3)
    assert tensors["task/1/mask/3.weight"].dtype == torch.uint8


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.5, 0.99])
def test_a_truncated_file_raises(saved, tmp_path, keep):
    content = saved[1].read_bytes()
    path = tmp_path / "short.cps"
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(cps.FileError, match=r"short\.cps"):
        cps.load(path, conv_net())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_flipped_bit_is_detected(saved, tmp_path, data):
    content = bytearray(saved[1].read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped.cps"
    path.write_bytes(content)
    try:
        loaded = cps.load(path, conv_net(), fabric=saved[0].fabric)
    except cps.FileError:
        return
    # Only a flip in the padding of the header, which has no meaning, may pass.
    assert [loaded.fingerprint(t) for t in range(2)] == [saved[0].fingerprint(t) for t in range(2)]
    assert loaded.network.subnetworks[0].classes == ("häschen", "cat\n")


def test_a_flipped_bit_in_a_tensor_names_the_tensor(saved, tmp_path):
    content = bytearray(saved[1].read_bytes())
    content[-1] ^= 1
    (tmp_path / "flipped.cps").write_bytes(content)
    with pytest.raises(cps.FileError, match=r"tensor '.+' does not match its digest"):
        cps.load(tmp_path / "flipped.cps", conv_net())


def rewrite(saved, path, *, tensors=None, header=None, **metadata):
    """Write a changed file with correct digests, as an attacker would."""
    with safe_open(saved[1], framework="pt") as file:
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
        ({"tensors": {"task/0/head/weight": torch.zeros(2, 12)}}, "has changed since it was sealed"),
        ({"header": {"classes": [["a"], ["b"]]}}, "head/weight"),
        ({"header": {"classes": [["a", "a"], ["c", "c"]]}}, "a class twice"),
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
def test_a_file_with_wrong_content_but_correct_digests_raises(saved, tmp_path, change, message):
    rewrite(saved, tmp_path / "hostile.cps", **change)
    with pytest.raises(cps.FileError, match=message):
        cps.load(tmp_path / "hostile.cps", conv_net(), fabric=saved[0].fabric)


def test_negative_control_an_unchanged_rewritten_file_loads(saved, tmp_path):
    rewrite(saved, tmp_path / "same.cps")
    loaded = cps.load(tmp_path / "same.cps", conv_net(), fabric=saved[0].fabric)
    assert loaded.fingerprint(0) == saved[0].fingerprint(0)


def test_a_setting_that_names_other_code_is_not_imported(saved, tmp_path):
    hostile = {"type": "subprocess.Popen", "args": ["touch", str(tmp_path / "ran")]}
    with safe_open(saved[1], framework="pt") as file:
        known = json.loads(file.metadata()["header"])["settings"]
    rewrite(saved, tmp_path / "hostile.cps", header={"settings": {**known, "pruner": hostile}})
    with pytest.raises(ValueError, match="pass pruner="):
        cps.load(tmp_path / "hostile.cps", conv_net())
    assert not (tmp_path / "ran").exists()


def test_a_pickle_raises_and_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "evil.cps").write_bytes(pickle.dumps(Evil()))
    torch.save({"weights": torch.zeros(3)}, tmp_path / "torch.cps")
    for name in ("evil.cps", "torch.cps"):
        with pytest.raises(cps.FileError):
            cps.load(tmp_path / name, conv_net())
    assert not (tmp_path / "ran").exists()


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


@pytest.mark.slow
def test_a_full_disk_while_saving_keeps_the_old_file(saved, tmp_path):
    path = tmp_path / "model.cps"
    path.write_bytes(saved[1].read_bytes())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], env=environment, capture_output=True, text=True, check=True
    )
    assert "untouched" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.cps"]
    assert cps.load(path, conv_net(), fabric=saved[0].fabric).fingerprint(1) == saved[0].fingerprint(1)


def test_one_more_task_of_resnet18_adds_at_most_a_fifth_of_a_mebibyte_besides_norms_and_head(tmp_path):
    network = SharedNetwork(cps.resnet18())
    sizes = []
    for task in range(2):
        draft = network.new_draft([2 * task, 2 * task + 1], 512, torch.Generator())
        network.input_shape = (3, 8, 8)
        network.seal(draft)
        write_model(tmp_path / "model.cps", network, {}, None)
        sizes.append((tmp_path / "model.cps").stat().st_size)
        network.taken = full_masks(network.weights, on=False) if task == 0 else network.taken  # free all weights
    subnetwork = network.subnetworks[-1]
    own = sum(4 * np.prod(value.shape) for value in (*subnetwork.private.values(), *subnetwork.head.values()))
    assert sizes[1] - sizes[0] - own < 0.2 * 2**20


def test_saving_through_a_symbolic_link_replaces_its_target(saved, tmp_path):
    (tmp_path / "real.cps").write_bytes(saved[1].read_bytes())
    (tmp_path / "link.cps").symlink_to(tmp_path / "real.cps")
    saved[0].save(tmp_path / "link.cps")
    assert (tmp_path / "link.cps").is_symlink()
    loaded = cps.load(tmp_path / "real.cps", conv_net(), fabric=saved[0].fabric)
    assert loaded.fingerprint(0) == saved[0].fingerprint(0)


def test_a_model_file_has_the_usual_permissions(saved, tmp_path):
    saved[0].save(tmp_path / "model.cps")
    (tmp_path / "other").touch()
    assert (tmp_path / "model.cps").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_notes_that_are_not_json_raise_and_write_nothing(make_learner, tmp_path):
    learner = make_learner()
    learner.learn(make_task(0))
    learner.annotate(0, accuracy=float("nan"))
    with pytest.raises(ValueError, match="note 'accuracy' of task 0 must be JSON data"):
        learner.save(tmp_path / "model.cps")
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_an_input_range_loads(saved, tmp_path):
    with safe_open(saved[1], framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = dict(file.metadata())
    header = json.loads(meta["header"])
    assert len(header.pop("input_range")) == 2
    text = json.dumps(header)
    save_file(tensors, tmp_path / "old.cps", {**meta, "header": text, "digest": storage._sha(text)})
    loaded = cps.load(tmp_path / "old.cps", conv_net(), fabric=saved[0].fabric)
    assert loaded.fingerprint(0) == saved[0].fingerprint(0)
