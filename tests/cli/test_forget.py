"""`cps forget` removes a task and everything that belongs to it."""

import cps
from commands import CPU, run_cps
from cps.app.learn_folder import checkpoint_path


def test_a_forgotten_task_is_gone_and_later_tasks_move_down(model):
    before = cps.load(model).fingerprint(1)
    checkpoint_path(model).write_bytes(b"of an interrupted run")
    printed = run_cps("forget", model, "--task", 1, "--yes").output
    assert "Forgot task 1 (bolt, nut)" in printed
    assert "Task 2 is now 1." in printed
    assert b"bolt" not in model.read_bytes()
    assert b"january" not in model.read_bytes()
    assert [path.name for path in model.parent.iterdir()] == ["parts.cps"]
    assert cps.load(model).fingerprint(0) == before
    run_cps("verify", model)
    output = run_cps("forget", model, "--task", 2, "--yes", code=1).output.replace("\n", " ")
    assert "task must be between 1 and 1, the number of learned tasks, got 2" in output
    run_cps("forget", model, "--task", 1, "--yes")
    assert "the model has no tasks" in run_cps("inspect", model).output
    assert "has no tasks" in run_cps("predict", model.parent, "--model", model, *CPU, code=1).output.replace("\n", " ")


def test_forget_needs_yes_without_a_terminal(model):
    before = model.read_bytes()
    assert "use --yes to confirm without a terminal" in run_cps("forget", model, "--task", 1, code=1).output.replace(
        "\n", " "
    )
    assert model.read_bytes() == before


def test_the_checkpoint_of_an_interrupted_run_is_removed_and_reported(model):
    assert "checkpoint" not in run_cps("forget", model, "--task", 1, "--yes").output
    checkpoint_path(model).write_bytes(b"of an interrupted run")
    assert "checkpoint of an interrupted" in run_cps("forget", model, "--task", 1, "--yes").output


def test_temporary_files_of_killed_programs_are_removed_whatever_their_age(model):
    left = [model.with_name(f".{name}.0a1b2c3d.partial") for name in (model.name, checkpoint_path(model).name)]
    for file in left:
        file.write_text("weights of the task")
    run_cps("forget", model, "--task", 1, "--yes")
    assert not any(file.exists() for file in left)


def test_a_forgotten_class_is_gone_and_the_last_one_takes_its_task_along(model):
    before = cps.load(model).fingerprint(1)
    output = run_cps("forget", model, "--class", "bolt", "--yes").output
    assert "Forgot class 'bolt'" in output
    assert b"bolt" not in model.read_bytes()
    assert cps.load(model).fingerprint(1) == before
    run_cps("verify", model)
    assert "It was the last class of its task" in run_cps("forget", model, "--class", "nut", "--yes").output
    assert cps.load(model).classes == [("gear", "spring")]


def test_forgetting_a_class_needs_yes_a_known_name_and_no_task(model):
    before = model.read_bytes()
    for arguments, message, code in (
        (["--class", "bolt"], "use --yes to confirm without a terminal", 1),
        (["--class", "bold", "--yes"], "no task has learned the class 'bold'; did you mean 'bolt'?", 1),
        (["--class", "bolt", "--task", 1, "--yes"], "either --task or --class", 2),
        ([], "either --task or --class", 2),
    ):
        assert message in " ".join(run_cps("forget", model, *arguments, code=code).output.split())
    assert model.read_bytes() == before
