"""The methods of a comparison, and how they are made for a recipe."""

from dataclasses import replace

import pytest

import cps
from cps.experiments.contestants import CONTESTANTS, Setting, find_contestants
from cps.experiments.recipes import RECIPES
from cps.learner import Learner
from cps.methods.blocks.memory import Memory


def test_joint_training_and_methods_that_were_not_published_use_the_training_of_the_recipe(fabric):
    recipe = RECIPES["cifar100-10"]().with_scaled_epochs(0.1)
    joint = CONTESTANTS["joint"].make(Setting(recipe, fabric, budget="own"))
    assert joint.train.epochs == 10
    assert joint.train.optimizer == cps.SGD(0.1, weight_decay=5e-4)
    assert CONTESTANTS["finetuning"].make(Setting(recipe, fabric, budget="own")).train == recipe.train
    digits = RECIPES["digits"]()
    assert CONTESTANTS["joint"].make(Setting(digits, fabric, budget="own")).train == digits.train


def test_with_an_equal_budget_all_methods_have_the_recipes_optimizer_and_image_passes(fabric):
    setting = Setting(RECIPES["digits"](), fabric)
    assert setting.passes == 20 + 2 * 10
    for name, contestant in CONTESTANTS.items():
        method = contestant.make(setting)
        if hasattr(method, "passes"):
            assert method.passes == 40, name
            assert method.train == replace(setting.recipe.train, epochs=40), name
        elif isinstance(method, Learner):
            assert method.config.train == setting.recipe.train


def test_the_memory_of_a_setting_replaces_that_of_methods_that_keep_images_only(fabric):
    memory = Memory(30)
    for name, contestant in CONTESTANTS.items():
        published = getattr(contestant.make(Setting(RECIPES["digits"](), fabric)), "memory", None)
        found = getattr(contestant.make(Setting(RECIPES["digits"](), fabric, memory=memory)), "memory", None)
        assert found is (None if published is None else memory), name


def test_all_stands_for_every_method_and_an_unknown_one_names_the_nearest():
    assert list(find_contestants(["icarl", "all"])) == ["icarl", *(name for name in CONTESTANTS if name != "icarl")]
    with pytest.raises(ValueError, match=r"unknown method 'iCarl' \(did you mean icarl or itaml\?\)"):
        find_contestants(["iCarl"])
