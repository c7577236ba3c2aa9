"""The settings of a learner are checked when it is constructed."""

import numpy as np
import pytest

import cps
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
