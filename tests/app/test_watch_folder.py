"""Predicting images as they arrive in a folder."""

import os
import threading
import time

import pytest
import torch

import cps
from cps.app import watch_folder as module
from cps.app.list_files import file_states
from cps.app.predict_files import Predictor, group_by_size, image_format_of, predict_files
from cps.app.watch_folder import watch_folder


def test_new_images_are_predicted_when_they_are_complete(learner, images, inbox, monkeypatch):
    """One image is there before, one is written in two halves, one is damaged, and the damaged one is replaced."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.3)
    content = {name: (images / name / "0.png").read_bytes() for name in ("bolt", "gear")}
    (inbox / "before.png").write_bytes(content["bolt"])
    done = threading.Event()
    found = []

    def run():
        for prediction in watch_folder(lambda: learner, inbox, interval=0.02, until=done.is_set):
            found.append(prediction)

    def wait_for(number):
        end = time.monotonic() + 20
        while len(found) < number and time.monotonic() < end:
            time.sleep(0.01)

    watcher = threading.Thread(target=run)
    watcher.start()
    time.sleep(0.1)
    half = len(content["gear"]) // 2
    with (inbox / "slow.png").open("wb") as file:
        file.write(content["gear"][:half])
        file.flush()
        time.sleep(0.15)  # several scans of half a file
        assert found == []
        file.write(content["gear"][half:])
    wait_for(1)
    (inbox / "broken.png").write_bytes(b"broken")
    wait_for(2)
    (inbox / "broken.png").write_bytes(content["bolt"])
    wait_for(3)
    done.set()
    watcher.join()
    assert [prediction.path.name for prediction in found] == ["slow.png", "broken.png", "broken.png"]
    assert [bool(prediction.error) for prediction in found] == [False, True, False]


def test_an_image_that_arrives_before_the_first_prediction_is_requested_is_new(learner, images, inbox):
    predictions = watch_folder(lambda: learner, inbox, interval=0.01)
    (inbox / "new.png").write_bytes((images / "bolt" / "0.png").read_bytes())
    assert next(predictions).path.name == "new.png"


def test_a_missing_folder_cannot_be_watched(learner, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        watch_folder(lambda: learner, tmp_path / "nowhere")


def test_the_current_learner_is_requested_before_each_scan(learner, images, inbox):
    requests = []
    predictions = watch_folder(lambda: requests.append(len(requests)) or learner, inbox, interval=0.01)
    (inbox / "new.png").write_bytes((images / "bolt" / "0.png").read_bytes())
    assert next(predictions).path.name == "new.png"
    assert len(requests) >= 2


def test_an_image_that_changes_while_it_is_predicted_is_predicted_again(learner, images, inbox, monkeypatch):
    content = {name: (images / name / "0.png").read_bytes() for name in ("bolt", "gear")}
    real = module.predict_files

    def replace_first(learner, groups, predictor):
        for prediction in real(learner, groups, predictor):
            if len(first) == 0:  # it is replaced just after its first prediction
                first.append(prediction.label)
                prediction.path.write_bytes(content["gear"])
                os.utime(prediction.path, (1, 1))
            yield prediction

    first = []
    monkeypatch.setattr(module, "predict_files", replace_first)
    predictions = watch_folder(lambda: learner, inbox, interval=0.01)
    (inbox / "new.png").write_bytes(content["bolt"])
    expected = learner.predict(torch.from_numpy(image_format_of(learner).decode(images / "gear" / "0.png"))[None])
    assert next(predictions).label == expected.classes[0]


def test_images_in_seen_are_not_new_and_all_others_are(learner, images, inbox):
    for name in ("old.png", "new.png"):
        (inbox / name).write_bytes((images / "bolt" / "0.png").read_bytes())
    seen = {path: state for path, state in file_states(inbox).items() if path.name == "old.png"}
    predictions = watch_folder(lambda: learner, inbox, seen=seen, interval=0.01)
    (inbox / "newer.png").write_bytes((images / "bolt" / "0.png").read_bytes())
    assert {next(predictions).path.name, next(predictions).path.name} == {"new.png", "newer.png"}


def test_images_with_the_same_time_come_in_natural_order(learner, images, inbox):
    names = ["frame-1.png", "frame-2.png", "frame-10.png"]
    for name in names:
        (inbox / name).write_bytes((images / "bolt" / "0.png").read_bytes())
        os.utime(inbox / name, (1, 1))
    predictions = watch_folder(lambda: learner, inbox, seen={}, interval=0.01)
    assert [next(predictions).path.name for _ in names] == names


def test_a_watched_folder_that_disappears_is_reported(learner, inbox, caplog):
    scans = []

    def is_done():
        scans.append(inbox.exists() and inbox.rmdir())
        return len(scans) > 4

    assert list(watch_folder(lambda: learner, inbox, interval=0.01, until=is_done)) == []
    assert [record.message for record in caplog.records] == [f"the folder '{inbox}' has gone; still watching"]


def test_a_stream_continues_from_the_given_files_to_the_arriving_ones(learner, images, inbox):
    predictor = Predictor(stream=True)
    given = [images / "bolt" / f"{index}.png" for index in range(3)]
    before = list(predict_files(learner, group_by_size(given, 1), predictor))
    predictions = watch_folder(lambda: learner, inbox, predictor, interval=0.01)
    arrived = []
    for index, name in enumerate(("b.png", "a.png")):  # the older one first, whatever its name
        (inbox / name).write_bytes((images / "bolt" / f"{3 + index}.png").read_bytes())
        os.utime(inbox / name, (index, index))
        arrived.append(inbox / name)
    after = [next(predictions) for _ in arrived]
    assert [prediction.path for prediction in after] == arrived
    pixels = torch.stack([cps.read_image(path, size=8) for path in [*given, *arrived]])
    expected = learner.stream().predict(pixels)
    assert [prediction.share for prediction in [*before, *after]] == pytest.approx(expected.share.tolist(), abs=1e-6)
