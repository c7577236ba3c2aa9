"""The inbox: files, folders and patterns; groups; images that arrive, half written ones too."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import cps
from cps.app import predict_files as inbox
from cps.app.watch_folder import states_in
from cps.data.image_folder import read_folder
from samples import write_image_folder


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """Return a learner of two tasks of two classes, from folders."""
    root = tmp_path_factory.mktemp("shipments")
    training = cps.Training(6, cps.Adam(3e-3), batch_size=8)
    learner = cps.Learner(
        cps.Builtin("small"), rounds=1, train=training, retrain=training, fabric=cps.make_fabric(accelerator="cpu")
    )
    for classes in (["bolt", "nut"], ["gear", "spring"]):
        read = read_folder(write_image_folder(root / classes[0], classes), size=8)
        learner.learn(cps.Task(read.classes, train=(read.images, read.labels)))
    return learner


@pytest.fixture
def box(tmp_path):
    return write_image_folder(tmp_path / "box", ["bolt", "gear"], images=6, seed=9)


def test_files_folders_and_patterns_are_found_once_and_in_order(box, monkeypatch):
    monkeypatch.chdir(box)
    (box / "bolt" / ".hidden.png").touch()
    (box / "bolt" / "notes.txt").touch()
    found = inbox.find_images(["gear/0.png", "bolt", "*/[01].png"])
    assert [str(path) for path in found] == ["gear/0.png", *(f"bolt/{index}.png" for index in range(6)), "gear/1.png"]
    (box / "with[brackets].png").touch()
    assert inbox.find_images(["with[brackets].png"]) == [inbox.Path("with[brackets].png")]
    with pytest.raises(FileNotFoundError, match=r"'\*.jpg'"):
        inbox.find_images(["*.jpg"])
    (box / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no image in 'empty'"):
        inbox.find_images(["empty"])


def test_files_come_as_one_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = [
        "cam9/1.png",
        "cam10/1.png",
        "f01.png",
        "f1.png",
        "f2.png",
        "f10.png",
        "f10b3.png",
        "f10b12.png",
        "g.png",
    ]
    for name in expected:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x")
    for place in (".", "**/*.png"):
        assert [path.as_posix() for path in inbox.find_images([place])] == expected
    groups = inbox.by_folder(inbox.find_images(["cam10", "cam9"]))
    assert [group[0].parent.name for group in groups] == ["cam9", "cam10"]


def test_images_one_by_one_get_the_answers_of_the_learner(learner, box):
    files = inbox.find_images([box])
    found = list(inbox.answers(learner, inbox.by_number(files, 1)))
    expected = learner.predict(read_folder(box, size=8).images)
    assert [answer.path for answer in found] == files
    assert [answer.label for answer in found] == expected.classes
    assert [answer.task for answer in found] == expected.tasks.tolist()


def test_the_images_of_a_group_share_a_task_and_damaged_ones_only_drop_out(learner, box, monkeypatch):
    monkeypatch.setattr(inbox, "TOGETHER", 4)  # several batches
    (box / "bolt" / "2.png").write_bytes(b"broken")
    files = inbox.find_images([box])
    for groups in (list(inbox.by_folder(files)), list(inbox.by_number(files, 6))):
        assert [len(group) for group in groups] == [6, 6]
        found = list(inbox.answers(learner, groups))
        assert [answer.path for answer in found] == files
        assert [bool(answer.error) for answer in found] == [index == 2 for index in range(12)]
        assert "bolt/2.png" in found[2].error
        for own in (found[:6], found[6:]):
            assert len({answer.task for answer in own if not answer.error}) == 1
        images = read_folder(box, size=8, skip_damaged=True).images[:5]
        expected = learner.predict(images, group_size=5)
        assert [answer.label for answer in found[:6] if not answer.error] == expected.classes


def test_a_group_of_less_than_one_is_refused():
    with pytest.raises(ValueError, match="one image or more"):
        list(inbox.by_number([], 0))


def test_a_group_that_cannot_be_read_at_all_is_all_errors(learner, tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    found = list(inbox.answers(learner, [[tmp_path / "a.png"]]))
    assert found[0].task is None
    assert found[0].error


def test_new_images_are_predicted_when_they_are_whole(learner, box, tmp_path, monkeypatch):
    """One is there before, one is written in two halves, one is damaged for good, one is replaced later."""
    monkeypatch.setattr(inbox, "PATIENCE", 0.3)
    folder = tmp_path / "arriving"
    folder.mkdir()
    content = {name: (box / name / "0.png").read_bytes() for name in ("bolt", "gear")}
    (folder / "before.png").write_bytes(content["bolt"])
    done = threading.Event()
    seen = []

    def run():
        for answer in inbox.watch(lambda: learner, folder, interval=0.02, until=done.is_set):
            seen.append(answer)

    def wait_for(number):
        end = time.monotonic() + 20
        while len(seen) < number and time.monotonic() < end:
            time.sleep(0.01)

    watcher = threading.Thread(target=run)
    watcher.start()
    time.sleep(0.1)
    half = len(content["gear"]) // 2
    with (folder / "slow.png").open("wb") as file:
        file.write(content["gear"][:half])
        file.flush()
        time.sleep(0.15)  # several looks at half a file
        assert seen == []
        file.write(content["gear"][half:])
    wait_for(1)
    (folder / "broken.png").write_bytes(b"broken")
    wait_for(2)
    (folder / "broken.png").write_bytes(content["bolt"])
    wait_for(3)
    done.set()
    watcher.join()
    assert [answer.path.name for answer in seen] == ["slow.png", "broken.png", "broken.png"]
    assert [bool(answer.error) for answer in seen] == [False, True, False]


def test_what_arrives_before_the_first_answer_is_asked_for_is_new_too(learner, box, tmp_path):
    folder = tmp_path / "arriving"
    folder.mkdir()
    coming = inbox.watch(lambda: learner, folder, interval=0.01)
    (folder / "new.png").write_bytes((box / "bolt" / "0.png").read_bytes())
    assert next(coming).path.name == "new.png"


def test_a_folder_that_is_not_there_cannot_be_watched(learner, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        inbox.watch(lambda: learner, tmp_path / "nowhere")


def test_reading_many_images_keeps_few_in_memory(learner, box, monkeypatch):
    """Only two batches are decoded ahead of what was asked for."""
    decoded = []
    monkeypatch.setattr(inbox, "TOGETHER", 2)
    real = inbox.decode_image
    monkeypatch.setattr(inbox, "decode_image", lambda path, size: decoded.append(path) or real(path, size))
    coming = inbox.answers(learner, inbox.by_number(inbox.find_images([box]), 1), workers=1)
    next(coming)
    assert len(decoded) <= 4
    assert torch.tensor([answer.task for answer in coming]).numel() == 11


def test_whoever_is_the_learner_now_is_asked(learner, box, tmp_path):
    """`watch` asks for the learner anew before each look at the folder."""
    folder = tmp_path / "arriving"
    folder.mkdir()
    asked = []
    coming = inbox.watch(lambda: asked.append(len(asked)) or learner, folder, interval=0.01)
    (folder / "new.png").write_bytes((box / "bolt" / "0.png").read_bytes())
    assert next(coming).path.name == "new.png"
    assert len(asked) >= 2


def test_no_batch_holds_more_than_are_looked_at_together_but_one_large_group(monkeypatch):
    monkeypatch.setattr(inbox, "TOGETHER", 4)
    groups = [[Path(f"{size}-{index}") for index in range(size)] for size in (1, 3, 1, 9, 2, 2)]
    batches = list(inbox._batches(groups))
    assert [group for batch in batches for group in batch] == groups
    assert [[len(group) for group in batch] for batch in batches] == [[1, 3], [1], [9], [2, 2]]


def test_an_image_that_changes_while_it_is_looked_at_is_looked_at_again(learner, box, tmp_path, monkeypatch):
    folder = tmp_path / "arriving"
    folder.mkdir()
    content = {name: (box / name / "0.png").read_bytes() for name in ("bolt", "gear")}
    real = inbox.answers

    def changing(learner, groups, **asked):
        for answer in real(learner, groups, **asked):
            if len(seen) == 0:  # it is replaced just when the first answer is at hand
                seen.append(answer.label)
                answer.path.write_bytes(content["gear"])
                os.utime(answer.path, (1, 1))
            yield answer

    seen = []
    monkeypatch.setattr(inbox, "answers", changing)
    coming = inbox.watch(lambda: learner, folder, interval=0.01)
    (folder / "new.png").write_bytes(content["bolt"])
    right = learner.predict(torch.from_numpy(inbox.decode_image(box / "gear" / "0.png", inbox.size_of(learner)))[None])
    assert next(coming).label == right.classes[0]


def test_what_was_seen_is_not_new_and_all_else_is(learner, box, tmp_path):
    folder = tmp_path / "arriving"
    folder.mkdir()
    for name in ("old.png", "new.png"):
        (folder / name).write_bytes((box / "bolt" / "0.png").read_bytes())
    seen = {path: state for path, state in states_in(folder).items() if path.name == "old.png"}
    coming = inbox.watch(lambda: learner, folder, seen=seen, interval=0.01)
    (folder / "newer.png").write_bytes((box / "bolt" / "0.png").read_bytes())
    assert {next(coming).path.name, next(coming).path.name} == {"new.png", "newer.png"}


def test_what_arrives_at_the_same_time_comes_as_one_counts(learner, box, tmp_path):
    folder, names = tmp_path / "arriving", ["frame-1.png", "frame-2.png", "frame-10.png"]
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes((box / "bolt" / "0.png").read_bytes())
        os.utime(folder / name, (1, 1))
    coming = inbox.watch(lambda: learner, folder, seen={}, interval=0.01)
    assert [next(coming).path.name for _ in names] == names


def test_a_watched_folder_that_goes_away_is_told(learner, tmp_path, caplog):
    folder = tmp_path / "arriving"
    folder.mkdir()
    looks = []

    def enough():
        looks.append(folder.exists() and folder.rmdir())
        return len(looks) > 4

    assert list(inbox.watch(lambda: learner, folder, interval=0.01, until=enough)) == []
    assert [record.message for record in caplog.records] == [f"the folder '{folder}' is gone; it may come back"]


def test_a_folder_that_vanishes_while_others_are_listed_hides_nothing(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "image.png").write_bytes(b"x")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("b") and (tmp_path / "b").exists():
            shutil.rmtree(tmp_path / "b")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = {path.parent.name for path in states_in(tmp_path) if path.name == "image.png"}
    assert found == {"a", "c"}


def test_what_arrives_in_a_row_is_a_stream_that_goes_on_from_what_was_named(learner, box, tmp_path):
    folder, asking = tmp_path / "camera", inbox.Asking(in_a_row=True)
    folder.mkdir()
    named = [box / "bolt" / f"{index}.png" for index in range(3)]
    before = list(inbox.answers(learner, inbox.by_number(named, 1), asking))
    coming = inbox.watch(lambda: learner, folder, asking, interval=0.01)
    arrived = []
    for index, name in enumerate(("b.png", "a.png")):  # the older first, whatever it is called
        (folder / name).write_bytes((box / "bolt" / f"{3 + index}.png").read_bytes())
        os.utime(folder / name, (index, index))
        arrived.append(folder / name)
    after = [next(coming) for _ in arrived]
    assert [answer.path for answer in after] == arrived
    images = torch.stack([cps.read_image(path, size=8) for path in [*named, *arrived]])
    expected = learner.stream().predict(images)
    assert [answer.share for answer in [*before, *after]] == pytest.approx(expected.share.tolist(), abs=1e-6)
