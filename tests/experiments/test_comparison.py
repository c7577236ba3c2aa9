"""Results of a comparison of methods: their file, and how several are put together."""

import json
from dataclasses import replace

import pytest

from cps.experiments.comparison import Failure, is_comparison, merge_comparisons, read_comparison
from experiments.fake_results import make_comparison, make_method_result, make_metrics, make_results


def test_a_comparison_is_the_same_after_writing_and_reading(tmp_path):
    path = tmp_path / "results.json"
    comparison = make_comparison(failures=(Failure("er", "podnet-1", "the loss became nan"),))
    comparison.write(path)
    assert read_comparison(path) == comparison
    assert is_comparison(path)


def test_results_of_a_run_are_no_comparison(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(make_results().encode()))
    assert not is_comparison(path)
    with pytest.raises(ValueError, match=r"holds no comparison of methods: 'budget' is missing"):
        read_comparison(path)
    with pytest.raises(ValueError, match="no comparison at"):
        read_comparison(tmp_path / "nothing.json")
    assert not is_comparison(tmp_path / "nothing.json")


def test_a_method_with_one_selector_for_all_sizes_predicts_in_as_many_ways_as_it_has_selectors():
    apart = make_method_result("cps", "cps", ways=("Fusion", "Cascade", "MaxOutput"))
    assert list(apart.ways) == ["Fusion", "Cascade", "MaxOutput"]
    assert apart.metrics(1, "Cascade") == apart.class_il["Cascade"][1]
    assert apart.metrics(20) == apart.class_il["Fusion"][20]
    assert apart.metrics(5) is None


def test_a_head_for_all_classes_predicts_in_one_way_with_its_own_selector_for_groups():
    joint = make_method_result(ways=("MaxOutput", "SoftmaxMass"), group_selector="SoftmaxMass")
    assert list(joint.ways) == [""]
    assert joint.metrics(1) == joint.class_il["MaxOutput"][1]
    assert joint.metrics(20) == joint.class_il["SoftmaxMass"][20] != joint.class_il["MaxOutput"][20]


def test_comparisons_of_one_recipe_and_budget_become_one_and_duplicates_count_once():
    first = make_comparison(make_method_result())
    more = make_comparison(make_method_result(task_il=make_metrics(1)), make_method_result(order=1605))
    other = replace(first, budget="own", passes=None)
    merged = merge_comparisons([first, other, more])
    assert [each.budget for each in merged] == ["equal", "own"]
    assert [each.order for each in merged[0].results] == [1993, 1605]
    assert merged[0].results[0].task_il == make_metrics(80)
    assert merged[0].orders == [1993, 1605]
    assert list(merged[0].methods) == ["icarl"]
    assert merged[0].group_sizes == [1, 20]
