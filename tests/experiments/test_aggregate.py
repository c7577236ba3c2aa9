"""Several runs in one table: mean and standard deviation, worked out by hand."""

from dataclasses import replace

import pytest

from cps.evaluation.metrics import Evaluation
from cps.experiments.aggregate import (
    accuracy_over_images,
    accuracy_table,
    common_selectors_and_sizes,
    format_mean,
    group_runs,
    metrics_table,
    task_table,
)
from cps.experiments.published import PUBLISHED
from cps.experiments.results import Bounds, JointMetrics, read_results
from experiments.fake_results import make_closed_form, make_metrics, make_results


def test_runs_of_a_recipe_become_one_row_with_mean_and_standard_deviation():
    head, rows = accuracy_table([make_results(), make_results(order=1, shift=2.0), make_results("other")])
    assert head == ["recipe", "selector", "runs", "1", "20"]
    assert rows[0] == ["demo", "task known", "2", "81.0 ± 1.4", "81.0 ± 1.4"]
    assert rows[1] == ["demo", "MaxOutput", "2", "41.0 ± 1.4", "71.0 ± 1.4"]
    assert rows[3] == ["other", "MaxOutput", "1", "40.0", "70.0"]


def test_runs_with_different_training_are_not_averaged():
    full = {"epochs": (70, 50), "rounds": 3, "precision": "bf16-mixed"}
    short = make_results(shift=-30.0, **full | {"epochs": (1, 1)})
    fewer = make_results(**full | {"classes_per_task": (2,)})
    _, rows = accuracy_table([make_results(**full), make_results(order=1, shift=2.0, **full), short, fewer])
    assert [row[:4] for row in rows if row[1] == "MaxOutput"] == [
        ["demo (2 tasks, 70 + 3 x 50 epochs, bf16-mixed)", "MaxOutput", "2", "41.0 ± 1.4"],
        ["demo (2 tasks, 1 + 3 x 1 epochs, bf16-mixed)", "MaxOutput", "1", "10.0"],
        ["demo (1 tasks, 70 + 3 x 50 epochs, bf16-mixed)", "MaxOutput", "1", "40.0"],
    ]


def test_evaluations_with_mirror_images_and_bounds_have_their_own_rows():
    bounds = Bounds(finetuning=make_metrics(20), joint=JointMetrics(90.0, make_metrics(90).accuracy[1:]))
    plain = make_results()
    flips = Evaluation(plain.task_il, plain.class_il)
    _, rows = accuracy_table([plain, make_results(flips=flips, bounds=bounds)])
    assert [row[:4] for row in rows] == [
        ["demo", "task known", "2", "80.0 ± 0.0"], ["demo", "MaxOutput", "2", "40.0 ± 0.0"],
        ["demo", "finetuning", "1", "20.0"], ["demo", "joint training", "1", "90.0"],
        ["demo, flips", "task known", "1", "80.0"], ["demo, flips", "MaxOutput", "1", "40.0"],
    ]  # fmt: skip


def test_closed_forms_have_a_row_in_every_table_also_where_they_are_better():
    runs = [make_results(order=order, shift=shift, bounds=Bounds(closed_form=make_closed_form(60, shift)))
            for order, shift in ((0, 0.0), (1, 2.0))]  # fmt: skip
    label = "closed form (LDA, RandomReLU)"
    _, rows = accuracy_table(runs)
    assert [row for row in rows if row[1] == label] == [["demo", label, "2", "61.0 ± 1.4", "71.0 ± 1.4"]]
    head, rows = metrics_table(runs)
    assert [row[1:4] for row in rows] == [
        ["MaxOutput", "1", "41.0 ± 1.4"], ["MaxOutput", "20", "71.0 ± 1.4"],
        [label, "1", "61.0 ± 1.4"], [label, "20", "71.0 ± 1.4"],
    ]  # fmt: skip
    head, rows = task_table(runs, 20)
    assert head[-1] == f"demo, {label}, groups of 20"
    assert [row[-1] for row in rows] == ["66.0 ± 1.4", "76.0 ± 1.4"]


def test_closed_forms_in_different_spaces_or_at_other_group_sizes_are_not_averaged():
    other = make_closed_form(50, space="Pretrained()", sizes=(1,))
    runs = [
        make_results(bounds=Bounds(closed_form=make_closed_form(60))),
        make_results(order=1, bounds=Bounds(closed_form=other)),
        make_results(order=2),
    ]
    _, rows = accuracy_table(runs)
    assert [row[1:] for row in rows if "closed" in row[1]] == [
        ["closed form (LDA, RandomReLU)", "1", "60.0", "70.0"], ["closed form (LDA, Pretrained)", "1", "50.0", ""],
    ]  # fmt: skip
    _, rows = metrics_table(runs)
    assert [row[1] for row in rows] == ["MaxOutput", "MaxOutput"]  # no closed form that all runs have
    head, _ = task_table([runs[1]], 20)
    assert len(head) == 3


def test_the_task_table_has_a_row_for_each_task():
    head, rows = task_table([make_results(), make_results(shift=2.0)], 20)
    assert head == ["task", "demo, task known", "demo, MaxOutput, groups of 20"]
    assert rows == [["1", "76.0 ± 1.4", "66.0 ± 1.4"], ["2", "86.0 ± 1.4", "76.0 ± 1.4"]]


def test_the_metrics_table_shows_the_numbers_of_the_paper():
    run = make_results("cifar100-b50")
    run.class_il["MaxOutput"][60] = run.class_il["MaxOutput"][20]
    head, rows = metrics_table([run])
    assert [row[1:3] for row in rows] == [["MaxOutput", size] for size in ("1", "20", "60")]
    assert rows[2][head.index("paper")] == "AIA over images 64.97 ± 4.23, BWT 11.68"
    assert rows[2][head.index("AIA")] == "75.0"
    _, rows = metrics_table([make_results("imagenet100")])
    assert rows[1][-1] == "92.6 (top-5 inside the selected task)"
    curves = [curve for paper in PUBLISHED.values() for curve in (*paper.history.values(), paper.task_il) if curve]
    assert len(curves) == 11
    assert {len(curve) for curve in curves} == {10}


def test_a_single_value_has_no_standard_deviation():
    assert format_mean([41.26]) == "41.3"
    assert format_mean([40, 42]) == "41.0 ± 1.4"
    with pytest.raises(Exception, match="at least one"):
        format_mean([])


def with_another_selector():
    """Return results with a further selector and without a group size of 20."""
    results = make_results(order=1)
    single = {1: results.class_il["MaxOutput"][1]}
    return replace(results, class_il={"Signature": dict(single), "MaxOutput": dict(single)})


def test_runs_are_compared_by_the_selectors_and_sizes_that_all_have():
    other = with_another_selector()
    head, rows = accuracy_table([other, make_results()])
    assert [row[1] for row in rows] == ["task known", "Signature", "MaxOutput"]
    assert rows[2][head.index("20")] == "70.0 (1 of 2 runs)"
    assert common_selectors_and_sizes([other, make_results()]) == (["MaxOutput"], [1])
    _, rows = metrics_table([replace(other, default_selector="Signature"), make_results()])
    assert [row[1] for row in rows] == ["MaxOutput"]  # the only one that both runs have


def test_the_order_of_runs_with_different_default_selectors_does_not_matter():
    first, second = make_results(), make_results(order=1, default_selector="Cascade")
    for run in (first, second):
        run.class_il["Cascade"] = run.class_il["MaxOutput"]
    head, rows = metrics_table([first, second])
    assert (head, rows) == metrics_table([second, first])
    assert [row[1] for row in rows] == ["Cascade", "Cascade", "MaxOutput", "MaxOutput"]


def test_runs_with_different_settings_are_not_averaged_unless_only_the_schedule_differs():
    settings = {"pruner": "NNrelief(alpha=0.5)", "train: schedule": "Cosine()"}
    other = make_results(settings=settings | {"pruner": "NNrelief(alpha=0.9)"}, order=1)
    names = list(group_runs([make_results(settings=settings), other]))
    assert [name.split(", ")[-1] for name in names] == ["pruner NNrelief(alpha=0.5))", "pruner NNrelief(alpha=0.9))"]
    same = make_results(settings=settings | {"train: schedule": "Steps()"}, order=1)
    assert list(group_runs([make_results(settings=settings), same])) == ["demo"]


def test_groups_are_named_by_the_settings_that_differ_and_missing_settings_are_no_difference():
    settings = {"selector Cascade": "Cascade(size=32, temperature=3.0)", "backbone": "100 weights"}
    usual, other = make_results(settings=settings), settings | {"selector Cascade": "Cascade(size=32, temperature=9.0)"}
    names = list(group_runs([usual, make_results(settings=other, order=1)]))
    assert [name.split("selector ")[1] for name in names] == ["Cascade temperature=3.0))", "Cascade temperature=9.0))"]
    larger = make_results(settings=settings | {"backbone": "900 weights"}, order=2)
    assert len(group_runs([usual, larger])) == 2
    older = make_results(settings={}, order=4)
    for runs in ([older, usual, larger], [larger, usual, older]):
        assert len(group_runs(runs)) == 3
    without = make_results(settings={"backbone": "100 weights"}, order=3)
    assert list(group_runs([usual, without])) == ["demo"]


def test_settings_under_the_names_of_early_versions_are_no_difference():
    old = {"selector Cascade": "Cascade(size=64, own=1.0, alike=1.0, closer=1.0)", "views": "Rotations(mirrors=True)"}
    new = {
        "selector Cascade": "Cascade(size=64, logit_weight=1.0, covariance_pooling=1.0, mean_contraction=1.0)",
        "rotations": "Rotations(flips=True)",
    }
    assert list(group_runs([make_results(settings=old), make_results(settings=new, order=1)])) == ["demo"]
    other = {**new, "rotations": "Rotations(flips=False)"}
    assert len(group_runs([make_results(settings=old), make_results(settings=other, order=1)])) == 2


def test_aia_is_also_computed_over_images_if_tasks_have_different_sizes():
    run = make_results()
    head, rows = metrics_table([run])
    assert {row[head.index("AIA over images")] for row in rows} == {""}
    run = replace(run, classes_per_task=(3, 1))
    accuracy = run.class_il["MaxOutput"][1].accuracy
    accuracy[:] = [[90.0, float("nan")], [80.0, 40.0]]
    assert accuracy_over_images(run, accuracy) == pytest.approx([90, (3 * 80 + 40) / 4])
    head, rows = metrics_table([run])
    assert rows[0][head.index("AIA over images")] == f"{(90 + (3 * 80 + 40) / 4) / 2:.1f}"


def test_published_runs_are_aggregated(request):
    folder = request.config.rootpath / "benchmarks" / "results"
    runs = [read_results(folder / f"cifar100-10-{order}.json") for order in (1993, 1605, 2022)]
    _, rows = accuracy_table(runs)
    assert [row[:3] for row in rows[:2]] == [["cifar100-10", "task known", "3"], ["cifar100-10", "MaxOutput", "3"]]
