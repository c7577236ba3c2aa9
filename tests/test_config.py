"""The settings of a learner are checked when it is constructed."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from studies.default_training import CANDIDATES, NETWORKS
from studies.published import read_json

import cps
from cps.config import RETRAIN, TRAIN
from cps.training.settings import scale_epochs
from samples import conv_net, make_task


@pytest.mark.parametrize(
    "settings",
    [
        {"train": 3},
        {"pruner": cps.NNrelief},
        {"augment": cps.Flip},
        {"rotations": "four"},
        {"selectors": [cps.MaxOutput]},
    ],
    ids=str,
)
def test_settings_of_the_wrong_type_raise(make_learner, settings):
    with pytest.raises(TypeError, match=r"must be a cps.Training|must be an object such as cps"):
        make_learner(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": "3"}, "rounds must be an integer, 0 or more, got '3'"),
        ({"rounds": 2.5}, "rounds must be an integer, 0 or more, got 2.5"),
        ({"rotations": cps.Rotations}, r"such as cps.Rotations\(\), got .* \(the class itself; pass an instance\)"),
        ({"on_epoch": 3}, "on_epoch must be a function, got 3"),
        ({"selectors": None}, "selectors must be a tuple, .* got None"),
        ({"selectors": cps.Cascade}, "selectors must be a tuple, .* got <class"),
        ({"selectors": cps.MaxOutput()}, "selectors must be a tuple"),
    ],
    ids=str,
)
def test_the_error_names_the_setting_and_what_was_expected(settings, message):
    with pytest.raises(TypeError, match=message):
        cps.Learner(conv_net(), **settings)


def test_prune_images_must_be_positive(make_learner):
    with pytest.raises(ValueError, match="prune_images"):
        make_learner(prune_images=0)


@pytest.mark.parametrize("name", ["rounds", "prune_images", "seed", "selectors"])
def test_none_is_no_value_of_a_setting_without_a_default_object(name):
    with pytest.raises(TypeError, match=f"{name} must be .*, got None"):
        cps.LearnerConfig(**{name: None})
    assert cps.LearnerConfig(pruner=None, capacity=None) == cps.LearnerConfig()  # these have one


def test_settings_may_be_numpy_numbers(make_learner, tmp_path):
    learner = make_learner(rounds=np.int64(1), prune_images=np.int32(20), seed=np.int64(3))
    learner.learn(make_task())
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    assert (loaded.config.rounds, loaded.config.prune_images, loaded.config.seed) == (1, 20, 3)


def held_out_accuracy(candidate, network):
    runs = read_json("default-training")["runs"]
    found = [run["held out"] for run in runs if (run["candidate"], run["network"]) == (candidate, network)]
    return np.mean(found) if found else np.nan


def test_the_default_training_is_the_one_that_was_best_on_held_out_images_of_many_kinds_of_network():
    means = {name: np.mean([held_out_accuracy(name, network) for network in NETWORKS]) for name in CANDIDATES}
    measured = {name: mean for name, mean in means.items() if not np.isnan(mean)}  # on all networks
    assert len(measured) > 1
    best = CANDIDATES[max(measured, key=lambda name: measured[name])]
    for training, schedule in ((TRAIN, best.train), (RETRAIN, best.retrain)):
        assert (training.optimizer, training.schedule) == (best.optimizer, schedule)
    assert cps.Training(1).optimizer == best.optimizer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet", "test_resnet", "test_vit"])
def test_the_default_training_learns_networks_of_many_kinds(name, fabric):
    """With a fifth of its epochs, on 200 digits of five classes."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    (images, labels), _ = cps.read_digits()
    images, labels = torch.from_numpy(images[labels < 5][:400]), labels[labels < 5][:400]
    images = F.interpolate(images, size=32).expand(-1, 3, -1, -1)
    training, retraining = (scale_epochs(phase, 0.2) for phase in (TRAIN, RETRAIN))
    size = {"img_size": 32} if "vit" in name else {}
    backbone = timm.create_model(name, num_classes=0, **size)
    learner = cps.Learner(backbone, rounds=1, train=training, retrain=retraining, fabric=fabric)
    learner.learn(cps.Task(range(5), train=(images[:200], labels[:200])))
    assert (learner.predict(images[200:], task=0) == labels[200:]).mean() > 0.6
