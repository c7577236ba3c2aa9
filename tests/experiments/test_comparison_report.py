"""The part of a report that is about a comparison of methods."""

from dataclasses import replace

import pytest

from cps.experiments.comparison import Failure
from cps.experiments.comparison_plots import Style, plot_bytes, plot_group_sizes, plot_histories
from cps.experiments.comparison_report import published_table
from cps.experiments.comparison_tables import rows_of
from cps.experiments.published_rivals import NUMBERS, READ, published_numbers
from cps.experiments.report import write_report
from experiments.fake_results import make_comparison, make_method_result, make_results


def test_the_page_has_tables_plots_and_facts_and_nothing_from_elsewhere(tmp_path):
    comparison = make_comparison(failures=(Failure("er", 1993, "the loss became <nan>"),))
    write_report(tmp_path / "report.html", [], [comparison])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == page.count("<figure>") == 4
    assert page.count("<table>") == 4  # accuracy, cost, assumptions, failures
    assert "2 tasks of 2 classes, 3 methods, 2 class orders (1993, 1605), training: 40 passes" in page
    assert "the loss became &lt;nan&gt;" in page
    assert "<script" not in page
    assert 'src="' not in page


def test_runs_and_comparisons_share_a_page(tmp_path):
    write_report(tmp_path / "report.html", [make_results()], [make_comparison(), make_comparison(recipe="other")])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h1>") == 3
    assert "<title>cps: demo, other</title>" in page


@pytest.mark.parametrize(
    "plot", [plot_group_sizes, lambda each: plot_histories(each, 1), lambda each: plot_bytes(each, 1)]
)
def test_every_method_and_every_way_has_a_curve_and_a_style(plot):
    results = [make_method_result(f"m{number}", f"M{number}", acc=number) for number in range(30)]
    comparison = make_comparison(*results, *make_comparison().results)
    (axes,) = plot(comparison).axes
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels == {row.label for row in rows_of(comparison)}
    assert len(labels) == 34
    style = Style(rows_of(comparison))
    assert len({tuple(style.of(row).values()) for row in rows_of(comparison)}) == 34


def test_published_numbers_stand_beside_what_was_measured_on_the_same_tasks():
    sizes = (50, 10, 10, 10, 10, 10)
    comparison = make_comparison(make_method_result(classes_per_task=sizes), recipe="cifar100-b50")
    head, rows = published_table(comparison)
    by_source = {row[head.index("source")]: row for row in rows if row[0] == "iCaRL"}
    assert by_source["table of CP&S (Dekhovich et al., 2023)"][1:3] == ["61.63", ""]
    assert {row[head.index("last here")] for row in by_source.values()} == {"40.0"}
    assert published_table(replace(comparison, recipe="digits"))[1] == []


def test_published_numbers_are_percentages_and_say_how_they_were_read():
    assert all(0 < value < 100 for each in NUMBERS for value in (each.AIA, each.last, each.known) if value is not None)
    assert all(any(value is not None for value in (each.AIA, each.last, each.known)) for each in NUMBERS)
    assert {each.reading for each in NUMBERS} > {READ}
    assert {each.sizes for each in published_numbers("cifar100-10-small", (10,) * 10)} == {(10,) * 10}
