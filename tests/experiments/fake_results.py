"""Results of runs that never ran, with round numbers."""

import numpy as np

from cps.evaluation.metrics import Metrics
from cps.experiments.results import Results, Seconds
from cps.methods.closed_form_metrics import ClosedFormMetrics


def make_metrics(acc, shift=0.0):
    """Return metrics of two tasks; `shift` moves the accuracy after the last task."""
    rows = np.array([[acc + 10, np.nan], [acc - 5 + shift, acc + 5 + shift]])
    return Metrics(ACC=acc + shift, BWT=15.0 - shift, AIA=acc + 5, accuracy=rows, selection=rows.copy())


def make_closed_form(acc, shift=0.0, space="RandomReLU(size=9)", sizes=(1, 20)):
    """Return the metrics of a closed form; groups of 20 are 10 points better than single images."""
    return ClosedFormMetrics(
        space=space,
        classifier="LDA(shrinkage=0.1)",
        flips=False,
        task_il=make_metrics(acc + 15, shift),
        class_il={size: make_metrics(acc + (10 if size > 1 else 0), shift) for size in sizes},
        kept={"counts": 32, "means": 288, "covariances": 2**20, "weights": 2**30},
        seconds=2.5,
    )


def make_results(recipe="demo", order=0, shift=0.0, **changes):
    """Return results of two tasks as a run writes them."""
    fields = {
        "recipe": recipe,
        "order": order,
        "seed": 0,
        "device": "CPU",
        "versions": {"cps": "0.1.0"},
        "seconds": Seconds(learn=1.0, evaluate=1.0),
        "classes_per_task": (2, 2),
        "task_il": make_metrics(80, shift),
        "class_il": {"MaxOutput": {1: make_metrics(40, shift), 20: make_metrics(70, shift)}},
        "default_selector": "MaxOutput",
    }
    return Results(**{**fields, **changes})
