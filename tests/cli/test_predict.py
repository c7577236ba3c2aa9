"""`cps predict`: output formats, groups, streams, unknown images and unreadable files."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import cps
from commands import CPU, predict_json, run_cps
from cps.app.predict_files import image_format_of

COLUMNS = {"path", "class", "version", "task", "share", "confidence", "unknown", "error"}


def test_predictions_are_printed_as_a_table_as_json_and_as_csv(trained):
    root = trained[0]
    table = run_cps("predict", root / "inbox", "--model", root / "parts.cps", *CPU)
    assert "confidence" in table.stdout
    rows = predict_json(root / "inbox", "--model", root / "parts.cps", "--group-by-folder", "--reject", 0)
    assert [set(row) for row in rows] == [COLUMNS] * 10
    assert [row["class"] for row in rows] == ["bolt"] * 5 + ["spring"] * 5
    assert [row["task"] for row in rows] == [1] * 5 + [2] * 5
    assert {row["version"] for row in rows} == {1}
    text = run_cps(
        "predict", root / "inbox", "--model", root / "parts.cps", "--csv", "--group", 5, "--reject", 0, *CPU
    ).stdout
    read = list(csv.DictReader(io.StringIO(text)))
    assert [row["class"] for row in read] == ["bolt"] * 5 + ["spring"] * 5
    assert float(read[0]["confidence"]) > 0.5


def test_an_image_unlike_all_learned_classes_is_unknown(trained, tmp_path):
    for index in range(5):
        Image.new("RGB", (16, 16), (9 * index, 0, 0)).save(tmp_path / f"{index}.png")
    model = trained[0] / "parts.cps"
    rows = predict_json(tmp_path, "--model", model, "--reject", 0.2)
    assert [(row["class"], row["unknown"]) for row in rows] == [(None, True)] * 5
    assert "unknown" in run_cps("predict", tmp_path, "--model", model, "--reject", 0.2, *CPU).stdout
    assert "unknown" not in run_cps("predict", tmp_path, "--model", model, "--reject", 0, *CPU).stdout


def test_an_unreadable_image_gives_exit_code_3_and_the_others_are_predicted(trained, tmp_path):
    box = shutil.copytree(trained[0] / "inbox", tmp_path / "box")
    (box / "bolt" / "0.png").write_bytes(b"broken")
    result = run_cps("predict", box, "--model", trained[0] / "parts.cps", "--json", "--reject", 0, *CPU, code=3)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["class"] is None for row in rows] == [True] + [False] * 9
    assert "bolt/0.png" in rows[0]["error"]
    assert "1 image(s) could not be read" in result.stderr


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
def test_wrong_arguments_give_exit_code_2_and_errors_1(trained, arguments, code, message):
    assert message in run_cps("predict", *arguments, "--model", trained[0] / "parts.cps", *CPU, code=code).output


def test_a_missing_image_is_reported_and_the_others_are_predicted(trained):
    root = trained[0]
    picture = next((root / "inbox").rglob("*.png"))
    result = run_cps("predict", "nowhere.png", picture, "--model", root / "parts.cps", "--json", *CPU, code=3)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows[0]["error"] == "there is no file 'nowhere.png'"
    assert rows[1]["error"] is None
    run_cps("predict", "nowhere.png", "nor here.png", "--model", root / "parts.cps", *CPU, code=1)


def test_a_named_pipe_is_reported_and_does_not_block(trained, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    picture = next((trained[0] / "inbox").rglob("*.png"))
    result = run_cps(
        "predict", tmp_path / "pipe.png", picture, "--model", trained[0] / "parts.cps", "--json", *CPU, code=3
    )
    assert "is not a file" in json.loads(result.stdout.splitlines()[0])["error"]


def test_the_share_of_the_task_is_1_if_the_task_is_given(trained):
    box, model = trained[0] / "inbox", trained[0] / "parts.cps"
    found = predict_json(box, "--model", model, "--reject", 0)
    assert all(0.5 <= row["share"] <= 1 for row in found)  # of two tasks
    given = predict_json(box, "--model", model, "--reject", 0, "--task", 2)
    assert {(row["task"], row["share"]) for row in given} == {(2, 1.0)}
    assert {row["class"] for row in given} <= {"gear", "spring"}
    rejected = run_cps("predict", box, "--model", model, "--task", 3, *CPU, code=1).output.replace("\n", " ")
    assert "task must be between 1 and 2, the number of learned tasks, got 3" in rejected
    assert "at most one of" in run_cps("predict", box, "--model", model, "--task", 1, "--group", 5, *CPU, code=2).output


def test_stream_predicts_images_in_order_and_excludes_groups(trained):
    box, model = trained[0] / "inbox", trained[0] / "parts.cps"
    learner = cps.load(model, fabric=cps.make_fabric(accelerator="cpu"))
    found, size = predict_json(box, "--model", model, "--stream", "--reject", 0), image_format_of(learner).size
    expected = learner.stream().predict(torch.stack([cps.read_image(row["path"], size=size) for row in found]))
    assert [row["class"] for row in found] == expected.classes
    assert [row["share"] for row in found] == pytest.approx(expected.share.tolist(), abs=1e-4)
    assert [row["share"] for row in found] != [
        row["share"] for row in predict_json(box, "--model", model, "--reject", 0)
    ]
    for others in (["--group", 2], ["--group-by-folder"], ["--task", 1]):
        assert "at most one of" in run_cps("predict", box, "--model", model, "--stream", *others, *CPU, code=2).output


def test_other_files_are_named_and_a_file_given_twice_is_predicted_once(trained, tmp_path):
    image = Path(shutil.copy(trained[0] / "inbox" / "bolt" / "0.png", tmp_path / "image.png"))
    for name in ("photo.avif", "notes", ".hidden"):
        (tmp_path / name).write_text("no image")
    result = run_cps("predict", tmp_path, image, tmp_path / ".." / tmp_path.name / "image.png",
               "--model", trained[0] / "parts.cps", "--csv", *CPU)  # fmt: skip
    assert result.stdout.count("image.png") == 1
    assert "2 file(s) are skipped because they are not images: " in result.stderr
    assert "photo.avif" in result.stderr
    assert ".hidden" not in result.stderr
    image.unlink()
    assert (
        "supported are .bmp" in run_cps("predict", tmp_path, "--model", trained[0] / "parts.cps", *CPU, code=1).stderr
    )


def test_links_to_one_image_are_separate_images_and_a_circular_link_is_an_error(trained, tmp_path):
    picture = next((trained[0] / "inbox").rglob("*.png"))
    for name in ("a.png", "b.png"):
        (tmp_path / name).symlink_to(picture)
    (tmp_path / "loop.png").symlink_to("loop.png")
    result = run_cps(
        "predict", tmp_path / "loop.png", tmp_path, "--model", trained[0] / "parts.cps", "--json", *CPU, code=3
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(Path(row["path"]).name, row["error"] is None) for row in rows] == [
        ("loop.png", False), ("a.png", True), ("b.png", True),
    ]  # fmt: skip
