"""Losses: the contrastive loss follows its formula, and a model file keeps the loss."""

import math

import pytest
import torch
from torch import nn

import cps
from cps.training.losses import supervised_contrastive_loss
from samples import conv_net, make_task


def test_the_contrastive_loss_follows_its_formula():
    torch.manual_seed(0)
    features, labels = torch.randn(6, 4), torch.tensor([0, 1, 0, 2, 1, 0])
    points = features / features.norm(dim=1, keepdim=True)
    total, counted = 0.0, 0
    for i in range(6):
        others = [j for j in range(6) if j != i]
        positives = [j for j in others if labels[j] == labels[i]]
        if not positives:  # the only image of its label does not count
            continue
        every = math.log(sum(math.exp(float(points[i] @ points[j]) / 0.2) for j in others))
        total += sum(every - float(points[i] @ points[j]) / 0.2 for j in positives) / len(positives)
        counted += 1
    assert counted == 5
    assert float(supervised_contrastive_loss(features, labels, 0.2)) == pytest.approx(total / counted, rel=1e-5)


def test_smoothed_labels_spread_a_share_over_all_outputs():
    logits, labels = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]), torch.tensor([0, 1])
    target = 0.7 * nn.functional.one_hot(labels, 3) + 0.3 / 3
    expected = -(target * logits.log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(cps.SmoothedCrossEntropy(0.3)(logits, logits, labels), expected)
    torch.testing.assert_close(
        cps.SmoothedCrossEntropy(0.0)(logits, logits, labels), cps.CrossEntropy()(logits, logits, labels)
    )
    with pytest.raises(ValueError, match="smoothing of SmoothedCrossEntropy must be in"):
        cps.SmoothedCrossEntropy(1.0)


def test_a_batch_without_a_pair_has_no_contrastive_loss_but_a_finite_gradient():
    features = torch.randn(3, 4, requires_grad=True)
    loss = cps.Contrastive()(features, features, torch.arange(3))
    loss.backward()
    torch.testing.assert_close(loss, nn.functional.cross_entropy(features, torch.arange(3)))
    assert features.grad.isfinite().all()


def test_the_contrastive_loss_pulls_features_of_a_class_together(make_learner):
    def separation(loss):
        learner = make_learner(train=cps.Training(20, cps.Adam(1e-2), batch_size=16, loss=loss), rounds=0)
        task = make_task(0, classes=3, images=48)
        learner.learn(task)
        images, labels = task.train
        features = nn.functional.normalize(learner.evidence(images)[0].features.cpu(), dim=1)
        same = torch.tensor(labels)[:, None] == torch.tensor(labels)[None]
        similarity = features @ features.T
        return float(similarity[same].mean() - similarity[~same].mean())

    assert separation(cps.Contrastive(weight=1.0)) > separation(cps.CrossEntropy()) + 0.05


def test_a_loss_is_saved_in_the_model_file(make_learner, tmp_path):
    training = cps.Training(1, cps.Adam(1e-2), loss=cps.Contrastive(weight=0.25))
    learner = make_learner(train=training)
    learner.learn(make_task(0))
    learner.save(tmp_path / "m.cps")
    assert cps.load(tmp_path / "m.cps", conv_net()).config.train == training


@pytest.mark.parametrize(
    ("setting", "value", "message"), [("weight", -1.0, "must be 0 or more"), ("temperature", 0.0, "must be positive")]
)
def test_a_weight_or_temperature_out_of_range_raises(setting, value, message):
    with pytest.raises(ValueError, match=f"{setting} of Contrastive {message}, got {value}"):
        cps.Contrastive(**{setting: value})


def test_a_model_trained_with_a_custom_loss_loads_if_the_loss_is_passed(make_learner, tmp_path):
    def custom(features, logits, labels):
        return nn.functional.cross_entropy(logits, labels)

    training = cps.Training(1, loss=custom)
    learner = make_learner(train=training, retrain=training)
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match=r"was learned with train <function .*custom>, .*; pass train=\.\.\."):
        cps.load(tmp_path / "model.cps", conv_net())
    loaded = cps.load(tmp_path / "model.cps", conv_net(), train=training, retrain=training, fabric=learner.fabric)
    assert loaded.fingerprint(0) == learner.fingerprint(0)
