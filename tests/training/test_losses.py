"""Losses: the contrastive term is what its formula says, and any loss trains, on every path."""

import copy
import math

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.data.normalize import Prepare
from cps.network.classifier import Classifier
from cps.training.cuda.captured_step import CapturedStep
from cps.training.cuda.device_batches import EpochPlan
from cps.training.losses import supervised_contrast
from samples import ACCELERATOR, conv_net, make_task


def test_the_contrastive_term_is_that_of_the_formula():
    torch.manual_seed(0)
    features, labels = torch.randn(6, 4), torch.tensor([0, 1, 0, 2, 1, 0])
    points = features / features.norm(dim=1, keepdim=True)
    total, counted = 0.0, 0
    for i in range(6):
        others = [j for j in range(6) if j != i]
        friends = [j for j in others if labels[j] == labels[i]]
        if not friends:  # the only image of its label says nothing
            continue
        every = math.log(sum(math.exp(float(points[i] @ points[j]) / 0.2) for j in others))
        total += sum(every - float(points[i] @ points[j]) / 0.2 for j in friends) / len(friends)
        counted += 1
    assert counted == 5
    assert float(supervised_contrast(features, labels, 0.2)) == pytest.approx(total / counted, rel=1e-5)


def test_a_batch_without_a_pair_has_no_contrast_and_a_gradient():
    features = torch.randn(3, 4, requires_grad=True)
    loss = cps.Contrastive()(features, features, torch.arange(3))
    loss.backward()
    torch.testing.assert_close(loss, nn.functional.cross_entropy(features, torch.arange(3)))
    assert features.grad.isfinite().all()


def test_the_contrastive_loss_draws_features_of_a_class_together(make_learner):
    def spread(loss):
        learner = make_learner(train=cps.Training(20, cps.Adam(1e-2), batch_size=16, loss=loss), rounds=0)
        task = make_task(0, classes=3, images=48)
        learner.learn(task)
        images, labels = task.train
        features = nn.functional.normalize(learner.evidence(images)[0].features.cpu(), dim=1)
        same = torch.tensor(labels)[:, None] == torch.tensor(labels)[None]
        likeness = features @ features.T
        return float(likeness[same].mean() - likeness[~same].mean())

    assert spread(cps.Contrastive(weight=1.0)) > spread(cps.CrossEntropy()) + 0.05


def test_an_engine_takes_the_same_steps_with_another_loss():
    torch.manual_seed(0)
    device, loss = torch.device(ACCELERATOR), cps.Contrastive(weight=1.0)
    images, labels = torch.randn(16, 2, 6, 6, device=device).double(), torch.arange(16, device=device) % 3
    backbone, head = conv_net().double().to(device), nn.Linear(12, 3).double().to(device)
    initial = copy.deepcopy(backbone.state_dict())
    model = Classifier(backbone, copy.deepcopy(head))
    training = cps.Training(1, cps.Adam(1e-2), batch_size=16, loss=loss)
    show = BatchTransform(Prepare(dtype=torch.float64))
    engine = CapturedStep(model, images, training, show, is_bf16=False, is_long=False)
    backbone.load_state_dict(initial)
    engine.begin(model, {}, None)
    examples = TensorExamples(images.repeat(3, 1, 1, 1), labels.repeat(3))
    engine.run(examples, EpochPlan([torch.arange(16)] * 3, torch.zeros(48, 0), [1.0] * 3, [1.0] * 3))
    engine.settle()
    found = {name: value.clone() for name, value in backbone.state_dict().items()}
    backbone.load_state_dict(initial)
    plain = Classifier(backbone, copy.deepcopy(head)).train()
    optimizer = cps.Adam(1e-2)(plain.parameters())
    for _ in range(3):
        loss(plain.backbone(images), plain(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in backbone.state_dict().items():
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3)


def test_a_loss_is_kept_in_the_model_file(make_learner, tmp_path):
    training = cps.Training(1, cps.Adam(1e-2), loss=cps.Contrastive(weight=0.25))
    learner = make_learner(train=training)
    learner.learn(make_task(0))
    learner.save(tmp_path / "m.cps")
    assert cps.load(tmp_path / "m.cps", conv_net()).train == training


@pytest.mark.parametrize("wrong", [{"weight": -1.0}, {"temperature": 0.0}])
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="temperature"):
        cps.Contrastive(**wrong)


def test_a_model_learned_with_your_own_loss_is_loaded_once_it_is_given(make_learner, tmp_path):
    def own(features, logits, labels):
        return nn.functional.cross_entropy(logits, labels)

    training = cps.Training(1, loss=own)
    learner = make_learner(train=training, retrain=training)
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match=r"was learned with train <function .*own>; pass train=... to load it"):
        cps.load(tmp_path / "model.cps", conv_net())
    loaded = cps.load(tmp_path / "model.cps", conv_net(), train=training, retrain=training, fabric=learner.fabric)
    assert loaded.fingerprint(0) == learner.fingerprint(0)
