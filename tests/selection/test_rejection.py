"""Unknown images are rejected by the rank of their maximum logit."""

import numpy as np
import pytest
import torch

import cps
from cps.network.outputs import Evidence, Outputs
from cps.selection.rejection import FEW_HELD_OUT, REJECTION_KEY, rejection_score
from samples import make_task


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
    scores = rejection_score(learner.network, evidence, torch.zeros(5, dtype=torch.long)).tolist()
    assert scores[0] < scores[1] < 0
    assert scores[2:] == pytest.approx([100, 500, 1000], abs=10)  # several quantiles may be the same image


@pytest.mark.parametrize("reject", [np.float32(0.05), 0, 0.05])
def test_reject_may_be_a_numpy_number(learned, reject):
    assert len(learned.predict(torch.rand(1, 2, 6, 6), reject=reject).classes) == 1


@pytest.mark.parametrize("reject", [1, -0.1, "0.05", None])
def test_reject_must_be_a_share(learned, reject):
    with pytest.raises(ValueError, match=r"in \[0, 1\), got"):
        learned.predict(torch.rand(1, 2, 6, 6), reject=reject)
