"""A sealed subnetwork: its labels, its views of an image, and its tensors."""

import pytest
import torch
from torch import nn

import cps
from cps.data.rotations import class_logits, make_views
from samples import ROUNDING, make_task

IMAGES, _ = make_task(10).train


def test_indices_are_labels_unless_another_class_has_that_number_as_its_name(make_learner):
    for names in (["0", "1"], ["cat", "101"], ["cat", "dog"]):
        learner = make_learner()
        learner.learn(cps.Task(names, train=(IMAGES, [0, 1] * (len(IMAGES) // 2))))
        assert learner.classes == [tuple(names)]
    with pytest.raises(ValueError, match="the classes have numbers as names, so a label must be a name"):
        make_learner().learn(cps.Task(["1", "0"], train=(IMAGES, [0, 1] * (len(IMAGES) // 2))))


class Counting(nn.Module):
    """Counts its calls in a buffer, even in eval mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images):
        self.calls += 1
        return self.layer(images.flatten(1)) + 0 * self.calls


def test_a_backbone_that_changes_buffers_in_eval_mode_changes_copies(make_learner, tmp_path):
    learner = make_learner(Counting())
    learner.learn(make_task(0))
    assert learner.fingerprint(0) == learner.fingerprint(0)
    learner.predict(make_task(0).test[0])
    learner.save(tmp_path / "model.cps")
    assert cps.load(tmp_path / "model.cps", Counting(), fabric=learner.fabric).fingerprint(0) == learner.fingerprint(0)


def test_classes_learned_in_four_rotations_are_recognised_in_every_rotation(make_learner, tmp_path):
    draws = torch.Generator().manual_seed(0)
    patterns = torch.randn(2, 2, 6, 6, generator=draws)
    labels = torch.arange(64) % 2
    images = patterns[labels] + 0.3 * torch.randn(64, 2, 6, 6, generator=draws)
    training = cps.Training(20, cps.Adam(1e-2), batch_size=16)
    for rotations in (cps.Rotations(), cps.Rotations(at_once=True, flips=True)):
        learner = make_learner(rotations=rotations, train=training, retrain=training)
        subnetwork = learner.learn(cps.Task(["a", "b"], train=(images, labels.tolist())))
        assert subnetwork.head["bias"].shape == (8,)
        outputs = learner.evidence(images)[0]
        assert outputs.logits.shape == (64, 2)
        assert (outputs.logits.argmax(1).cpu() == labels).float().mean() > 0.9
        features = torch.stack(
            [learner.network.full_outputs([torch.rot90(images, k, (2, 3))], 0).features for k in range(4)]
        )
        torch.testing.assert_close(features[0], features[1], rtol=1e-3, atol=1e-4)  # the same four rotations
        learner.save(tmp_path / "model.cps")
        loaded = cps.load(tmp_path / "model.cps", learner.network.backbone, fabric=learner.fabric)
        assert loaded.fingerprint(0) == learner.fingerprint(0)
        assert loaded.config.rotations == rotations
        assert loaded.network.subnetworks[0].flips == rotations.flips
        compact = learner.extract(0)
        torch.testing.assert_close(compact(images.to(learner.network.device)), outputs.logits, **ROUNDING)


def test_a_single_class_can_be_learned_in_four_rotations(make_learner):
    learner = make_learner(rotations=cps.Rotations())
    images = make_task(0).train[0][:12]
    assert learner.learn(cps.Task(["bolt"], train=(images, ["bolt"] * 12))).num_rotations == 4
    learner.configure(rotations=cps.Upright())
    learner.learn(make_task(10))
    assert set(learner.predict(images).classes) <= {"bolt", 10, 11}
    with pytest.raises(ValueError, match="rotations=cps.Rotations"):
        learner.learn(cps.Task(["nut"], train=(images, ["nut"] * 12)))


def test_with_flips_an_image_and_its_mirror_image_have_the_same_logits(make_learner):
    images = make_task(0).train[0]
    for rotations, is_same in ((cps.Upright(flips=True), True), (cps.Upright(), False)):
        learner = make_learner(rotations=rotations)
        learner.learn(make_task(0))
        first, second = (learner.evidence(each)[0].logits for each in (images, images.flip(-1)))
        assert torch.allclose(first, second, atol=1e-4) == is_same


@pytest.mark.parametrize(("num_rotations", "flips"), [(1, False), (1, True), (4, False), (4, True)])
def test_class_logits_are_the_mean_over_views_to_the_bit(num_rotations, flips):
    """Digests of outputs depend on these bits."""
    views, draws = make_views(num_rotations, flips), torch.Generator().manual_seed(0)
    features, weight = (
        torch.randn(len(views), 4, 37, generator=draws),
        torch.randn(3 * num_rotations, 37, generator=draws),
    )
    bias = torch.randn(3 * num_rotations, generator=draws)
    logits = [torch.nn.functional.linear(features[i], weight[view.rotation :: num_rotations], bias[view.rotation :: num_rotations])
              for i, view in enumerate(views)]  # fmt: skip
    expected = logits[0] if len(logits) == 1 else torch.stack(logits).mean(dim=0)
    assert torch.equal(class_logits(features, views, weight, bias), expected)
