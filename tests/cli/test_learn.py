"""`cps learn`: what it prints, skips, warns about and resumes."""

import os
import shutil

import pytest

import cps
from commands import CPU, predict_json, run_cps
from cps.app.learn_folder import checkpoint_path
from cps.runtime.devices import precision_of
from cps.storage import container
from samples import write_image_folder


def test_settings_and_results_are_printed(trained):
    first, second = trained[1]
    precision = precision_of(cps.make_fabric(accelerator="cpu"))
    for word in ("8 x 8", "small", "8 + 2 x 4", "given as an option", "shift+flip", precision, "estimated", "about"):
        assert word in first, word
    assert "Learned task 1: bolt, nut from 36 images" in first
    assert "stored in the model" in second
    assert "all earlier tasks are unchanged" in second
    assert "with the task known" in second


def test_learning_the_same_folder_again_does_nothing(trained, model):
    before = model.read_bytes()
    assert "already learned as task 1" in run_cps("learn", trained[0] / "january", "--model", model, *CPU).output
    assert model.read_bytes() == before


def test_small_classes_shared_images_and_skipped_images_cause_warnings(trained, model, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"], images=6)
    shutil.copy(folder / "pin" / "0.png", folder / "washer" / "same.png")
    (folder / "pin" / "broken.png").write_bytes(b"broken")
    rejected = run_cps("learn", folder, "--model", model, *CPU, code=1).output
    assert "pin/broken.png" in rejected.replace("\n", "")
    result = run_cps("learn", folder, "--model", model, "--skip-damaged", "--epochs", 1, *CPU).output.replace("\n", " ")
    assert "class 'washer' has only 7 image(s)" in result
    assert "share 1 identical image(s)" in result
    assert "skipped: " in result
    assert cps.load(model).network.subnetworks[2].notes["images"] == 13


def test_skipped_files_are_named(model, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"], images=6)
    (folder / "pin" / "deep").mkdir()
    shutil.copy(folder / "pin" / "0.png", folder / "pin" / "deep" / "1.png")
    shutil.copy(folder / "pin" / "0.png", folder / "loose.png")
    (folder / "washer" / "phone.heic").write_bytes(b"apple")
    (folder / "washer" / "nowhere.png").symlink_to("gone")
    (folder / "washer" / "folder.png").mkdir()
    os.mkfifo(folder / "washer" / "pipe.png")
    result = run_cps("learn", folder, "--model", model, "--epochs", 1, *CPU).output.replace("\n", " ")
    assert "6 file(s) are skipped" in result
    for name in ("loose.png", "pin/deep/1.png", "washer/phone.heic", "washer/nowhere.png", "washer/pipe.png"):
        assert f"'{name}'" in result
    shutil.rmtree(folder / "washer")
    (folder / "washer" / "all").mkdir(parents=True)
    assert "only folders in it" in run_cps("learn", folder, "--model", model, *CPU, code=1).output.replace("\n", " ")


def test_all_damaged_images_are_named_in_one_error(model, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"], images=6)
    for index in range(30):
        (folder / "pin" / f"bad{index:02}.png").write_bytes(b"broken")
    printed = run_cps("learn", folder, "--model", model, *CPU, code=1).output.replace("\n", "")
    assert all(f"bad{index:02}.png' is not an image" in printed for index in range(20))
    assert "and 10 more" in printed


def test_a_single_class_is_not_reported_as_100_percent_accurate(model, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin"], images=6)
    result = " ".join(run_cps("learn", folder, "--model", model, "--epochs", 1, *CPU).output.split())
    assert "a single class is always right" in result
    assert "with the task known" not in result
    printed = " ".join(run_cps("inspect", model).output.split())
    assert "task 3: learned on" in printed
    assert "'march', 6 images, 1 of them held out" in printed


@pytest.mark.parametrize("classes", [["pin", "washer"], ["pin"]], ids=["two classes", "one class"])
def test_an_interrupted_run_resumes_and_says_so(trained, model, tmp_path, monkeypatch, classes):
    folder = write_image_folder(tmp_path / "march", classes, images=12)
    arguments = ["learn", folder, "--model", model, "--epochs", 3, *CPU]

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cps.app.learn_folder.Learner.learn", stop)
        assert "Nothing was learned yet" in run_cps(*arguments, code=130).output
    with monkeypatch.context() as patch:
        patch.setattr("cps.training.progress.Progress.phase_name", property(stop))
        stopped = run_cps(*arguments, code=130)
        assert "checkpoint" not in stopped.stdout
        assert "Progress is saved" in stopped.output
    header, tensors = container.read(checkpoint_path(model), "checkpoint")
    assert 0 < header["seconds"] < 60
    an_hour = header | {"seconds": 3600.0}
    container.write(checkpoint_path(model), "checkpoint", an_hour, tensors)
    assert "Resuming from the checkpoint" in run_cps(*arguments).output
    assert 3600 < cps.load(model).network.subnetworks[-1].notes["seconds"] < 3700


def test_a_command_with_nothing_to_do_keeps_the_checkpoint_of_another_run(trained, model, tmp_path, monkeypatch):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"], images=12)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cps.training.progress.Progress.phase_name", property(stop))
        run_cps("learn", folder, "--model", model, "--epochs", 3, *CPU, code=130)
    kept = checkpoint_path(model).read_bytes()
    assert "nothing to do" in run_cps("learn", trained[0] / "january", "--model", model, *CPU).output
    assert checkpoint_path(model).read_bytes() == kept
    other = run_cps("learn", folder, "--model", model, "--epochs", 2, *CPU, code=1).output.replace("\n", " ")
    assert "Resuming" not in other
    assert "it differs in: train.epochs (3, now 2)" in other


def test_a_model_whose_tasks_were_all_forgotten_can_learn_again(trained, model):
    run_cps("forget", model, "--task", 2, "--yes")
    run_cps("forget", model, "--task", 1, "--yes")
    run_cps("learn", trained[0] / "january", "--model", model, "--epochs", 1, *CPU)
    assert cps.load(model).network.subnetworks[0].classes == ("bolt", "nut")


def test_equal_unicode_names_are_one_class_and_similar_names_cause_a_warning(trained, model, tmp_path):
    composed, decomposed = "gr\u00fcn", "gru\u0308n"
    write_image_folder(tmp_path / "one", [composed, "Bolt "], images=20)
    result = run_cps("learn", tmp_path / "one", "--model", model, "--epochs", 1, *CPU)
    assert "class 'Bolt ' has nearly the same name as 'bolt'" in result.stderr
    write_image_folder(tmp_path / "two", [decomposed, "rot"], images=20, seed=1)
    run_cps("learn", tmp_path / "two", "--model", model, "--as-version", *CPU)
    assert cps.load(model).network.tasks_of(composed) == [2, 3]


def test_empty_folders_are_all_named_and_can_be_skipped(trained, tmp_path):
    folder = write_image_folder(tmp_path / "folder", ["pin", "ring"], images=20)
    for name in ("leer", "__MACOSX"):
        (folder / name).mkdir()
    new = tmp_path / "new.cps"
    rejected = run_cps("learn", folder, "--model", new, "--epochs", 1, *CPU, code=1).stderr
    assert "the folders of classes '__MACOSX', 'leer' hold no image" in rejected.replace("\n", " ")
    result = run_cps("learn", folder, "--model", new, "--epochs", 1, "--skip-damaged", *CPU)
    assert "the folder of class 'leer' contains no images; it is skipped" in result.stderr
    assert "new model" in " ".join(result.stdout.split())
    assert cps.load(new).network.subnetworks[0].classes == ("pin", "ring")


def test_a_folder_name_that_is_not_utf8_is_rejected_by_learn_and_accepted_by_predict(trained, tmp_path):
    folder = write_image_folder(tmp_path / "folder", ["tea"], images=5)
    try:
        shutil.copytree(folder / "tea", os.fsdecode(os.fsencode(folder) + b"/caf\xe9"))
    except OSError:
        pytest.skip("file names are text here")
    rejected = run_cps("learn", folder, "--model", tmp_path / "new.cps", *CPU, code=1).stderr
    assert "is not UTF-8 text; rename the folder" in rejected.replace("\n", " ")
    assert [row["path"] for row in predict_json(folder, "--model", trained[0] / "parts.cps")]


def test_skip_damaged_skips_a_class_without_readable_images(tmp_path):
    folder = write_image_folder(tmp_path / "folder", ["broken", "pin", "ring"], images=10)
    for file in (folder / "broken").iterdir():
        file.write_bytes(b"broken")
    new = tmp_path / "new.cps"
    result = run_cps("learn", folder, "--model", new, "--epochs", 1, "--skip-damaged", *CPU)
    assert "no image of class 'broken' can be read; the class is skipped" in result.stderr.replace("\n", " ")
    assert cps.load(new).network.subnetworks[0].classes == ("pin", "ring")
    assert "nothing to do" in run_cps("learn", folder, "--model", new, *CPU).output
