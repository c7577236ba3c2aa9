"""The model card tells what a model knows, how well, and how to use it."""

import pytest

import cps
from cps.app.model_card import model_card
from samples import conv_net, make_task


def test_the_card_has_classes_accuracy_and_commands(tmp_path, make_learner):
    learner = make_learner(cps.Architecture("small", weights="weights.pth, digest 0123"))
    images = make_task(0, shape=(3, 8, 8)).train[0]
    learner.learn(cps.Task(["bolt", "nut|<b>"], train=(images, ["bolt", "nut|<b>"] * 12)))
    counts = {"bolt": {"bolt": 6, "nut|<b>": 2}, "nut|<b>": {"nut|<b>": 2}}
    learner.annotate(0, confusion=counts, images=24, day="2026-11-19")
    learner.save(tmp_path / "parts.cps")
    card = model_card(tmp_path / "parts.cps")
    for text in (
        "# parts",
        "of 2 classes in 1 task, learned from 24 images",
        "80.0% of 10 images were recognised",
        "- bolt and nut\\|\\<b\\>: 2 images",
        "| bolt | 75% | 8 |",
        "Fewer than 5 images were held out for 1 of 2 classes",
        "weights.pth, digest 0123",
        "cps predict IMAGES --model parts.cps",
    ):
        assert text in card, text


def test_a_model_without_notes_says_that_nothing_was_measured(saved):
    card = model_card(saved[1])
    assert "Not measured: no images were held out." in card
    assert "Fewer than 5 images" not in card
    assert "The accuracy is that" not in card


@pytest.mark.parametrize(
    ("backbone", "channels", "usage"),
    [
        (cps.Architecture("small"), 3, "cps serve model.cps"),
        (cps.Architecture("small", channels=1), 1, 'cps.load("model.cps")'),
        (conv_net(3), 3, 'cps.load("model.cps", backbone)'),
    ],
    ids=["colour images", "grey images", "a backbone of yours"],
)
def test_the_card_shows_commands_only_for_models_that_they_open(tmp_path, make_learner, backbone, channels, usage):
    learner = make_learner(backbone)
    learner.learn(make_task(0, shape=(channels, 8, 8)))
    learner.save(tmp_path / "model.cps")
    card = model_card(tmp_path / "model.cps")
    assert usage in card
    assert ("cps predict" in card) == (usage == "cps serve model.cps")


def test_a_model_without_tasks_has_no_card(tmp_path, make_learner):
    make_learner().save(tmp_path / "empty.cps")
    with pytest.raises(ValueError, match="has no tasks"):
        model_card(tmp_path / "empty.cps")
