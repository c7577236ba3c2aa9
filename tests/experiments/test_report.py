"""The report: one self-contained HTML page."""

import sys

import pytest

from cps.evaluation.confusion import Confusion
from cps.experiments.report import group_size_table, write_report
from cps.experiments.results import Bounds, Results, read_results
from experiments.fake_results import make_closed_form, make_comparison, make_metrics, make_results


@pytest.fixture(scope="module")
def digits(request):
    return read_results(request.config.rootpath / "benchmarks" / "results" / "digits.json")


def test_the_page_of_one_run_has_all_plots_tables_and_facts(digits, tmp_path):
    write_report(tmp_path / "report.html", [digits])
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == page.count("<figure>") == 11
    assert page.count("<table>") == 4
    assert page.count("<h1>") == 1
    assert f"<b>{digits.task_il.ACC:.1f}%</b>" in page
    assert digits.device in page


def test_without_matplotlib_the_page_has_all_tables_and_says_how_to_get_the_plots(digits, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(tmp_path / "report.html", [digits, make_results()], [make_comparison()])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1  # the confusion matrix
    assert page.count("Plots need matplotlib: pip install &#34;continual-prune-and-select[bench]&#34;") == 5
    assert f"<b>{digits.task_il.ACC:.1f}%</b>" in page


def test_the_page_of_an_early_file_leaves_out_what_the_file_does_not_have(digits, tmp_path):
    data = digits.encode()
    for name in ("epochs", "rounds", "precision", "settings", "milliseconds_per_image", "flips", "dense", "layers"):
        del data[name]
    del data["confusion"]
    write_report(tmp_path / "report.html", [Results.decode(data)])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 9
    assert "<h2>Subnetworks</h2>" not in page
    assert "epochs not recorded" in page


def test_text_from_files_is_escaped(tmp_path):
    name = "<script>alert('x')</script>"
    results = make_results(name, device='"><img src=x>', versions={"<b>": "<i>"})
    write_report(tmp_path / "report.html", [results, make_results(name, order=1)])
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "<i>" not in page
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") > 5
    assert page.count("<h1>") == 3  # one of them about both runs


def test_the_page_shows_the_accuracy_of_classes_and_what_they_are_confused_with(tmp_path):
    confusion = Confusion.of(
        ["bolt", "<img>"], ["bolt"] * 3 + ["<img>"] * 2, ["bolt", "<img>", "<img>", "bolt", "<img>"]
    )
    write_report(tmp_path / "with.html", [make_results(confusion=confusion)])
    write_report(tmp_path / "without.html", [make_results()])
    page, without = ((tmp_path / name).read_text() for name in ("with.html", "without.html"))
    assert page.count("<svg") == without.count("<svg") + 1
    assert '<td class="text">bolt</td><td>33.3</td><td>3</td>' in page
    assert '<td class="text">&lt;img&gt;</td><td class="text">bolt</td><td>3</td>' in page
    assert "<img>" not in page
    assert "<h2>Classes</h2>" not in without


def test_a_closed_form_has_a_row_a_card_and_a_fact_also_where_it_is_better(tmp_path):
    run = make_results(bounds=Bounds(closed_form=make_closed_form(60)))
    _, rows = group_size_table(run)
    assert rows[1:] == [["cps MaxOutput", "40.0", "70.0"], ["closed form (LDA, RandomReLU)", "60.0", "70.0"]]
    write_report(tmp_path / "report.html", [run])
    page = (tmp_path / "report.html").read_text()
    card = "<b>60.0%</b>closed form (LDA, RandomReLU), which trains nothing, one image"
    assert f'<li class="closed_form">{card}</li>' in page
    assert "LDA(shrinkage=0.1) on RandomReLU(size=9); 2.5 seconds, keeps 1.0 MiB" in page
    write_report(tmp_path / "report.html", [make_results()])
    assert '<li class="closed_form">' not in (tmp_path / "report.html").read_text()


def test_the_table_by_group_size_has_the_bounds_only_for_single_images():
    head, rows = group_size_table(make_results(bounds=Bounds(finetuning=make_metrics(20))))
    assert head == ["accuracy (%) by group size", "1", "20"]
    assert rows == [
        ["task known", "80.0", "80.0"],
        ["cps MaxOutput", "40.0", "70.0"],
        ["finetuning", "20.0", ""],
    ]
