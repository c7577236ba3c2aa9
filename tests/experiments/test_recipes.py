"""Recipes are plain data: the settings of the paper, and variants of them."""

import pytest

from cps.config import SETTINGS
from cps.experiments.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_name_it_is_listed_under_and_can_be_shortened(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    short = recipe.with_scaled_epochs(0.1)
    assert short.train.epochs == max(1, round(0.1 * recipe.train.epochs))
    assert short.train.optimizer == recipe.train.optimizer
    assert set(recipe.learner_settings()) <= set(SETTINGS)


def test_another_selector_can_predict():
    recipe = RECIPES["cifar100-10"]().with_selector("ImportanceSignature-L1")
    assert [selector.name for selector in recipe.selectors] == [
        "ImportanceSignature-L1",
        "MaxOutput",
        "ImportanceSignature",
        "Cascade",
    ]
    with pytest.raises(ValueError, match="unknown selector 'Magic'; choose from: .*MaxOutput"):
        recipe.with_selector("Magic")


def test_a_backbone_depends_only_on_the_seed():
    recipe = RECIPES["digits"]()
    first, again, other = (recipe.make_backbone(seed).state_dict() for seed in (0, 0, 1))
    assert all(value.equal(again[name]) for name, value in first.items())
    assert not first["layers.0.weight"].equal(other["layers.0.weight"])


def test_the_recipes_of_the_paper_use_all_sealed_weights():
    capacities = {name: make().capacity for name, make in RECIPES.items()}
    others = ("digits", "-single", "-fusion", "-small", "-trunk")
    of_the_paper = [name for name in capacities if not any(part in name for part in others)]
    assert len(of_the_paper) == 11
    assert {capacities[name].min_free for name in of_the_paper} == {0.0}
    assert {capacity.budget for name, capacity in capacities.items() if name.endswith("-single")} == {0.01}
