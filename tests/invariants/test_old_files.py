"""Files written by version 0.1 before the move into rooms (commit 94f2097) load, resume and predict the same."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cps
from cps.cli import app
from samples import ACCELERATOR, ROUNDING, conv_net, make_task

FILES = Path(__file__).parents[1] / "fixtures" / "version0"
CLOSE = ROUNDING or {"rtol": 1e-4, "atol": 1e-5}
EXPECTED = json.loads((FILES / "answers.json").read_text())
IMAGES = torch.cat([task.test[0] for task in (make_task(0), make_task(10, classes=3))])


@pytest.fixture(scope="module")
def learner(fabric):
    return cps.load(FILES / "two-tasks.model", conv_net(), fabric=fabric)


def assert_predicts(prediction, expected):
    assert list(prediction.classes) == expected["classes"]
    assert prediction.tasks.tolist() == expected["tasks"]
    torch.testing.assert_close(prediction.share, torch.tensor(expected["share"]), **CLOSE)
    torch.testing.assert_close(prediction.confidence, torch.tensor(expected["confidence"]), **CLOSE)


def test_an_old_model_file_loads_with_every_setting(learner):
    cascade, _, signature = learner.config.selectors
    assert (cascade.size, cascade.shrinkage, cascade.temperature) == (6, 0.05, 2.0)
    assert (cascade.logit_weight, cascade.covariance_pooling, cascade.mean_contraction) == (0.5, 0.75, 0.9)
    assert signature.norm == 1
    assert learner.config.pruner == cps.NNrelief(0.8)
    assert learner.config.train == cps.Training(
        3, cps.SGD(0.05), cps.Cosine(0.1), batch_size=16, loss=cps.Contrastive()
    )
    assert learner.config.augment == cps.Chain((cps.PadCrop(1), cps.Flip(), cps.Rotate(5.0)))
    assert learner.config.rotations == cps.Rotations(flips=True)
    assert learner.config.capacity == cps.Capacity(min_free=0.5, budget=0.8)
    assert learner.network.subnetworks[1].notes == {"learned": "2026-08-01"}


def test_an_old_model_keeps_its_fingerprints_and_predictions(learner):
    for task, expected in enumerate(EXPECTED["fingerprints"]):
        assert learner.fingerprint(task).tensors == expected["tensors"]
    for outputs, expected in zip(learner.evidence(IMAGES), EXPECTED["logits"], strict=True):
        torch.testing.assert_close(outputs.logits.cpu(), torch.tensor(expected), **CLOSE)
    for selector in learner.config.selectors:
        assert_predicts(learner.predict(IMAGES, selector=selector), EXPECTED[selector.name])
    assert list(learner.predict(IMAGES, reject=0.2).classes) == EXPECTED["reject"]


def test_an_old_model_saved_again_predicts_the_same(learner, tmp_path, fabric):
    learner.save(tmp_path / "again.cps")
    again = cps.load(tmp_path / "again.cps", conv_net(), fabric=fabric)
    assert again.config.selectors == learner.config.selectors
    assert_predicts(again.predict(IMAGES), EXPECTED[learner.config.selectors[0].name])


def test_an_old_checkpoint_resumes_to_the_model_it_would_have_become(learner, tmp_path):
    fabric = cps.make_fabric(accelerator=ACCELERATOR, precision="32-true")  # that it was written with
    path = shutil.copy(FILES / "second-task.checkpoint", tmp_path)
    epochs = []
    resumed = cps.load(FILES / "one-task.model", conv_net(), fabric=fabric, on_epoch=epochs.append)
    resumed.learn(make_task(10, classes=3), checkpoint=path)
    assert (epochs[0].phase, epochs[0].epoch) == (1, 2)
    whole, again = learner.network.subnetworks[1], resumed.network.subnetworks[1]
    # The gradient of a bias before a norm layer is rounding error, which Adam scales up. So outputs are compared.
    assert sum(int((mask != again.masks[name]).sum()) for name, mask in whole.masks.items()) <= 1  # of 112 connections
    logits = [each.evidence(IMAGES)[1].logits for each in (learner, resumed)]
    torch.testing.assert_close(*logits, rtol=1e-2, atol=5e-3)
    classes = zip(resumed.predict(IMAGES).classes, EXPECTED["Cascade"]["classes"], strict=True)
    assert sum(found == expected for found, expected in classes) >= 20  # of 24; rounding may change a close decision


def test_negative_control_an_old_checkpoint_of_other_settings_raises(tmp_path, fabric):
    path = shutil.copy(FILES / "second-task.checkpoint", tmp_path)
    resumed = cps.load(FILES / "one-task.model", conv_net(), fabric=fabric, prune_images=21)
    with pytest.raises(ValueError, match="prune_images"):
        resumed.learn(make_task(10, classes=3), checkpoint=path)


def test_an_old_model_of_image_folders_verifies_and_predicts(tmp_path, fabric):
    path = shutil.copy(FILES / "folder.model", tmp_path / "folder.cps")
    expected = json.loads((FILES / "folder-answers.json").read_text())
    learner = cps.load(path, fabric=fabric)
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (12, 3, 8, 8), generator=draws, dtype=torch.uint8)
    assert_predicts(learner.predict(images), expected)
    for task, fingerprint in enumerate(expected["fingerprints"]):
        assert learner.fingerprint(task).tensors == fingerprint["tensors"]
    for command in ("verify", "inspect"):
        done = CliRunner().invoke(app, [command, str(path)])
        assert done.exit_code == 0, done.output
    described = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).output)
    assert described["tasks"][0]["notes"]["accuracy"] == {"task found": 1.0, "task known": 1.0}


def test_negative_control_a_changed_bit_in_an_old_file_is_detected(tmp_path, fabric):
    content = bytearray((FILES / "two-tasks.model").read_bytes())
    content[-100] ^= 1
    (tmp_path / "damaged.cps").write_bytes(content)
    with pytest.raises(cps.FileError):
        cps.load(tmp_path / "damaged.cps", conv_net(), fabric=fabric)
