"""`cps rename` and `cps card`."""

import cps
from commands import predict_json, run_cps


def test_a_class_is_renamed_in_predictions_and_everything_else_stays(trained, model):
    before = predict_json(trained[0] / "inbox", "--model", model)
    assert "Class 'bolt' is now 'screw'" in run_cps("rename", model, "bolt", "screw", "--yes").output
    after = predict_json(trained[0] / "inbox", "--model", model)
    assert after == [{**row, "class": "screw" if row["class"] == "bolt" else row["class"]} for row in before]
    run_cps("verify", model)


def test_renaming_needs_yes_and_a_name_that_no_class_has(model):
    before = model.read_bytes()
    for arguments, message in (
        (["bolt", "screw"], "renaming cannot be undone; use --yes to confirm without a terminal"),
        (["bolt", "spring", "--yes"], "the class 'spring' exists already; two classes cannot become one by renaming"),
        (["bolt", " ", "--yes"], "must not be empty"),
        (["nit", "spring", "--yes"], "no task has learned the class 'nit'; did you mean 'nut'?"),
    ):
        assert message in " ".join(run_cps("rename", model, *arguments, code=1).output.split())
    assert model.read_bytes() == before


def test_the_card_is_printed_or_written(trained, tmp_path):
    model = trained[0] / "parts.cps"
    printed = run_cps("card", model).stdout
    assert "# parts" in printed
    assert "bolt" in printed
    run_cps("card", model, "--to", tmp_path / "card.md")
    assert (tmp_path / "card.md").read_text() == printed


def test_learning_and_inspect_show_the_accuracy_of_classes(trained):
    printed = " ".join((trained[1][1] + run_cps("inspect", trained[0] / "parts.cps").output).split())
    assert "eld-out images of this folder" in printed
    assert "eld-out images when their folder was learned" in printed
    assert len(cps.load(trained[0] / "parts.cps").network.subnetworks[1].notes["confusion"]) == 2
