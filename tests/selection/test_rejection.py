"""Unknown images are rejected by the rank of their maximum logit and of their distance in the shared space."""

import numpy as np
import pytest
import torch

import cps
from cps.evaluation.metrics import auroc
from cps.network.architectures import Architecture
from cps.network.outputs import Evidence, Outputs
from cps.selection.predict import select
from cps.selection.rejection import FEW_HELD_OUT, QUANTILES, REJECTION_KEY, WEIGHTS, rejection_score
from cps.storage.container import FileError
from samples import conv_net, make_task


def test_unknown_images_are_rejected_and_so_is_the_given_share_of_known_ones(learner):
    known = torch.cat([make_task(first, test=60).test[0] for first in (0, 10, 20)])
    unknown = torch.zeros(40, 2, 6, 6) + 0.01 * torch.randn(40, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    assert learner.predict(unknown, reject=0.1).classes.count(None) > 30
    rejected = learner.predict(known, reject=0.1).classes.count(None) / len(known)
    assert 0.05 < rejected < 0.2
    assert None not in learner.predict(unknown).classes
    with pytest.raises(ValueError, match="share of known images"):
        learner.predict(known, reject=1.0)


def test_a_threshold_from_training_images_warns_once(learner, tmp_path, caplog):
    learner.save(tmp_path / "model.cps")
    learner = cps.load(tmp_path / "model.cps", learner.network.backbone, fabric=learner.fabric)  # has not warned yet
    images = make_task(0).test[0]
    held_out = [subnetwork.statistics[REJECTION_KEY]["are_new"] for subnetwork in learner.network.subnetworks]
    assert not any(held_out)  # few images were held out, so training images were used too
    for value in held_out:
        value.fill_(1)
    learner.predict(images, reject=0.1)
    assert not caplog.records  # the negative control
    for value in held_out:
        value.zero_()
    for _ in range(2):
        learner.predict(images, reject=0.1)
    assert [record.message for record in caplog.records] == [FEW_HELD_OUT]


def test_the_rejection_score_falls_further_below_the_lowest_known_logit(learner):
    quantiles = learner.network.subnetworks[0].statistics[REJECTION_KEY]["quantiles"]
    largest = torch.stack([quantiles[0] - 2, quantiles[0] - 1, quantiles[100], quantiles[500], quantiles[1000] + 1])
    evidence = Evidence(lambda tasks: [Outputs(largest, largest[:, None].expand(-1, 2)) for _ in tasks], 3)
    scores = rejection_score(learner.network, evidence, torch.zeros(5, dtype=torch.long), cps.MaxOutput()).tolist()
    assert scores[0] < scores[1] < 0
    assert scores[2:] == pytest.approx([100, 500, 1000], abs=10)  # several quantiles may be the same image


@pytest.mark.parametrize("reject", [np.float32(0.05), 0, 0.05])
def test_reject_may_be_a_numpy_number(learned, reject):
    assert len(learned.predict(torch.rand(1, 2, 6, 6), reject=reject).classes) == 1


@pytest.mark.parametrize("reject", [1, -0.1, "0.05", None])
def test_reject_must_be_a_share(learned, reject):
    with pytest.raises(ValueError, match=r"in \[0, 1\), got"):
        learned.predict(torch.rand(1, 2, 6, 6), reject=reject)


FIRSTS = (0, 10, 20)


def known_and_unknown(learner, selector):
    """Return the rejection scores of new images of the learned tasks, and of images of other ones."""
    scores = []
    for firsts in (FIRSTS, (30, 40, 50)):
        evidence = learner.evidence(torch.cat([make_task(first, test=60).test[0] for first in firsts]))
        statistics, groups = learner.network.statistics(selector.name), torch.arange(evidence.num_images)
        tasks = select(selector, evidence, statistics, groups).tasks
        scores.append(rejection_score(learner.network, evidence, tasks, selector))
    return scores


@pytest.fixture(scope="module")
def fused():
    """Return a learner of three tasks whose selector has a shared space. Tests must not change it."""
    torch.manual_seed(0)
    training = cps.Training(8, cps.Adam(1e-2), batch_size=16)
    learner = cps.Learner(
        conv_net(), rounds=1, train=training, retrain=training, fabric=cps.make_fabric(accelerator="cpu"),
        selectors=(cps.Fusion(cps.SharedSpace(cps.RandomReLU(40)), cps.Cascade(size=8)), cps.MaxOutput()),
    )  # fmt: skip
    for first in FIRSTS:
        task = make_task(first, images=60, test=60)
        held_out = make_task(first, images=60, seed=0, test=180).test
        learner.learn(cps.Task(task.classes, train=task.train, val=(held_out[0][60:], held_out[1][60:])))
    return learner


def test_the_distance_in_the_shared_space_separates_unknown_images_better_than_the_logit_alone(fused):
    together, alone = (known_and_unknown(fused, selector) for selector in fused.config.selectors)
    assert auroc(*(each.numpy() for each in together)) > auroc(*(each.numpy() for each in alone)) + 0.02
    assert auroc(*(each.numpy() for each in together)) > 0.95


@pytest.mark.parametrize("reject", [0.05, 0.2])
def test_the_given_share_of_known_images_is_rejected_by_the_distance_and_the_logit(fused, reject):
    images = torch.cat([make_task(first, images=60, seed=0, test=400).test[0][180:] for first in FIRSTS])
    rejected = fused.predict(images, reject=reject).classes.count(None) / len(images)
    assert reject / 2 - 0.01 < rejected < 2 * reject


@pytest.mark.parametrize("reject", [0.05, 0.2])
def test_frozen_tasks_need_no_held_out_images_for_the_threshold(make_learner, reject, caplog):
    selectors = (cps.Fusion(cps.SharedSpace(cps.Pretrained())),)
    learner = make_learner(Architecture("small", 2), selectors=selectors)
    for first in FIRSTS:
        learner.learn_frozen(make_task(first, images=120))
        assert float(learner.network.subnetworks[-1].statistics["Fusion"][WEIGHTS][0]) == 0  # only the distance counts
    images = torch.cat([make_task(first, images=120, test=300).test[0] for first in FIRSTS])
    rejected = learner.predict(images, reject=reject).classes.count(None) / len(images)
    assert reject / 2 - 0.02 < rejected < 2 * reject
    assert not caplog.records
    assert all(float(each.item()) < 1000 for each in known_and_unknown(learner, selectors[0])[1])


def test_tasks_without_distances_are_rejected_by_their_logit_alone(fused, tmp_path):
    images = torch.cat([make_task(first, test=60).test[0] for first in (0, 30)])
    path = tmp_path / "model.cps"
    fused.save(path)
    loaded = cps.load(path, conv_net(), fabric=fused.fabric)
    assert loaded.predict(images, reject=0.2).classes == fused.predict(images, reject=0.2).classes
    logit = fused.predict(images, selector=cps.MaxOutput(), reject=0.2)
    for subnetwork in loaded.network.subnetworks:  # as in a file of an earlier version
        for name in (WEIGHTS, QUANTILES):
            del subnetwork.statistics["Fusion"][name]
    old = loaded.predict(images, reject=0.2)
    same_task = (old.tasks == logit.tasks).tolist()
    unknown = [[name is None for name in each.classes] for each in (old, logit)]
    assert any(unknown[0])
    assert [known for known, same in zip(unknown[0], same_task, strict=True) if same] == [
        known for known, same in zip(unknown[1], same_task, strict=True) if same
    ]


def test_streams_and_forgetting_keep_the_distance(fused, tmp_path):
    fused.save(tmp_path / "model.cps")
    learner = cps.load(tmp_path / "model.cps", conv_net(), fabric=fused.fabric)
    learner.forget(1)
    assert all(WEIGHTS in each for each in learner.network.statistics("Fusion"))
    unknown, known = make_task(10, test=60).test[0], make_task(20, test=60).test[0]
    for predict in (learner.predict, learner.stream().predict):
        assert predict(unknown, reject=0.05).classes.count(None) > 45
        assert predict(known, reject=0.05).classes.count(None) < 12


@pytest.mark.parametrize("damage", [{WEIGHTS: torch.ones(3)}, {QUANTILES: torch.ones(7)}])
def test_a_file_with_damaged_rejection_statistics_is_refused(fused, tmp_path, damage):
    fused.save(tmp_path / "model.cps")
    learner = cps.load(tmp_path / "model.cps", conv_net(), fabric=fused.fabric)
    learner.network.subnetworks[1].statistics["Fusion"].update(damage)
    learner.save(tmp_path / "odd.cps")
    with pytest.raises(FileError, match="damaged rejection statistics of task 1"):
        cps.load(tmp_path / "odd.cps", conv_net(), fabric=fused.fabric)


def test_a_first_task_of_one_class_is_rejected_by_its_logit(make_learner):
    learner = make_learner(Architecture("small", 2), selectors=(cps.Fusion(cps.SharedSpace(cps.Pretrained())),))
    learner.learn_frozen(make_task(0, classes=1))
    assert WEIGHTS not in learner.network.subnetworks[0].statistics["Fusion"]  # there is nothing to be relative to
    learner.learn_frozen(make_task(10))
    assert len(learner.predict(make_task(0).test[0], reject=0.1).classes) == 12


def test_few_images_reject_an_unseen_colour(make_learner):
    draws = torch.Generator().manual_seed(2)
    colours = torch.rand(3, 3, 1, 1, generator=draws)

    def draw(colour, images):
        return (colours[colour] + 0.1 * torch.randn(images, 3, 8, 8, generator=draws)).clamp(0, 1)

    learner = make_learner(Architecture("small", 3), selectors=(cps.Fusion(), cps.MaxOutput()))
    images = torch.cat([draw(0, 16), draw(1, 16)])
    learner.learn(cps.Task(["one", "other"], train=(images, [0] * 16 + [1] * 16)))
    known, unknown = torch.cat([draw(0, 40), draw(1, 40)]), draw(2, 40)
    assert learner.predict(unknown, reject=0.05).classes.count(None) == 40
    assert learner.predict(known, reject=0.05).classes.count(None) < 12
    by_logit = learner.predict(unknown, selector=cps.MaxOutput(), reject=0.05).classes
    assert by_logit.count(None) < 10  # the negative control


def test_with_too_many_classes_the_logit_decides(fused, monkeypatch):
    selector, plain = fused.config.selectors
    evidence, tasks = fused.evidence(make_task(30, test=60).test[0]), torch.zeros(60, dtype=torch.long)
    scores = {each.name: rejection_score(fused.network, evidence, tasks, each) for each in (selector, plain)}
    assert not torch.equal(scores["Fusion"], scores["MaxOutput"])  # the negative control
    monkeypatch.setattr("cps.selection.shared_space.DISTANCE_CLASSES", 5)
    assert torch.equal(rejection_score(fused.network, evidence, tasks, selector), scores["MaxOutput"])
