"""Teachers and frozen models."""

import torch

from cps.methods.blocks.teacher import Teacher, frozen
from samples import conv_net


def test_a_teacher_is_a_copy_that_stays_as_it_is_in_training_mode():
    model = conv_net()
    teacher = Teacher(model).train()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    outputs = teacher(torch.randn(4, 2, 6, 6))
    assert not outputs.requires_grad
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)
    assert model.training
    assert teacher.nbytes == sum(value.nbytes for value in model.state_dict().values())


def test_a_frozen_model_can_be_trained_again_afterwards_as_far_as_before():
    model = conv_net()
    model[0].requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    with frozen(model) as fixed:
        assert fixed.model is model
        assert not any(parameter.requires_grad for parameter in model.parameters())
        fixed.train()
        assert not model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == before
