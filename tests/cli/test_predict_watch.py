"""`cps predict --watch`: new images, a changed model, and Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import cps
from commands import CPU, run_cps
from cps.cli import predict


def test_watch_excludes_groups(trained):
    root = trained[0]
    for given in ([], [root / "inbox"]):
        rejected = run_cps(
            "predict", *given, "--watch", root / "inbox", "--group", 3, "--model", root / "parts.cps", code=2
        )
        assert "use --stream" in rejected.output.replace("\n", " ")


@pytest.mark.slow
def test_watch_prints_a_line_for_each_new_image_until_ctrl_c(trained, tmp_path):
    (tmp_path / "box").mkdir()
    command = [sys.executable, "-m", "cps", "predict", "--model", trained[0] / "parts.cps", "--watch", tmp_path / "box"]
    watcher = subprocess.Popen(
        [*command, "--json", *CPU], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    for line in watcher.stderr:
        if "watching" in line:
            break
    time.sleep(0.1)
    shutil.copy(trained[0] / "inbox" / "bolt" / "0.png", tmp_path / "box" / "new.png")
    assert json.loads(watcher.stdout.readline())["path"].endswith("new.png")
    watcher.send_signal(signal.SIGINT)
    _, stderr = watcher.communicate(timeout=30)
    assert watcher.returncode == 0, stderr
    assert "stopped" in stderr
    assert "Traceback" not in stderr


def test_watch_reloads_a_changed_model_and_keeps_the_old_one_if_it_is_damaged(trained, model, tmp_path):
    reloaded = predict._open_model(model, "cpu", cps.load)
    missing = predict._open_model(model, "cpu", cps.load)
    first = predict._current_learner(reloaded, None)
    assert predict._current_learner(reloaded, 1) is first
    learner = cps.load(model)
    learner.forget(1)
    learner.save(model)
    assert len(predict._current_learner(reloaded, 1).classes) == 1
    with pytest.raises(ValueError, match="between 1 and 1, the number of learned tasks, got 2"):  # it was forgotten
        predict._current_learner(missing, 2)
    model.write_bytes(b"damaged")
    assert len(predict._current_learner(reloaded, 1).classes) == 1
    assert "damaged" in reloaded.problem


def test_watch_stops_if_the_given_task_is_now_a_different_one(model, tmp_path):
    reloaded = predict._open_model(model, "cpu", cps.load)
    learner = cps.load(model)
    learner.forget(0)
    learner.save(model)
    with pytest.raises(ValueError, match="task 1 of the model is now a different task"):
        predict._current_learner(reloaded, 1)


def test_images_that_arrive_during_startup_are_new(trained, tmp_path, monkeypatch):
    """The folder is listed before anything slow, such as loading the model."""
    real, seen = predict._open_model, []

    def open_slowly(*arguments):
        shutil.copy(trained[0] / "inbox" / "bolt" / "0.png", tmp_path / "early.png")
        return real(*arguments)

    monkeypatch.setattr(predict, "_open_model", open_slowly)
    monkeypatch.setattr(predict, "_write_arriving", lambda arriving, *_: seen.append(next(arriving).path.name))
    run_cps("predict", "--watch", tmp_path, "--model", trained[0] / "parts.cps", *CPU)
    assert seen == ["early.png"]


def test_a_given_image_in_the_watched_folder_is_predicted_once(trained, tmp_path, monkeypatch):
    real, seen = predict._open_model, []
    image, box = trained[0] / "inbox" / "bolt" / "0.png", tmp_path / "box"
    box.mkdir()

    def open_slowly(*arguments):
        shutil.copy(image, box / "given.png")
        return real(*arguments)

    def first_of(arriving, *_):
        shutil.copy(image, box / "z-later.png")
        seen.append(next(arriving).path.name)

    monkeypatch.setattr(predict, "_open_model", open_slowly)
    monkeypatch.setattr(predict, "_write_arriving", first_of)
    result = run_cps("predict", box / ".." / "box", "--watch", box, "--model", trained[0] / "parts.cps", "--csv", *CPU)
    assert "given.png" in result.stdout
    assert seen == ["z-later.png"]
