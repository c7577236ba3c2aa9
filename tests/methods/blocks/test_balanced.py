"""Balanced sets of old and new images."""

import torch
from method_samples import QUICK

from cps.methods.blocks.balanced import balanced_examples, balanced_number
from cps.methods.blocks.memory import Herding, Memory
from cps.methods.finetuning import Finetuning
from samples import conv_net, make_task


class Balanced(Finetuning):
    """Finetuning that looks at the balanced set after each training."""

    def train_task(self, task):
        super().train_task(task)
        self.number = balanced_number(self, task)
        if self.number:
            self.examples, self.chosen = balanced_examples(self, task, self.number), self.features_of(task.examples)


def test_a_balanced_set_has_as_many_images_of_each_class_as_an_old_class_has_in_memory(fabric):
    method = Balanced(conv_net(), train=QUICK, memory=Memory(20), fabric=fabric)
    method.learn(make_task(0))
    assert method.number == 0
    old, task = [images.clone() for images in method.exemplars.images], make_task(10)
    method.learn(task)
    assert method.number == 10  # 20 for two classes; afterwards, 5 for each of four
    images, labels = method.examples.images, method.examples.targets
    assert torch.bincount(labels).tolist() == [10] * 4
    assert torch.equal(images[:20], torch.cat(old))
    own = torch.tensor(task.train[1]) == 10
    herded = Herding()(method.chosen[own].cpu(), 10, torch.Generator())
    assert torch.equal(images[labels == 2], task.train[0][own][herded])


def test_a_class_with_few_images_limits_the_set(fabric):
    method = Balanced(conv_net(), train=QUICK, memory=Memory(20), fabric=fabric)
    method.learn(make_task(0))
    method.learn(make_task(10, classes=8))
    assert method.number == 3
    assert torch.bincount(method.examples.targets).tolist() == [3] * 10


def test_without_memory_there_is_no_balanced_set(fabric):
    method = Balanced(conv_net(), train=QUICK, memory=None, fabric=fabric)
    for index in range(2):
        method.learn(make_task(10 * index))
        assert method.number == 0
