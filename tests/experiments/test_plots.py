"""Plots of results: every curve is drawn, and labels do not overlap."""

import itertools
from dataclasses import replace

import pytest

from cps.evaluation.weight_sharing import LayerSharing
from cps.experiments import plots
from cps.experiments.results import Bounds
from experiments.fake_results import make_closed_form, make_metrics, make_results


@pytest.mark.parametrize("tasks", [2, 20, 21, 60])
def test_the_numbers_below_an_axis_do_not_overlap(tasks):
    sharing = tuple([100 / (tasks + 1)] * (tasks + 1))
    results = make_results(layers=(LayerSharing("conv", 100, union=50.0, intersection=5.0),), sharing=sharing)
    figure = plots.plot_layer_sharing(results)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[1].get_xticklabels()]
    assert len(boxes) >= min(tasks, 5)
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_every_selector_has_its_own_curve():
    results = make_results()
    class_il = {f"S{number}": results.class_il["MaxOutput"] for number in range(6)}
    (axes,) = plots.plot_group_sizes([replace(results, class_il=class_il, default_selector="S0")]).axes
    assert {f"S{number}" for number in range(6)} <= {text.get_text() for text in axes.get_legend().get_texts()}
    styles = {(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(styles) == 7  # six selectors, and the task known


def test_runs_are_plotted_by_the_selectors_and_sizes_that_all_have(tmp_path):
    single = {1: make_metrics(40)}
    other = make_results(class_il={"Signature": single, "MaxOutput": single}, order=1)
    runs = [other, make_results()]
    for number, figure in enumerate((plots.plot_group_sizes(runs), plots.plot_mean_history(runs, 20))):
        figure.savefig(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 1000


def test_a_closed_form_has_a_curve_of_its_history_and_of_its_group_sizes():
    label = "closed form (LDA, RandomReLU)"
    run = make_results(bounds=Bounds(closed_form=make_closed_form(60)))
    drawn = {
        plots.plot_accuracy_history(run): (f"{label}, one image", [70.0, 60.0]),
        plots.plot_mean_history([run, run], 20): (f"{label}, one image", [70.0, 60.0]),
        plots.plot_group_sizes([run, run]): (label, [60.0, 70.0]),
    }
    for figure, (name, curve) in drawn.items():
        (line,) = [line for line in figure.axes[0].get_lines() if line.get_label() == name]
        assert line.get_ydata() == pytest.approx(curve)
    for figure in (plots.plot_group_sizes([run, make_results()]), plots.plot_mean_history([run, make_results()], 20)):
        assert not any("closed" in str(line.get_label()) for line in figure.axes[0].get_lines())


def test_the_curves_of_the_paper_are_drawn_beside_ours():
    results = make_results("imagenet100", classes_per_task=(10,) * 10)
    matrix = make_metrics(40).accuracy.repeat(5, axis=0).repeat(5, axis=1)
    metrics = replace(make_metrics(40), accuracy=matrix)
    results = replace(results, task_il=metrics, class_il={"MaxOutput": {1: metrics, 20: metrics}})
    (axes,) = plots.plot_mean_history([results], 20).axes
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert {"paper, groups of 20 (top-5)", "paper, task known (top-5)"} <= labels


def test_forgetting_starts_with_the_second_task_and_shows_finetuning():
    results = make_results(bounds=Bounds(finetuning=make_metrics(20)))
    (axes,) = plots.plot_forgetting(results).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["task known (task-IL)", "cps MaxOutput, one image", "cps MaxOutput, groups of 20", "finetuning"]
    assert axes.get_lines()[0].get_xdata().tolist() == [2]
    assert axes.get_lines()[0].get_ydata() == pytest.approx([15.0])
