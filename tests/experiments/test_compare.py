"""Comparisons of methods: every method in the same way, failures, and interruptions."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cps
from cps.experiments import contestants
from cps.experiments.compare import Compare
from cps.experiments.comparison import read_comparison
from cps.experiments.comparison_tables import accuracy_table
from cps.experiments.contestants import Setting, single_head
from cps.experiments.recipes import RECIPES
from cps.methods.blocks.memory import Memory
from cps.methods.finetuning import Finetuning
from cps.runtime.devices import make_fabric
from cps.storage.lock import LockedError, locked
from cps.training import checkpoint


def tiny_recipe(**changes):
    training = cps.Training(2, cps.Adam(1e-2), cps.Cosine(), batch_size=32)
    settings = {
        "train": training,
        "retrain": replace(training, epochs=1),
        "rounds": 1,
        "backbone": lambda: cps.SmallConvNet(1, widths=(6, 8)),
        "selectors": (cps.MaxOutput(),),
        "group_sizes": (1, 5),
    }
    return replace(RECIPES["digits"](), **{**settings, **changes})


def comparison_in(folder, methods=("finetuning",), fabric=None, recipe=None, **changes):
    setting = Setting(recipe or tiny_recipe(), fabric or make_fabric(accelerator="cpu"), memory=Memory(20))
    return replace(Compare(setting, list(methods), [1993], folder, tasks=2), **changes)


def without_seconds(comparison):
    return replace(comparison, results=tuple(replace(result, seconds=0.0) for result in comparison.results))


def test_all_methods_learn_the_same_tasks_and_a_closed_form_is_always_there(tmp_path, fabric):
    comparison = comparison_in(tmp_path, ["er", "cps"], fabric, orders=[1993, "identity"]).start()
    assert [(each.method, each.order) for each in comparison.results] == [
        (method, order) for order in (1993, "identity") for method in ("er", "cps", "closed-form")
    ]
    assert {each.classes_per_task for each in comparison.results} == {(2, 2)}
    er, learner, closed = comparison.results[:3]
    passes = 3 * sum(len(task.train[1]) for task in tiny_recipe().scenario(None, 1993).tasks[:2])
    assert learner.image_passes == passes
    assert passes <= er.image_passes < passes + 2 * 32  # a budget ends with the batch that reaches it
    assert closed.image_passes == 0
    assert er.class_il.keys() == {"MaxOutput", "SoftmaxMass"}
    assert (er.assumes["replay"], learner.assumes["replay"]) == (True, False)
    assert 0 < er.kept["exemplars"] <= 20 * 8 * 8 * 4
    assert read_comparison(tmp_path / "results.json") == comparison


def test_the_order_of_methods_changes_nothing(tmp_path, fabric):
    first = without_seconds(comparison_in(tmp_path / "1", ["er", "icarl"], fabric).start())
    second = without_seconds(comparison_in(tmp_path / "2", ["icarl", "er"], fabric).start())
    assert sorted(first.results, key=lambda each: each.method) == sorted(second.results, key=lambda each: each.method)


def test_a_method_that_fails_is_named_and_the_others_run(tmp_path, fabric, monkeypatch):
    class NeedsManyTasks(Finetuning):
        """A method that fails in its second task."""

        def train_task(self, task):
            if task.old and not (tmp_path / "repaired").exists():
                raise ValueError("this method needs more tasks\nthan two")
            super().train_task(task)

    monkeypatch.setitem(contestants.CONTESTANTS, "broken", single_head(NeedsManyTasks))
    comparison = comparison_in(tmp_path, ["broken", "finetuning"], fabric).start()
    assert [each.method for each in comparison.results] == ["finetuning", "closed-form"]
    assert [(each.method, each.error) for each in comparison.failures] == [("broken", "this method needs more tasks")]
    seen = []
    (tmp_path / "repaired").touch()
    again = comparison_in(tmp_path, ["broken", "finetuning"], fabric, on_progress=seen.append).start()
    assert [each.method for each in again.results] == ["broken", "finetuning", "closed-form"]
    assert again.failures == ()
    assert {(at.method, at.task) for at in seen if at.phase == "training"} == {("broken", 1)}  # task 0 is not repeated


def test_tasks_of_one_class_fail_only_where_a_head_needs_two(tmp_path, fabric):
    comparison = comparison_in(tmp_path, ["cps", "er"], fabric, tiny_recipe(sizes=1)).start()
    assert [each.method for each in comparison.results] == ["er", "closed-form"]
    (failure,) = comparison.failures
    assert failure.method == "cps"
    assert "the task has one class, and a head needs at least two outputs" in failure.error


def test_tasks_of_unequal_sizes_have_both_means(tmp_path, fabric):
    comparison = comparison_in(tmp_path, ["er"], fabric, tiny_recipe(sizes=(5, 2, 3)), tasks=None).start()
    assert [each.classes_per_task for each in comparison.results] == [(5, 2, 3)] * 2
    assert "AIA over images" in accuracy_table(comparison)[0]


def test_what_is_wrong_for_every_task_is_an_error_before_the_first_is_learned(tmp_path, fabric):
    small = Setting(tiny_recipe(), fabric, memory=Memory(3))
    with pytest.raises(ValueError, match="er: a memory of 3 images cannot hold one of each of 4 classes"):
        comparison_in(tmp_path, ["finetuning", "er"], setting=small).start()
    train, _ = tiny_recipe().read(None)
    with pytest.raises(ValueError, match="a task without test images"):
        comparison_in(tmp_path, recipe=tiny_recipe(read=lambda folder: (train, None))).start()
    assert not any(tmp_path.glob("order-*"))


def test_a_folder_with_other_settings_or_another_program_is_refused_before_anything_is_learned(tmp_path, fabric):
    comparison_in(tmp_path, fabric=fabric, orders=[7]).start()
    other = Setting(tiny_recipe(), fabric, memory=Memory(20), seed=5)
    with pytest.raises(ValueError, match=r"order-7/finetuning' holds another run \(it differs in: seed, settings\)"):
        comparison_in(tmp_path, ["er", "finetuning"], orders=[1993, 7], setting=other).start()
    assert not (tmp_path / "order-1993").exists()
    with pytest.raises(ValueError, match="differs in: group sizes"):
        comparison_in(tmp_path, fabric=fabric, orders=[7], group_sizes=[1, 2]).start()
    with locked(tmp_path / "results.json"), pytest.raises(LockedError, match="another program"):
        comparison_in(tmp_path, fabric=fabric, orders=[7]).start()


def test_progress_names_method_order_and_task(tmp_path, fabric):
    seen = []
    comparison_in(tmp_path, ["er"], fabric, orders=[1, 2], on_progress=seen.append).start()
    last = [at for at in seen if at.phase == "training"][-1]
    assert (last.method, last.order, last.run, last.runs, last.task, last.tasks) == ("er", 2, 2, 4, 1, 2)
    assert {at.phase for at in seen} == {"training", "measuring"}


METHODS = ["er", "cps"]


def compare_until_killed(folder, fatal):
    """Compare in a separate process, which kills itself just before the `fatal`-th time it syncs or replaces a file."""
    torch.set_num_threads(1)
    checkpoint.MAX_WRITING_SHARE = float("inf")  # such short epochs would write no checkpoints
    steps = []

    def counting(real):
        def wrapped(*arguments, **settings):
            steps.append(real)
            if len(steps) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **settings)

        return wrapped

    os.fsync, Path.replace, Path.unlink = (counting(real) for real in (os.fsync, Path.replace, Path.unlink))
    comparison_in(folder, METHODS, orders=[1993, 1605]).start()
    (folder / "steps").write_text(str(len(steps)))


@pytest.mark.slow
def test_a_comparison_killed_at_any_moment_ends_as_one_that_was_not(tmp_path):
    """Between methods, between tasks, in the middle of a task, and while results are written."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["cps.experiments.compare", "lightning_fabric", "hypothesis", "torch._dynamo"])

    def run(folder, fatal):
        folder.mkdir(exist_ok=True)
        child = server.Process(target=compare_until_killed, args=(folder, fatal))
        child.start()
        child.join()
        return child.exitcode

    assert run(tmp_path / "whole", None) == 0
    steps = int((tmp_path / "whole" / "steps").read_text())
    whole = without_seconds(read_comparison(tmp_path / "whole" / "results.json"))
    folder = tmp_path / "killed"
    for fatal in (7, steps // 3, steps // 4, 3):  # each call goes on from the last one
        assert run(folder, fatal) == -signal.SIGKILL
        finished = [json.loads(path.read_text())["is_complete"] for path in folder.glob("order-*/*/run.json")]
        assert len(finished) - sum(finished) <= 1
    assert run(folder, None) == 0
    assert without_seconds(read_comparison(folder / "results.json")) == whole
    assert not [*folder.glob("order-*/*/state"), *folder.glob("order-*/*/checkpoint")]
