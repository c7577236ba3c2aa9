"""`python -m studies.streams MODEL --data DIR --out FILE`: streams of images, unknown images, settings of the cascade.

MODEL is the `model.cps` of a run of `cps bench`. Streams of test images change their task at several rates. For unknown
images, only the first half of the tasks counts as learned, and the images of the other tasks are unknown.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cps
from cps.evaluation.evaluator import EvaluationOutputs, run_test_images
from cps.experiments.recipes import RECIPES
from cps.runtime.environment import describe_device, versions
from studies.ablation import selectors_around
from studies.measurement import is_task_found, percent
from studies.published import closed_form_run, describe_machine, markdown, read_json, write_compact
from studies.unknown_images import measure_rejection

RATES = (0.001, 0.002, 0.005, 0.02, 0.05, 0.2, 0.5, 0.9)  # most are not among the rates that a stream assumes
DRAWS = 5  # streams for each rate
RENAMED_SELECTORS = {  # in published files -> since
    "cascade, without own outputs": "cascade, logit_weight 0",
    "cascade, own outputs half as much": "cascade, half the logit_weight",
    "cascade, own outputs twice as much": "cascade, twice the logit_weight",
    "cascade, spreads alike": "cascade, covariance_pooling 1",
    "cascade, classes as far apart as in training": "cascade, mean_contraction 1",
}


def main() -> None:
    """Measure a model and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--recipe", default="cifar100-10")
    parser.add_argument("--order", type=int, default=1993, help="seed of the class order")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data set")
    parser.add_argument("--images", type=int, default=4000, help="length of each stream")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]()
    learner = cps.load(arguments.model, recipe.backbone(), **recipe.learner_settings())
    test = run_test_images(learner, recipe.scenario(arguments.data, arguments.order))
    selectors = {each.name: each for each in learner.config.selectors if each.name in ("Cascade", "MaxOutput")}
    results = {
        "recipe": recipe.name,
        "order": arguments.order,
        "device": describe_device(learner.fabric),
        "versions": versions(),
        "images": arguments.images,
        "draws": DRAWS,
        "streams": {name: measure_streams(learner, each, test, arguments.images) for name, each in selectors.items()},
        "strangers": _measure_unknown_images(learner, selectors["Cascade"], test),
        "selectors": measure_selectors(learner, selectors["Cascade"], test),
    }
    write_compact(arguments.out, results)


def measure_selectors(learner: cps.Learner, cascade: Any, test: EvaluationOutputs) -> dict[str, dict[str, float]]:
    """Return how many single images get the right class and the right task, with variants of a cascade."""
    results = {}
    for name, selector in selectors_around(cascade).items():
        is_found = is_task_found(selector, learner.network.statistics(selector.name), test)
        results[name] = {"class": percent(is_found & test.is_correct), "task": percent(is_found)}
        print(name, results[name], flush=True)
    return results


def measure_streams(
    learner: cps.Learner, selector: cps.Selector, test: EvaluationOutputs, length: int
) -> dict[str, float]:
    """Return the accuracy on streams that change their task at each rate, the mean over several draws."""
    results = {}
    for rate in RATES:
        correct = []
        for seed in range(DRAWS):
            images = draw_stream(test.task.cpu(), rate, length, seed).to(test.task.device)
            tasks = learner.stream(selector=selector).predict_evidence(test.evidence(images)).tasks
            correct.append((tasks.to(images.device) == test.task[images]) & test.is_correct[images])
        results[str(rate)] = percent(torch.cat(correct))
        print(selector.name, rate, results[str(rate)], flush=True)
    return results


def streams_table() -> str:
    """Return the table of accuracy on streams by how often the task changes."""
    run = read_json("streams")
    rates = list(next(iter(run["streams"].values())))
    rows = [
        [f"{training}, {name}", *(_mean([each["streams"][name][rate] for each in runs]) for rate in rates)]
        for training, runs in _published_streams().items()
        for name in ("Cascade", "MaxOutput")
    ]
    closed = read_json("closed-form-rows")["streams"].values()
    rows.append([f"closed form, {len(closed)} orders", *(_mean([each[rate] for each in closed]) for rate in rates)])
    head = ["task changes after about", *(f"{1 / float(rate):.0f} images" for rate in rates[:-1]), "every image"]
    note = f"In %; mean of {run['draws']} streams of {run['images']:,} test images each; {_describe_models()}."
    return markdown(head, rows, note)


def selectors_table() -> str:
    """Return the table of accuracy on single images with variants of the cascade."""
    results = _published_streams()
    names = list(dict.fromkeys(name for runs in results.values() for run in runs for name in run["selectors"]))
    rows = []
    for name in names:
        cells = [
            _mean([run["selectors"][name][key] for run in runs if name in run["selectors"]])
            for runs in results.values()
            for key in ("class", "task")
        ]
        rows.append([RENAMED_SELECTORS.get(name, name), *cells])
    closed = [[closed_form_run(f"cifar100-10-{order}") for order in orders] for orders in ((1993,), (1605, 2022))]
    if all(run for runs in closed for run in runs):
        cells = [_mean([run[key]["1"] for run in runs if run]) for runs in closed for key in ("ACC", "task found")]
        rows.append(["closed form", *cells])
    head = [f"{label}, {training}" for training in results for label in ("one image", "task found")]
    return markdown(["selector", *head], rows, f"In %, 10,000 test images; {_describe_models()}.")


def unknown_images_table() -> str:
    """Return the table of how many known and unknown images are rejected."""
    held_out = [run["strangers"] for run in read_json("strangers-held-out").values()]
    results = {training: [run["strangers"] for run in runs] for training, runs in _published_streams().items()}
    results["`-single`, a tenth held out"] = held_out
    results["closed form"] = list(read_json("closed-form-rows")["unknown"].values())
    key = "rejected (known, strangers)"
    rows = [
        [share, *(_mean([run[key][share][index] for run in runs]) for runs in results.values() for index in (0, 1))]
        for share in read_json("streams")["strangers"][key]
    ]
    for measure in ("AUROC", "FPR95"):
        values = [statistics.fmean(run[measure] for run in runs) for runs in results.values()]
        rows.append([measure, *(cell for value in values for cell in ("", f"{value:.2f}"))])
    head = [f"{label}, {training}" for training in results for label in ("known", "unknown")]
    note = "Rejected test images in %; five of ten tasks are learned, and the images of the other tasks are unknown; "
    note += f"{_describe_models()}; with a tenth of the training images held out: order 1605. "
    note += "Subnetworks reject by the logit alone, which was the only rule when they were measured. Closed form: the "
    note += "relative distance, without mirror images, mean of orders 1993, 1605 and 2022."
    return markdown(["`reject`", *head], rows, note)


def _measure_unknown_images(learner: cps.Learner, selector: cps.Selector, test: EvaluationOutputs) -> dict[str, Any]:
    """Return how well images of the later tasks are rejected if only the first half of the tasks is learned."""
    half = test.num_tasks // 2
    return measure_rejection(learner, selector, test.evidence(tasks=half), test.task < half)


def draw_stream(tasks: Tensor, rate: float, length: int, seed: int) -> Tensor:
    """Return the indices of the images of a stream; each next image is of another task with probability `rate`."""
    draws = np.random.default_rng(seed)
    number = int(tasks.max()) + 1
    by_task = [(tasks == task).nonzero()[:, 0] for task in range(number)]
    task = int(draws.integers(number))
    images = []
    for _ in range(length):
        if draws.random() < rate:
            task = int((task + draws.integers(1, number)) % number)
        images.append(int(by_task[task][int(draws.integers(len(by_task[task])))]))
    return torch.tensor(images)


def _published_streams() -> dict[str, list[dict[str, Any]]]:
    """Return the published measurements by the training of the model."""
    single = [read_json(f"streams-single-{order}") for order in (1605, 2022)]
    return {"paper's training": [read_json("streams")], "`-single`": single}


def _describe_models() -> str:
    models = []
    for runs in _published_streams().values():
        orders = " and ".join(str(run["order"]) for run in runs)
        machine = describe_machine(runs[0]["device"], runs[0]["versions"])
        models.append(f"`{runs[0]['recipe']}`, order{'s' if len(runs) > 1 else ''} {orders} ({machine})")
    return ", ".join(models)


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f}" if values else ""


if __name__ == "__main__":
    main()
