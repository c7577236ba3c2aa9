"""Tables of a comparison of methods."""

import csv
import io

import numpy as np
import pytest

from cps.evaluation.metrics import Metrics
from cps.experiments.comparison_tables import (
    accuracy_table,
    assumption_table,
    cost_table,
    rows_of,
    to_csv,
    to_latex,
)
from experiments.fake_results import make_comparison, make_method_result

NAN = np.nan


def test_a_row_has_mean_and_deviation_over_class_orders_and_every_selector_of_cps_a_row():
    head, rows = accuracy_table(make_comparison())
    assert head == ["method", "one image", "groups of 20", "task known", "AIA", "BWT", "orders"]
    assert rows == [
        ["iCaRL", "41.0 ± 1.4", "51.0 ± 1.4", "80.0 ± 0.0", "46.0 ± 1.4", "15.0 ± 0.0", "2"],
        ["closed form", "51.0 ± 1.4", "61.0 ± 1.4", "80.0 ± 0.0", "56.0 ± 1.4", "15.0 ± 0.0", "2"],
        ["cps, Fusion", "60.0", "70.0", "80.0", "65.0", "15.0", "1"],
        ["cps, MaxOutput (the paper's)", "55.0", "65.0", "80.0", "60.0", "15.0", "1"],
    ]


def test_with_unequal_tasks_the_aia_over_images_has_a_column():
    metrics = Metrics.of(np.array([[80.0, NAN], [60.0, 90.0]]))
    result = make_method_result(classes_per_task=(50, 10), class_il={"MaxOutput": {1: metrics, 20: metrics}})
    head, ((_, *cells),) = accuracy_table(make_comparison(result))
    values = dict(zip(head[1:], cells, strict=True))
    assert values["AIA"] == "77.5"  # (80 + (60 + 90) / 2) / 2
    assert values["AIA over images"] == "72.5"  # (80 + (50 * 60 + 10 * 90) / 60) / 2


def test_other_methods_with_several_selectors_have_their_own_and_the_one_that_cps_predicts_with():
    ways = ("MaxOutput", "Cascade", "Fusion")
    packnet = make_method_result("packnet", "PackNet", ways=ways)
    comparison = make_comparison(packnet, make_method_result("cps", "cps", ways=("Fusion", "Cascade")))
    labels = ["PackNet, MaxOutput", "PackNet, Fusion", "cps, Fusion", "cps, Cascade"]
    assert [row.label for row in rows_of(comparison)] == labels
    assert [row.label for row in rows_of(make_comparison(packnet))] == ["PackNet, MaxOutput"]
    every = [row["label"] for row in csv.DictReader(io.StringIO(to_csv(comparison)))]
    assert every == ["PackNet, MaxOutput", "PackNet, Cascade", "PackNet, Fusion", "cps, Fusion", "cps, Cascade"]


def test_joint_training_has_neither_aia_nor_forgetting():
    metrics = Metrics.of(np.array([[90.0, 70.0]]))
    result = make_method_result("joint", "joint training", task_il=metrics, class_il={"MaxOutput": {1: metrics}})
    (row,) = rows_of(make_comparison(result))
    assert (row.one, row.aia, row.bwt) == ([80.0], [], [])


def test_a_group_size_that_was_not_measured_on_all_orders_is_left_out():
    fewer = make_method_result(order=1605)
    del fewer.class_il["MaxOutput"][20]
    (row,) = rows_of(make_comparison(make_method_result(), fewer))
    assert (len(row.one), row.group) == (2, [])
    _, ((_, _, group, *_),) = accuracy_table(make_comparison(make_method_result(), fewer))
    assert group == ""


def test_costs_and_assumptions_have_one_row_for_a_method():
    head, rows = cost_table(make_comparison())
    assert head[1:3] == ["kept (MiB)", "while learning (MiB)"]
    assert [row[0] for row in rows] == ["iCaRL", "closed form", "cps"]
    assert rows[0][1:] == ["1.50", "2.50", "4,000", "12", "replay"]
    assert assumption_table(make_comparison()) == (
        ["method", "replay", "groups", "task given"],
        [["iCaRL", "yes", "", ""], ["closed form", "", "", ""], ["cps", "", "", ""]],
    )


def test_csv_has_all_digits():
    rows = list(csv.DictReader(io.StringIO(to_csv(make_comparison()))))
    assert [row["label"] for row in rows][2] == "cps, Fusion"
    assert float(rows[0]["one image"]) == 41
    assert float(rows[0]["one image (std)"]) == pytest.approx(2**0.5)
    assert rows[2]["one image (std)"] == ""
    assert rows[0]["bytes kept"] == str(1.5 * 2**20)
    assert rows[0]["assumes"] == "replay"


def test_latex_has_as_many_cells_in_each_row_and_escapes_names():
    lines = to_latex(make_comparison(make_method_result(name="a_b & c"), make_method_result(order=1605))).splitlines()
    columns = len(lines[0].split("{")[2].rstrip("}"))
    rows = [line for line in lines if line.endswith(r"\\")]
    assert all(line.replace(r"\&", "").count("&") == columns - 1 for line in rows)
    assert rows[1].startswith(r"a\_b \& c & $40.0 \pm 0.0$ & ")
    assert lines[-1] == r"\end{tabular}"
