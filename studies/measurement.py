"""Measurements on the outputs of all subnetworks for the test images."""

from collections.abc import Sequence

import torch
from torch import Tensor

import cps
from cps.evaluation.evaluator import EvaluationOutputs
from cps.selection.base import Statistics
from cps.selection.predict import choose_classes, select


def percent(flags: Tensor) -> float:
    """Return the percentage of flags that are true."""
    return 100 * float(flags.double().mean())


def is_task_found(selector: cps.Selector, statistics: Sequence[Statistics], test: EvaluationOutputs) -> Tensor:
    """Return for each image, as a group of one, whether the selector finds its task among all tasks."""
    groups = torch.arange(len(test.task), device=test.task.device)
    return select(selector, test.evidence(), statistics, groups).tasks.to(test.task.device) == test.task


def is_class_found(selector: cps.Selector, statistics: Sequence[Statistics], test: EvaluationOutputs) -> Tensor:
    """Return for each image, as a group of one, whether its class is predicted with the task unknown."""
    groups, evidence = torch.arange(len(test.task), device=test.task.device), test.evidence()
    tasks = select(selector, evidence, statistics, groups).tasks.to(test.task.device)
    _, classes = choose_classes(selector, evidence, statistics, tasks)
    return (tasks == test.task) & (classes.to(test.truth.device) == test.truth)
