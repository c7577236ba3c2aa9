"""Results of runs that never ran, with round numbers."""

import numpy as np

from cps.evaluation.metrics import Metrics
from cps.experiments.comparison import Comparison, MethodResult
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


def make_method_result(method="icarl", name="iCaRL", acc=40.0, order=1993, ways=("MaxOutput",), **changes):
    """Return what a comparison measures of a method, with round numbers; each further way is five points worse."""
    class_il = {way: {1: make_metrics(acc - 5 * i), 20: make_metrics(acc + 10 - 5 * i)} for i, way in enumerate(ways)}
    fields = {
        "method": method,
        "name": name,
        "order": order,
        "seed": 0,
        "assumes": {"replay": method == "icarl", "groups": False, "task_given": False},
        "settings": {},
        "selector": ways[0],
        "group_selector": ways[0],
        "classes_per_task": (2, 2),
        "task_il": make_metrics(80),
        "class_il": class_il,
        "kept": {"weights": 2**20, "exemplars": 2**19},
        "kept_while_learning": {"weights": 2**20, "exemplars": 2**19, "teacher": 2**20},
        "image_passes": 4000,
        "seconds": 12.5,
        "device": "CPU",
        "versions": {"cps": "0.2.0"},
    }
    return MethodResult(**{**fields, **changes})


def make_comparison(*results, **changes):
    """Return a comparison of some results, by default of iCaRL and a closed form on two orders, and of cps on one."""
    default = [
        make_method_result(order=order, method=method, name=name, acc=acc + shift)
        for order, shift in ((1993, 0.0), (1605, 2.0))
        for method, name, acc in (("icarl", "iCaRL", 40.0), ("closed-form", "closed form", 50.0))
    ]
    default.append(make_method_result("cps", "cps", 60.0, ways=("Fusion", "MaxOutput")))
    fields = {"recipe": "demo", "budget": "equal", "passes": 40, "memory": "100 images"}
    return Comparison(**{**fields, "results": tuple(results or default), **changes})
