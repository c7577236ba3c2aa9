"""The commands of those who keep and use a model, from the first folder to predictions, with every mistake."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

import cps
from cps.app import inspect as inspection
from cps.app import predict_files as inbox
from cps.app.learn_folder import checkpoint_of
from cps.app.task_metadata import accuracy_in_words
from cps.cli import app
from cps.cli import predict as cli_predict
from cps.cli.loaders import loader_of
from cps.cli.terminal import CtrlC, json_text
from cps.network.masks import share_on
from cps.storage import container as storage
from cps.storage.lock import locked
from samples import make_task, write_image_folder

CPU = ["--accelerator", "cpu"]


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return a folder with two shipments learned into parts.cps, an inbox, and what learning showed."""
    root = tmp_path_factory.mktemp("parts")
    write_image_folder(root / "january", ["bolt", "nut"], images=20)
    write_image_folder(root / "february", ["gear", "spring"], images=20)
    write_image_folder(root / "inbox", ["bolt", "spring"], images=5, seed=5)
    shown = [run("learn", root / "january", "--model", root / "parts.cps", "--epochs", 8, *CPU)]
    shown.append(run("learn", root / "february", "--model", root / "parts.cps", *CPU))
    return root, [done.output for done in shown]


@pytest.fixture
def model(parts, tmp_path):
    return Path(shutil.copy(parts[0] / "parts.cps", tmp_path / "parts.cps"))


def test_learning_shows_what_was_chosen_and_what_came_out(parts):
    first, second = parts[1]
    for word in ("8 x 8", "small", "8 + 2 x 4", "asked for", "shift+flip", "32-true", "an estimate", "about"):
        assert word in first, word
    assert "Learned task 1: bolt, nut from 36 images" in first
    assert "as the model has it" in second
    assert "all tasks from before are unchanged" in second
    assert "with the task known" in second


def test_learning_again_does_nothing(parts, model):
    before = model.read_bytes()
    assert "learned before, as task 1" in run("learn", parts[0] / "january", "--model", model, *CPU).output
    assert model.read_bytes() == before


def test_every_kind_of_warning_is_shown(parts, model, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"], images=6)
    shutil.copy(folder / "pin" / "0.png", folder / "washer" / "same.png")
    (folder / "pin" / "broken.png").write_bytes(b"broken")
    refused = run("learn", folder, "--model", model, *CPU, code=1).output
    assert "pin/broken.png" in refused.replace("\n", "")
    done = run("learn", folder, "--model", model, "--skip-damaged", "--epochs", 1, *CPU).output.replace("\n", " ")
    assert "class 'washer' has only 7 image(s)" in done
    assert "share 1 identical image(s)" in done
    assert "skipped: " in done
    assert cps.load(model).network.subnetworks[2].notes["images"] == 13


def test_images_get_their_classes_as_a_table_as_json_and_as_csv(parts):
    root = parts[0]
    table = run("predict", root / "inbox", "--model", root / "parts.cps", *CPU)
    assert "confidence" in table.stdout
    lines = run(
        "predict", root / "inbox", "--model", root / "parts.cps", "--json", "--group-by-folder", "--reject", 0, *CPU
    ).stdout
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [set(row) for row in rows] == [{"path", "class", "task", "share", "confidence", "unknown", "error"}] * 10
    assert [row["class"] for row in rows] == ["bolt"] * 5 + ["spring"] * 5
    assert [row["task"] for row in rows] == [1] * 5 + [2] * 5
    text = run(
        "predict", root / "inbox", "--model", root / "parts.cps", "--csv", "--group", 5, "--reject", 0, *CPU
    ).stdout
    read = list(csv.DictReader(io.StringIO(text)))
    assert [row["class"] for row in read] == ["bolt"] * 5 + ["spring"] * 5
    assert float(read[0]["confidence"]) > 0.5


def test_an_image_like_none_that_was_learned_is_unknown(parts, tmp_path):
    for index in range(5):
        Image.new("RGB", (16, 16), (9 * index, 0, 0)).save(tmp_path / f"{index}.png")
    model = parts[0] / "parts.cps"
    rows = [
        json.loads(line)
        for line in run("predict", tmp_path, "--model", model, "--json", "--reject", 0.2, *CPU).stdout.splitlines()
    ]
    assert [(row["class"], row["unknown"]) for row in rows] == [(None, True)] * 5
    assert "unknown" in run("predict", tmp_path, "--model", model, "--reject", 0.2, *CPU).stdout
    assert "unknown" not in run("predict", tmp_path, "--model", model, "--reject", 0, *CPU).stdout


def test_an_image_that_cannot_be_read_ends_with_three_and_the_others_are_predicted(parts, tmp_path):
    box = shutil.copytree(parts[0] / "inbox", tmp_path / "box")
    (box / "bolt" / "0.png").write_bytes(b"broken")
    done = run("predict", box, "--model", parts[0] / "parts.cps", "--json", "--reject", 0, *CPU, code=3)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["class"] is None for row in rows] == [True] + [False] * 9
    assert "bolt/0.png" in rows[0]["error"]
    assert "1 image(s) could not be read" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give images"),
        (["a.png", "--json", "--csv"], 2, "at most one of --json and --csv"),
        (["a.png", "--group", "0"], 2, "--group"),
        (["nothing.png"], 1, "no file or folder 'nothing.png'"),
        (["--watch", "nowhere"], 1, "nowhere"),
    ],
)
def test_wrong_commands_end_with_two_and_errors_with_one(parts, arguments, code, message):
    assert message in run("predict", *arguments, "--model", parts[0] / "parts.cps", *CPU, code=code).output


def test_inspect_tells_the_history(parts):
    model = parts[0] / "parts.cps"
    shown = run("inspect", model).output
    for word in ("bolt", "backbone small", "tasks 2, classes 4", "fullest"):
        assert word in shown, word
    found = json.loads(run("inspect", model, "--json").stdout)
    learner = cps.load(model)
    for index, task in enumerate(found["tasks"]):
        assert task["task"] == index + 1
        assert task["density"] == pytest.approx(learner.network.density(index))
        assert task["fingerprint"] == learner.network.subnetworks[index].digest_in(learner.network.weights)
        assert task["notes"] == learner.network.subnetworks[index].notes
    assert found["free"] == pytest.approx(1 - share_on(learner.network.taken, learner.network.weights))
    assert found["bytes"] == model.stat().st_size


@pytest.fixture
def verified_on_cpu(monkeypatch):
    """Let `cps verify` open models where they were learned: elsewhere answers are not compared."""
    monkeypatch.setattr(inspection, "load", partial(cps.load, fabric=cps.make_fabric(accelerator="cpu")))


@pytest.mark.usefixtures("verified_on_cpu")
def test_verify_says_what_was_checked(parts):
    checks = json.loads(run("verify", parts[0] / "parts.cps", "--json").stdout)
    with safe_open(parts[0] / "parts.cps", framework="pt") as file:
        tensors = len(list(file.keys()))
    assert [(check["number"], check["result"]) for check in checks] == [
        (1, "holds"), (tensors, "hold"), (2, "hold"), (2, "hold"), (2, "as when they were learned"),
    ]  # fmt: skip
    assert "is as it was written" in run("verify", parts[0] / "parts.cps").output


def rewritten(model, change):
    """Change a model file's header or tensors and give it correct digests, as a forger would."""
    with safe_open(model, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    header = json.loads(metadata["header"])
    change(header, tensors, metadata)
    header["digests"] = {name: storage.digest({name: value}) for name, value in tensors.items()}
    text = json.dumps(header)
    save_file(tensors, model, {**metadata, "header": text, "digest": storage._sha(text)})


def tamper(model):
    rewritten(model, lambda header, tensors, metadata: tensors["task/0/head/bias"].add_(1))


def renew(model):
    rewritten(model, lambda header, tensors, metadata: metadata.update(version="7"))


def flip(model):
    content = bytearray(model.read_bytes())
    content[-5] ^= 1
    model.write_bytes(content)


def cut(model):
    model.write_bytes(model.read_bytes()[:-1000])


DAMAGE = {flip: "is not what was written", cut: "damaged", renew: "update cps", tamper: "sealed"}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", ["learn", "predict", "inspect", "verify", "forget"])
def test_a_model_that_is_not_what_was_learned_is_refused_by_every_command(parts, model, command, damage):
    folder = parts[0] / "january"
    damage(model)
    before = model.read_bytes()
    arguments = {
        "learn": [folder, "--model", model, *CPU],
        "predict": [folder, "--model", model, *CPU],
        "inspect": [model],
        "verify": [model],
        "forget": [model, "--task", 1],
    }[command]
    if (command, damage) == ("inspect", tamper):
        run(command, *arguments)  # it reads without checking fingerprints; `verify` is for that
        return
    assert DAMAGE[damage] in run(command, *arguments, code=1).output.replace("\n", " ")
    assert model.read_bytes() == before
    assert [path.name for path in model.parent.iterdir()] == ["parts.cps"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("taken/layers.0.weight", torch.zeros(12)),
        ("taken/layers.0.weight", torch.zeros(3, dtype=torch.uint8)),
        ("weight/layers.0.weight", torch.zeros(())),
    ],
)
def test_tensors_of_a_wrong_form_are_refused_by_inspect(model, name, value):
    rewritten(model, lambda header, tensors, metadata: tensors.update({name: value}))
    assert "is missing or has a wrong form" in run("inspect", model, code=1).output.replace("\n", " ")


@pytest.mark.usefixtures("verified_on_cpu")
def test_answers_that_differ_from_when_they_were_learned_are_found(model):
    def forge(header, tensors, metadata):
        header["notes"][1]["answers"]["digest"] = "0" * 64

    rewritten(model, forge)
    assert "task 2 gives other answers" in run("verify", model, code=1).output.replace("\n", " ")


def test_answers_of_another_computer_are_not_compared(model):
    def move(header, tensors, metadata):
        header["notes"][1]["answers"]["on"] = "torch 1.0, abacus"
        header["notes"][0] = {}

    rewritten(model, move)
    checks = json.loads(run("verify", model, "--json").stdout)
    assert checks[-1]["number"] == 2
    assert "not compared: learned on a computer that was not noted; torch 1.0, abacus" in checks[-1]["result"]


def test_a_forgotten_task_is_gone_and_the_others_move_down(model):
    before = cps.load(model).fingerprint(1)
    checkpoint_of(model).write_bytes(b"of an interrupted shipment")
    shown = run("forget", model, "--task", 1, "--yes").output
    assert "Forgot task 1 (bolt, nut)" in shown
    assert "Task 2 is now 1." in shown
    assert b"bolt" not in model.read_bytes()
    assert b"january" not in model.read_bytes()
    assert [path.name for path in model.parent.iterdir()] == ["parts.cps"]
    assert cps.load(model).fingerprint(0) == before
    run("verify", model)
    assert "no task 2; the model has 1" in run("forget", model, "--task", 2, "--yes", code=1).output
    run("forget", model, "--task", 1, "--yes")
    assert "no task is left" in run("inspect", model).output
    assert "no task left" in run("predict", model.parent, "--model", model, *CPU, code=1).output.replace("\n", " ")


def test_nothing_is_forgotten_where_nobody_can_be_asked(model):
    before = model.read_bytes()
    assert "add --yes where nobody can be asked" in run("forget", model, "--task", 1, code=1).output.replace("\n", " ")
    assert model.read_bytes() == before


def test_forgetting_says_that_an_interrupted_learning_is_lost(model):
    assert "checkpoint" not in run("forget", model, "--task", 1, "--yes").output
    checkpoint_of(model).write_bytes(b"of an interrupted shipment")
    assert "checkpoint of an interrupted" in run("forget", model, "--task", 1, "--yes").output


def test_files_that_are_left_out_are_named(model, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"], images=6)
    (folder / "pin" / "deep").mkdir()
    shutil.copy(folder / "pin" / "0.png", folder / "pin" / "deep" / "1.png")
    shutil.copy(folder / "pin" / "0.png", folder / "loose.png")
    (folder / "washer" / "phone.heic").write_bytes(b"apple")
    (folder / "washer" / "nowhere.png").symlink_to("gone")
    (folder / "washer" / "folder.png").mkdir()
    os.mkfifo(folder / "washer" / "pipe.png")
    done = run("learn", folder, "--model", model, "--epochs", 1, *CPU).output.replace("\n", " ")
    assert "6 file(s) are left out" in done
    for name in ("loose.png", "pin/deep/1.png", "washer/phone.heic", "washer/nowhere.png", "washer/pipe.png"):
        assert f"'{name}'" in done
    shutil.rmtree(folder / "washer")
    (folder / "washer" / "all").mkdir(parents=True)
    assert "only folders in it" in run("learn", folder, "--model", model, *CPU, code=1).output.replace("\n", " ")


def test_all_damaged_images_are_named_at_once(model, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"], images=6)
    for index in range(30):
        (folder / "pin" / f"bad{index:02}.png").write_bytes(b"broken")
    said = run("learn", folder, "--model", model, *CPU, code=1).output.replace("\n", "")
    assert all(f"bad{index:02}.png' is not an image" in said for index in range(20))
    assert "and 10 more" in said


def test_one_class_alone_is_not_called_a_hundred_percent_right(model, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin"], images=6)
    done = " ".join(run("learn", folder, "--model", model, "--epochs", 1, *CPU).output.split())
    assert "alone, one class cannot be mistaken" in done
    assert "with the task known" not in done
    shown = " ".join(run("inspect", model).output.split())
    assert "task 3: learned on" in shown
    assert "'march', 6 images, 1 of them held out" in shown


MISTAKES = {
    "is not a safetensors file": ["learn", "january", "--model", "new.cps", "--weights", "parts.cps.broken"],
    "there is no file of weights": ["learn", "january", "--model", "new.cps", "--weights", "nowhere"],
    "no accelerator 'abacus'": ["learn", "january", "--model", "new.cps", "--accelerator", "abacus"],
    "precision '7-bit' cannot be used": ["learn", "january", "--model", "new.cps", "--precision", "7-bit"],
    "is a file; a folder is needed": ["learn", "parts.cps", "--model", "new.cps"],
    "is a folder, not a file": ["learn", "january", "--model", "february"],
    "february' is a folder, not a file": ["inspect", "february"],
}


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_is_explained_in_a_line(parts, said, monkeypatch):
    monkeypatch.chdir(parts[0])
    (parts[0] / "parts.cps.broken").write_bytes(b"\x89PNG and so on, which is no safetensors file at all")
    assert said in run(*MISTAKES[said], code=1).output.replace("\n", " ")


def test_a_missing_image_among_others_is_reported_and_the_others_are_predicted(parts):
    root = parts[0]
    picture = next((root / "inbox").rglob("*.png"))
    done = run("predict", "nowhere.png", picture, "--model", root / "parts.cps", "--json", *CPU, code=3)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[0]["error"] == "there is no file 'nowhere.png'"
    assert rows[1]["error"] is None
    run("predict", "nowhere.png", "nor here.png", "--model", root / "parts.cps", *CPU, code=1)


def test_images_that_arrive_one_by_one_have_no_groups(parts):
    root = parts[0]
    for named in ([], [root / "inbox"]):
        refused = run("predict", *named, "--watch", root / "inbox", "--group", 3, "--model", root / "parts.cps", code=2)
        assert "there is --stream" in refused.output.replace("\n", " ")


def test_a_damaged_model_is_reported_as_json_too(model):
    cut(model)
    checks = json.loads(run("verify", model, "--json", code=1).stdout)
    assert "damaged" in checks[0]["result"]


def test_the_help_names_all_backbones():
    from cps.cli.model import BACKBONES
    from cps.network.backbones import BUILTINS

    assert BACKBONES.replace(" or ", ", ").split(", ") == list(BUILTINS)


@pytest.mark.parametrize("classes", [["pin", "washer"], ["pin"]], ids=["two classes", "one class"])
def test_an_interrupted_run_says_that_it_goes_on(parts, model, tmp_path, monkeypatch, classes):
    folder = write_image_folder(tmp_path / "march", classes, images=12)
    arguments = ["learn", folder, "--model", model, "--epochs", 3, *CPU]

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cps.app.learn_folder.Learner.learn", stop)
        assert "Nothing was learned yet" in run(*arguments, code=130).output
    with monkeypatch.context() as patch:
        patch.setattr("cps.training.progress.Progress.words", property(stop))
        stopped = run(*arguments, code=130)
        assert "checkpoint" not in stopped.stdout
        assert "What was learned is saved" in stopped.output
    header, tensors = storage.read(checkpoint_of(model), "checkpoint")
    assert 0 < header["seconds"] < 60
    an_hour = header | {"seconds": 3600.0}
    storage.write(checkpoint_of(model), "checkpoint", an_hour, tensors)
    assert "learning goes on from there" in run(*arguments).output
    assert 3600 < cps.load(model).network.subnetworks[-1].notes["seconds"] < 3700


def test_a_checkpoint_of_other_work_survives_a_command_that_has_nothing_to_do(parts, model, tmp_path, monkeypatch):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"], images=12)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cps.training.progress.Progress.words", property(stop))
        run("learn", folder, "--model", model, "--epochs", 3, *CPU, code=130)
    kept = checkpoint_of(model).read_bytes()
    assert "nothing to do" in run("learn", parts[0] / "january", "--model", model, *CPU).output
    assert checkpoint_of(model).read_bytes() == kept
    other = run("learn", folder, "--model", model, "--epochs", 2, *CPU, code=1).output.replace("\n", " ")
    assert "goes on from there" not in other
    assert "it differs in: train.epochs (3, now 2)" in other


def test_a_pipe_among_images_does_not_hold_up_the_others(parts, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    picture = next((parts[0] / "inbox").rglob("*.png"))
    done = run("predict", tmp_path / "pipe.png", picture, "--model", parts[0] / "parts.cps", "--json", *CPU, code=3)
    assert "is not a file" in json.loads(done.stdout.splitlines()[0])["error"]


def test_an_empty_model_learns_again(parts, model):
    run("forget", model, "--task", 2, "--yes")
    run("forget", model, "--task", 1, "--yes")
    run("learn", parts[0] / "january", "--model", model, "--epochs", 1, *CPU)
    assert cps.load(model).network.subnetworks[0].classes == ("bolt", "nut")


def test_two_at_once_are_one_too_many(parts, model):
    with locked(model):
        for arguments in (["learn", parts[0] / "january", "--model", model, *CPU], ["forget", model, "--task", 1]):
            assert "another program is changing" in run(*arguments, code=1).output.replace("\n", " ")


def test_a_model_of_a_backbone_of_ones_own_is_shown_and_checked_as_far_as_possible(make_learner, tmp_path):
    learner = make_learner()
    learner.learn(make_task(0)).notes.update({"accuracy": 0.9, "day": ["any"], "usual output": "much"})
    learner.save(tmp_path / "own.cps")
    assert "backbone of your own" in run("inspect", tmp_path / "own.cps").output
    checks = json.loads(run("verify", tmp_path / "own.cps", "--json").stdout)
    assert [check["result"] for check in checks[:4]] == ["holds", "hold", "hold", "hold"]
    assert "not compared" in checks[-1]["result"]
    for command in (
        ["forget", tmp_path / "own.cps", "--task", 1],
        ["predict", "x.png", "--model", tmp_path / "own.cps"],
    ):
        assert "backbone of your own" in run(*command, code=1).output.replace("\n", " ")


def test_names_with_markup_are_shown_as_they_are_and_none_reaches_the_terminal(tmp_path):
    folder = write_image_folder(tmp_path / "march", ["[red]bolt", "\x1b[31mnut"], images=5)
    run("learn", folder, "--model", tmp_path / "m.cps", "--epochs", 1, *CPU)
    assert "[red]bolt" in run("inspect", tmp_path / "m.cps").output.replace("\n", "")
    assert "[red]" in run("predict", folder, "--model", tmp_path / "m.cps", "--group-by-folder", *CPU).output
    assert "\x1b[31m" not in run("inspect", tmp_path / "m.cps").output


def test_watching_prints_a_line_for_each_arrival_and_ctrl_c_ends_it(parts, tmp_path):
    (tmp_path / "box").mkdir()
    command = [sys.executable, "-m", "cps", "predict", "--model", parts[0] / "parts.cps", "--watch", tmp_path / "box"]
    watcher = subprocess.Popen(
        [*command, "--json", *CPU], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    for line in watcher.stderr:
        if "watching" in line:
            break
    time.sleep(0.1)
    shutil.copy(parts[0] / "inbox" / "bolt" / "0.png", tmp_path / "box" / "new.png")
    assert json.loads(watcher.stdout.readline())["path"].endswith("new.png")
    watcher.send_signal(signal.SIGINT)
    _, stderr = watcher.communicate(timeout=30)
    assert watcher.returncode == 0, stderr
    assert "stopped" in stderr
    assert "Traceback" not in stderr


def test_ctrl_c_is_known_though_its_interrupt_was_swallowed(monkeypatch):
    class Tidying:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    ignored, stop = [], CtrlC()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with stop:
        Tidying()
        assert stop()
    assert [error.exc_type for error in ignored] == [KeyboardInterrupt]
    with stop:
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def predicted(*arguments):
    return [json.loads(line) for line in run("predict", *arguments, "--json", *CPU).stdout.splitlines()]


def test_an_answer_says_how_sure_its_task_is_unless_that_is_told(parts):
    box, model = parts[0] / "inbox", parts[0] / "parts.cps"
    found = predicted(box, "--model", model, "--reject", 0)
    assert all(0.5 <= row["share"] <= 1 for row in found)  # of two tasks
    warned = predicted(box, "--model", model, "--reject", 0, "--task", 2)
    assert {(row["task"], row["share"]) for row in warned} == {(2, 1.0)}
    assert {row["class"] for row in warned} <= {"gear", "spring"}
    assert (
        "there is no task 3; the model has 2" in run("predict", box, "--model", model, "--task", 3, *CPU, code=1).output
    )
    assert "at most one of" in run("predict", box, "--model", model, "--task", 1, "--group", 5, *CPU, code=2).output


def test_images_in_a_row_are_predicted_as_a_stream_and_not_as_groups(parts):
    box, model = parts[0] / "inbox", parts[0] / "parts.cps"
    learner = cps.load(model, fabric=cps.make_fabric(accelerator="cpu"))
    found, size = predicted(box, "--model", model, "--stream", "--reject", 0), inbox.size_of(learner)
    expected = learner.stream().predict(torch.stack([cps.read_image(row["path"], size=size) for row in found]))
    assert [row["class"] for row in found] == expected.classes
    assert [row["share"] for row in found] == pytest.approx(expected.share.tolist(), abs=1e-4)
    assert [row["share"] for row in found] != [row["share"] for row in predicted(box, "--model", model, "--reject", 0)]
    for others in (["--group", 2], ["--group-by-folder"], ["--task", 1]):
        assert "at most one of" in run("predict", box, "--model", model, "--stream", *others, *CPU, code=2).output


def test_files_that_are_left_out_are_named_and_one_that_is_named_twice_is_predicted_once(parts, tmp_path):
    image = Path(shutil.copy(parts[0] / "inbox" / "bolt" / "0.png", tmp_path / "image.png"))
    for name in ("photo.avif", "notes", ".hidden"):
        (tmp_path / name).write_text("no image")
    done = run("predict", tmp_path, image, tmp_path / ".." / tmp_path.name / "image.png",
               "--model", parts[0] / "parts.cps", "--csv", *CPU)  # fmt: skip
    assert done.stdout.count("image.png") == 1
    assert "2 file(s) are left out, since they are no images: " in done.stderr
    assert "photo.avif" in done.stderr
    assert ".hidden" not in done.stderr
    image.unlink()
    assert "known are .bmp" in run("predict", tmp_path, "--model", parts[0] / "parts.cps", *CPU, code=1).stderr


def test_watching_follows_the_model(parts, model, tmp_path):
    followed = cli_predict._followed(model, "cpu", cps.load)
    missing = cli_predict._followed(model, "cpu", cps.load)
    first = cli_predict._current(followed, None)
    assert cli_predict._current(followed, 1) is first
    learner = cps.load(model)
    learner.forget(1)
    learner.save(model)
    assert len(cli_predict._current(followed, 1).classes) == 1
    with pytest.raises(ValueError, match="there is no task 2"):  # it was forgotten for good
        cli_predict._current(missing, 2)
    model.write_bytes(b"damaged")
    assert len(cli_predict._current(followed, 1).classes) == 1
    assert "damaged" in followed.problem


def test_names_that_look_the_same_are_one_class_and_almost_the_same_are_asked_about(parts, model, tmp_path):
    composed, apart = "gr\u00fcn", "gru\u0308n"
    write_image_folder(tmp_path / "one", [composed, "Bolt "], images=20)
    done = run("learn", tmp_path / "one", "--model", model, "--epochs", 1, *CPU)
    assert "class 'Bolt ' is called almost like 'bolt'" in done.stderr
    write_image_folder(tmp_path / "two", [apart, "rot"], images=20)
    assert f"class '{composed}' was learned already, in task 3" in run(
        "learn", tmp_path / "two", "--model", model, *CPU, code=1
    ).stderr.replace("\n", " ")


def test_empty_folders_are_all_named_and_can_be_left_out(parts, tmp_path):
    shipment = write_image_folder(tmp_path / "shipment", ["pin", "ring"], images=20)
    for name in ("leer", "__MACOSX"):
        (shipment / name).mkdir()
    new = tmp_path / "new.cps"
    refused = run("learn", shipment, "--model", new, "--epochs", 1, *CPU, code=1).stderr
    assert "the folders of classes '__MACOSX', 'leer' hold no image" in refused.replace("\n", " ")
    done = run("learn", shipment, "--model", new, "--epochs", 1, "--skip-damaged", *CPU)
    assert "the folder of class 'leer' holds no image; it is left out" in done.stderr
    assert "new:" in done.stdout
    assert cps.load(new).network.subnetworks[0].classes == ("pin", "ring")


def test_a_folder_whose_name_is_no_text_is_refused_before_training_and_shown_as_json(parts, tmp_path):
    shipment = write_image_folder(tmp_path / "shipment", ["tea"], images=5)
    try:
        shutil.copytree(shipment / "tea", os.fsdecode(os.fsencode(shipment) + b"/caf\xe9"))
    except OSError:
        pytest.skip("file names are text here")
    refused = run("learn", shipment, "--model", tmp_path / "new.cps", *CPU, code=1).stderr
    assert "is not UTF-8 text; rename it" in refused.replace("\n", " ")
    assert [row["path"] for row in predicted(shipment, "--model", parts[0] / "parts.cps")]


def test_names_are_shown_as_they_are(parts, tmp_path):
    image = Path(shutil.copy(parts[0] / "inbox" / "bolt" / "0.png", tmp_path / ":smile:.png"))
    assert ":smile:" in run("predict", image, "--model", parts[0] / "parts.cps", *CPU).stdout.replace("\n", "")


def test_a_task_that_has_become_another_is_not_asked(model, tmp_path):
    followed = cli_predict._followed(model, "cpu", cps.load)
    learner = cps.load(model)
    learner.forget(0)
    learner.save(model)
    with pytest.raises(ValueError, match="task 1 of the model is another now"):
        cli_predict._current(followed, 1)


def test_links_are_images_of_their_own_and_one_to_itself_is_an_error_of_its_own(parts, tmp_path):
    picture = next((parts[0] / "inbox").rglob("*.png"))
    for name in ("a.png", "b.png"):
        (tmp_path / name).symlink_to(picture)
    (tmp_path / "loop.png").symlink_to("loop.png")
    done = run("predict", tmp_path / "loop.png", tmp_path, "--model", parts[0] / "parts.cps", "--json", *CPU, code=3)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(Path(row["path"]).name, row["error"] is None) for row in rows] == [
        ("loop.png", False), ("a.png", True), ("b.png", True),
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_is_json_whatever_the_encoding(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    row = {"path": "gr\u00fcn \U0001f600.jpg"}
    stream.write(json_text(row))
    stream.flush()
    assert json.loads(stream.buffer.getvalue().decode(encoding)) == row


@pytest.mark.parametrize(("known", "is_said"), [(0.5, True), (0.51, False)])
def test_it_is_said_when_a_task_is_known_no_better_than_by_guessing(known, is_said):
    notes = {"accuracy": {"task known": known, "task found": 0.3}, "held out": 10, "classes": {"a": 5, "b": 5}}
    assert ("no better than guessing" in accuracy_in_words(notes)) == is_said


def test_forgetting_removes_what_a_killed_program_left_however_new_it_is(model):
    left = [model.with_name(f".{name}.0a1b2c3d.partial") for name in (model.name, checkpoint_of(model).name)]
    for file in left:
        file.write_text("weights of the task")
    run("forget", model, "--task", 1, "--yes")
    assert not any(file.exists() for file in left)


def test_a_class_of_which_no_image_can_be_read_is_left_out_with_the_damaged_images(tmp_path):
    shipment = write_image_folder(tmp_path / "shipment", ["broken", "pin", "ring"], images=10)
    for file in (shipment / "broken").iterdir():
        file.write_bytes(b"broken")
    new = tmp_path / "new.cps"
    done = run("learn", shipment, "--model", new, "--epochs", 1, "--skip-damaged", *CPU)
    assert "none of the images of class 'broken' can be read; it is left out" in done.stderr.replace("\n", " ")
    assert cps.load(new).network.subnetworks[0].classes == ("pin", "ring")
    assert "nothing to do" in run("learn", shipment, "--model", new, *CPU).output


def test_images_that_arrive_while_watching_starts_are_new(parts, tmp_path, monkeypatch):
    """The folder is looked at before anything that takes long, such as loading the model."""
    real, seen = cli_predict._followed, []

    def slow(*arguments):
        shutil.copy(parts[0] / "inbox" / "bolt" / "0.png", tmp_path / "early.png")
        return real(*arguments)

    monkeypatch.setattr(cli_predict, "_followed", slow)
    monkeypatch.setattr(cli_predict, "_write_coming", lambda coming, *_: seen.append(next(coming).path.name))
    run("predict", "--watch", tmp_path, "--model", parts[0] / "parts.cps", *CPU)
    assert seen == ["early.png"]


def test_a_named_image_in_a_watched_folder_is_predicted_once(parts, tmp_path, monkeypatch):
    real, seen = cli_predict._followed, []
    image, box = parts[0] / "inbox" / "bolt" / "0.png", tmp_path / "box"
    box.mkdir()

    def slow(*arguments):
        shutil.copy(image, box / "named.png")
        return real(*arguments)

    def first_of(coming, *_):
        shutil.copy(image, box / "z-later.png")
        seen.append(next(coming).path.name)

    monkeypatch.setattr(cli_predict, "_followed", slow)
    monkeypatch.setattr(cli_predict, "_write_coming", first_of)
    done = run("predict", box / ".." / "box", "--watch", box, "--model", parts[0] / "parts.cps", "--csv", *CPU)
    assert "named.png" in done.stdout
    assert seen == ["z-later.png"]


def test_a_model_of_a_network_of_ones_own_is_opened_by_a_loader(parts, tmp_path, monkeypatch):
    (tmp_path / "mynet.py").write_text(
        "import cps\n"
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "def load(path, **settings):\n"
        "    from helper import known\n"
        "    return cps.load(path, net(), **settings)\n"
        "def nothing(path, **settings):\n"
        "    return None\n"
        "def narrow():\n"
        "    return None\n"
        "value = 3\n"
    )
    (tmp_path / "helper.py").write_text("known = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = loader_of("mynet:load")
    net = sys.modules["mynet"].net
    quick = cps.Training(1)
    learner = cps.Learner(net(), rounds=1, train=quick, retrain=quick)
    learner.learn(cps.Task(["bolt", "nut"], train=(torch.rand(24, 3, 8, 8), ["bolt", "nut"] * 12)))
    learner.save("own.cps")
    assert mine("own.cps").classes == learner.classes
    image = parts[0] / "inbox" / "bolt" / "0.png"
    rows = predicted(image, "--model", "own.cps", "--loader", "mynet:load")
    assert rows[0]["class"] in ("bolt", "nut")
    warned = run("predict", image, "--model", "own.cps", *CPU, code=1).output.replace("\n", " ")
    assert "a backbone of your own; pass one of that kind to load it, by a function that --loader names" in warned
    for odd, message in (
        ("value", "which is 3"),
        ("nothing", "must return"),
        ("narrow", "must take a path and settings"),
    ):
        assert message in run("verify", "own.cps", "--loader", f"mynet:{odd}", code=1).output.replace("\n", " ")
    checks = json.loads(run("verify", "own.cps", "--loader", "mynet:load", "--json").stdout)
    assert checks[-1]["what"].startswith("answers")
    run("export", "own.cps", "--task", 1, "--to", "task.safetensors", "--loader", "mynet:load")
    run("forget", "own.cps", "--task", 1, "--yes", "--loader", "mynet:load")
    assert mine("own.cps").classes == []
    (tmp_path / "broken.py").write_text("def")
    for name in ("mynet", "mynet:lost", "nowhere:load", ":", "broken:load"):
        with pytest.raises(ValueError, match="--loader names a function as module:function"):
            loader_of(name)


def test_no_more_megapixels_can_be_asked_for_than_are_ever_read():
    assert "40" in run("serve", "x.cps", "--max-megapixels", 41, code=2).output
