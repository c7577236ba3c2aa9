"""Experience replay."""

import torch
from method_samples import MEMORY, QUICK, same_trajectory

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.finetuning import Finetuning
from cps.methods.replay.experience_replay import ExperienceReplay
from samples import conv_net, make_task


def make(kind, fabric, **settings):
    torch.manual_seed(0)
    return kind(conv_net(), train=QUICK, fabric=fabric, **settings)


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: ExperienceReplay(backbone, train=QUICK, memory=MEMORY, fabric=fabric))


def test_without_memory_it_is_finetuning_to_the_bit(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    methods = [make(ExperienceReplay, fabric, memory=Memory(0)), make(Finetuning, fabric)]
    assert same_trajectory(*methods, tasks)
    methods = [make(ExperienceReplay, fabric, memory=Memory(8)), make(Finetuning, fabric)]
    assert not same_trajectory(*methods, tasks)


def test_it_keeps_no_more_images_than_its_memory_says(fabric):
    method = make(ExperienceReplay, fabric, memory=Memory(7))
    for index, expected in enumerate((6, 4, 6)):  # 3, 1 and 1 of each class
        method.learn(make_task(10 * index))
        assert len(method.exemplars) == expected
        assert method.kept()["exemplars"] == expected * 2 * 6 * 6 * 4


def test_it_remembers_what_finetuning_forgets(fabric):
    tasks = [make_task(10 * index, images=48) for index in range(3)]
    train = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    right = {}
    for kind, settings in ((Finetuning, {}), (ExperienceReplay, {"memory": Memory(30)})):
        torch.manual_seed(0)
        method = kind(conv_net(), train=train, fabric=fabric, **settings)
        for task in tasks:
            method.learn(task)
        images, labels = tasks[0].test
        right[kind] = sum(a == b for a, b in zip(method.predict(images).classes, labels, strict=True))
    assert right[Finetuning] < 4
    assert right[ExperienceReplay] > 9
