"""Several runs in one table: the mean and the spread, worked out by hand."""

import copy
import itertools

import pytest

from cps.experiments import aggregate as comparison
from cps.experiments import plots as pictures
from cps.experiments.published import PUBLISHED


def made(recipe="demo", order=0, shift=0.0, **more):
    """Return results of two tasks as a run writes them."""

    def entry(acc):
        rows = [[acc + 10, None], [acc - 5 + shift, acc + 5 + shift]]
        return {"ACC": acc + shift, "AIA": acc + 5, "BWT": 15.0 - shift, "accuracy": rows, "selection": rows}

    return {
        "recipe": recipe, "order": order, "seed": 0, "classes_per_task": [2, 2], "default_selector": "MaxOutput",
        "task_il": entry(80), "class_il": {"MaxOutput": {"1": entry(40), "20": entry(70)}}, "bounds": {}, **more,
    }  # fmt: skip


def test_runs_of_a_recipe_become_one_row_with_mean_and_standard_deviation():
    head, rows = comparison.accuracy_table([made(), made(order=1, shift=2.0), made("other")])
    assert head == ["recipe", "selector", "runs", "1", "20"]
    assert rows[0] == ["demo", "task known", "2", "81.0 ± 1.4", "81.0 ± 1.4"]
    assert rows[1] == ["demo", "MaxOutput", "2", "41.0 ± 1.4", "71.0 ± 1.4"]
    assert rows[3] == ["other", "MaxOutput", "1", "40.0", "70.0"]


def test_runs_that_were_trained_otherwise_are_no_spread_of_one_another():
    full = {"epochs": [70, 50], "rounds": 3, "precision": "bf16-mixed"}
    short = made(shift=-30.0, **full | {"epochs": [1, 1]})
    fewer = made(**full | {"classes_per_task": [2]})
    _, rows = comparison.accuracy_table([made(**full), made(order=1, shift=2.0, **full), short, fewer])
    assert [row[:4] for row in rows if row[1] == "MaxOutput"] == [
        ["demo (2 tasks, 70 + 3 x 50 epochs, bf16-mixed)", "MaxOutput", "2", "41.0 ± 1.4"],
        ["demo (2 tasks, 1 + 3 x 1 epochs, bf16-mixed)", "MaxOutput", "1", "10.0"],
        ["demo (1 tasks, 70 + 3 x 50 epochs, bf16-mixed)", "MaxOutput", "1", "40.0"],
    ]


def test_runs_with_mirror_images_and_bounds_have_rows_of_their_own():
    bounds = {"finetuning": {"ACC": 20.0}, "joint": {"ACC": 90.0}}
    _, rows = comparison.accuracy_table(
        [made(), made(flips={"task_il": made()["task_il"], "class_il": made()["class_il"]}, bounds=bounds)]
    )
    assert [row[:3] for row in rows] == [
        ["demo", "task known", "2"], ["demo", "MaxOutput", "2"], ["demo", "finetuning", "1"], ["demo", "joint", "1"],
        ["demo, flips", "task known", "1"], ["demo, flips", "MaxOutput", "1"],
    ]  # fmt: skip


def test_each_task_after_the_last_is_a_row():
    head, rows = comparison.row_table([made(), made(shift=2.0)], "20")
    assert head == ["task", "demo, task known", "demo, MaxOutput, groups of 20"]
    assert rows == [["1", "76.0 ± 1.4", "66.0 ± 1.4"], ["2", "86.0 ± 1.4", "76.0 ± 1.4"]]


def test_the_papers_numbers_stand_beside_ours():
    run = made("cifar100-b50")
    run["class_il"]["MaxOutput"]["60"] = copy.deepcopy(run["class_il"]["MaxOutput"]["20"])
    head, rows = comparison.metrics_table([run])
    assert [row[1:3] for row in rows] == [["MaxOutput", size] for size in ("1", "20", "60")]
    assert rows[2][head.index("paper")] == "AIA over images 64.97 ± 4.23, BWT 11.68"
    assert rows[2][head.index("AIA")] == "75.0"
    _, rows = comparison.metrics_table([made("imagenet100")])
    assert rows[1][-1] == "92.6 (top-5 inside the selected task)"
    assert all(len(curve) == 10 for known in PUBLISHED.values() for curve in known.get("history", {}).values())


def test_one_value_has_no_spread():
    assert comparison.mean_and_spread([41.26]) == "41.3"
    assert comparison.mean_and_spread([40, 42]) == "41.0 ± 1.4"
    with pytest.raises(Exception, match="at least one"):
        comparison.mean_and_spread([])


def test_runs_with_other_selectors_and_sizes_are_compared_in_what_they_share(tmp_path):
    other = made(order=1)
    other["class_il"] = {"Signature": {"1": other["class_il"]["MaxOutput"]["1"]}, **other["class_il"]}
    del other["class_il"]["MaxOutput"]["20"]
    head, rows = comparison.accuracy_table([other, made()])
    assert [row[1] for row in rows] == ["task known", "Signature", "MaxOutput"]
    assert rows[2][head.index("20")] == "70.0 (1 of 2 runs)"
    assert comparison.common([other, made()]) == (["MaxOutput"], ["1"])
    _, rows = comparison.metrics_table([{**other, "default_selector": "Signature"}, made()])
    assert [row[1] for row in rows] == ["MaxOutput"]  # which both runs have
    for picture in (pictures.group_sizes([other, made()]), pictures.histories([other, made()], "20")):
        picture.savefig(tmp_path / "picture.png")


@pytest.mark.parametrize("tasks", [2, 20, 21, 60])
def test_the_numbers_below_a_picture_do_not_touch(tasks):
    layers = [{"name": "conv", "union": 50.0, "intersection": 5.0}]
    figure = pictures.weights_per_layer({"layers": layers, "sharing": [100 / (tasks + 1)] * (tasks + 1)})
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[1].get_xticklabels()]
    assert len(boxes) >= min(tasks, 5)
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_runs_that_predict_by_other_selectors_are_compared_the_same_in_any_order():
    first, second = made(), made(order=1, default_selector="Cascade")
    for run in (first, second):
        run["class_il"]["Cascade"] = copy.deepcopy(run["class_il"]["MaxOutput"])
    head, rows = comparison.metrics_table([first, second])
    assert (head, rows) == comparison.metrics_table([second, first])
    assert [row[1] for row in rows] == ["Cascade", "Cascade", "MaxOutput", "MaxOutput"]


def test_runs_with_other_settings_are_no_spread_of_one_another():
    settings = {"pruner": "NNrelief(alpha=0.5)", "train: schedule": "Cosine()"}
    runs = [made(settings=settings), made(settings=settings | {"pruner": "NNrelief(alpha=0.9)"}, order=1)]
    names = list(comparison.by_recipe(runs))
    assert [name.split(", ")[-1] for name in names] == ["pruner NNrelief(alpha=0.5))", "pruner NNrelief(alpha=0.9))"]
    alike = [made(settings=settings), made(settings=settings | {"train: schedule": "Steps()"}, order=1)]
    assert list(comparison.by_recipe(alike)) == ["demo"]


def test_every_selector_has_its_curve():
    run = made()
    run["class_il"] = {f"S{number}": copy.deepcopy(run["class_il"]["MaxOutput"]) for number in range(6)}
    (axes,) = pictures.group_sizes([run]).axes
    assert {f"S{number}" for number in range(6)} <= {text.get_text() for text in axes.get_legend().get_texts()}
    styles = {(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(styles) == 7  # and that of the task known


def test_runs_whose_selectors_differ_are_told_apart_by_what_differs_and_missing_ones_are_no_difference():
    usual = {"selector Cascade": "Cascade(size=32, temperature=3.0)", "backbone": "100 weights"}
    other = usual | {"selector Cascade": "Cascade(size=32, temperature=9.0)"}
    names = list(comparison.by_recipe([made(settings=usual), made(settings=other, order=1)]))
    assert [name.split("selector ")[1] for name in names] == ["Cascade temperature=3.0))", "Cascade temperature=9.0))"]
    larger = made(settings=usual | {"backbone": "900 weights"}, order=2)
    assert len(comparison.by_recipe([made(settings=usual), larger])) == 2
    older = made(settings={}, order=4)
    for runs in ([older, made(settings=usual), larger], [larger, made(settings=usual), older]):
        assert len(comparison.by_recipe(runs)) == 3
    without = made(settings={"backbone": "100 weights"}, order=3)
    assert list(comparison.by_recipe([made(settings=usual), without])) == ["demo"]


def test_where_tasks_are_of_different_sizes_aia_is_also_counted_over_images():
    run = made()
    head, rows = comparison.metrics_table([run])
    assert {row[head.index("AIA over images")] for row in rows} == {""}
    run["classes_per_task"] = [3, 1]
    entry = run["class_il"]["MaxOutput"]["1"]
    entry["accuracy"] = [[90.0, None], [80.0, 40.0]]
    head, rows = comparison.metrics_table([run])
    assert rows[0][head.index("AIA over images")] == f"{(90 + (3 * 80 + 40) / 4) / 2:.1f}"
