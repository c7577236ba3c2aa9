"""IL2M: rescaled scores of old classes."""

import pytest
import torch
from method_samples import MEMORY, QUICK, make, same_trajectory

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.replay.experience_replay import ExperienceReplay
from cps.methods.replay.il2m import IL2M, class_means, rescaled
from samples import make_task


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: IL2M(backbone, train=QUICK, memory=MEMORY, fabric=fabric))


def test_a_score_is_rescaled_as_worked_by_hand_and_only_if_the_best_class_is_new():
    """0.2 * (0.8 / 0.4) * (0.9 / 0.75) = 0.48."""
    factors = torch.tensor([0.8 / 0.4 * 0.9 / 0.75])
    probabilities = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.1, 0.3]])
    found = rescaled(probabilities, factors)
    torch.testing.assert_close(found, torch.tensor([[0.48, 0.3, 0.5], [0.6, 0.1, 0.3]]))
    assert torch.equal(rescaled(probabilities, torch.ones(1)), probabilities)


def test_means_are_those_of_the_own_images_of_each_class():
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.3, 0.2, 0.5]])
    assert class_means(probabilities, torch.tensor([0, 0, 2]), 3).tolist() == pytest.approx([0.7, 1.0, 0.5])


def test_it_is_trained_as_experience_replay_to_the_bit(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    methods = [make(kind, fabric, memory=MEMORY) for kind in (IL2M, ExperienceReplay)]
    assert same_trajectory(*methods, tasks)
    images = tasks[0].test[0]
    scores, logits = (torch.cat([each.logits for each in method.evidence(images)], dim=1) for method in methods)
    plain = logits.softmax(dim=1)
    assert not torch.allclose(scores.exp(), plain)
    methods[0].buffers["now"], methods[0].buffers["confidence"] = methods[0].buffers["first"], torch.ones(3)
    same = torch.cat([each.logits for each in methods[0].evidence(images)], dim=1)
    torch.testing.assert_close(same.exp(), plain)  # with factors of 1


def test_what_it_keeps_of_the_first_task_stays(fabric):
    method = make(IL2M, fabric, memory=MEMORY)
    method.learn(make_task(0))
    first, confidence = method.buffers["first"].clone(), method.buffers["confidence"].clone()
    assert torch.equal(first, method.buffers["first"][:2])
    assert confidence >= first.min()
    method.learn(make_task(10))
    assert torch.equal(method.buffers["first"][:2], first)
    assert torch.equal(method.buffers["confidence"][:1], confidence)
    assert {name: len(value) for name, value in method.buffers.items()} == {"first": 4, "confidence": 2, "now": 4}


@pytest.mark.parametrize("memory", [None, Memory(0)])
def test_without_a_memory_it_says_what_it_needs(fabric, memory):
    method = make(IL2M, fabric, memory=memory)
    with pytest.raises(ValueError, match="needs a memory for at least 1"):
        method.learn(make_task(0))
    assert method.image_passes == 0
    assert method.classes == []
