"""Two processes learn with the same code as one, and both hold the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cps

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parent / "distributed_run.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
}


def run(command, folder):
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def flatten(state, prefix=""):
    if isinstance(state, torch.Tensor):
        yield prefix, state
    else:
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from flatten(value, f"{prefix}/{key}")


def load_ranks(folder, name):
    return [dict(flatten(torch.load(folder / f"{name}-{rank}.pt", weights_only=True))) for rank in range(2)]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run([*TORCHRUN, SCRIPT, str(folder), "2", "norms"], folder)
    return folder


def test_both_ranks_have_bit_identical_weights_masks_and_norm_statistics(two_processes):
    first, second = load_ranks(two_processes, 2)
    assert set(first) == set(second)
    assert any("running_mean" in name for name in first)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


def test_negative_control_norm_statistics_differ_if_they_are_not_averaged(tmp_path):
    run([*TORCHRUN, SCRIPT, str(tmp_path), "2", "no averaging"], tmp_path)
    first, second = load_ranks(tmp_path, 2)
    assert any("running_mean" in name and not torch.equal(first[name], second[name]) for name in first)


def test_one_process_loads_the_model_of_two(two_processes):
    from samples import conv_net, make_task

    learner = cps.load(two_processes / "2.cps", conv_net(), pruner=cps.NNrelief())
    before = learner.fingerprint(0)
    learner.learn(make_task(20))
    assert learner.fingerprint(0) == before


def test_two_processes_give_the_result_of_one_at_the_same_global_batch_size(tmp_path):
    """Without norm layers, which use the images of one process only, just rounding differs."""
    run([*TORCHRUN, SCRIPT, str(tmp_path), "2", "plain"], tmp_path)
    (tmp_path / "checkpoint.safetensors").unlink()
    run([sys.executable, SCRIPT, str(tmp_path), "1", "plain"], tmp_path)
    two, _ = load_ranks(tmp_path, 2)
    one = dict(flatten(torch.load(tmp_path / "1-0.pt", weights_only=True)))
    for name, value in one.items():
        if "cascade" in name and "level" not in name:
            continue  # the sign of a component is arbitrary, and so is its direction if features do not vary
        if value.is_floating_point():
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(two[name], value)
    behind = [json.loads((tmp_path / f"{name}.json").read_text())["behind a trunk"] for name in ("2-0", "2-1", "1-0")]
    assert behind[0] == behind[1]
    torch.testing.assert_close(torch.tensor(behind[0]), torch.tensor(behind[2]), rtol=1e-2, atol=1e-2)


def test_all_ranks_raise_if_the_first_cannot_save(two_processes):
    reports = [json.loads((two_processes / f"2-{rank}.json").read_text()) for rank in range(2)]
    assert [report["error"] for report in reports] == ["NotADirectoryError", "RuntimeError"]


def test_old_outputs_stay_identical_with_two_processes(two_processes):
    for rank in range(2):
        before, after = json.loads((two_processes / f"2-{rank}.json").read_text())["first task"]
        assert after == before


def test_evaluation_is_divided_among_processes_and_gives_the_result_of_one(two_processes, tmp_path):
    first, second = (json.loads((two_processes / f"2-{rank}.json").read_text()) for rank in range(2))
    assert first["results"] == second["results"]
    assert first["num_forwarded"] + second["num_forwarded"] == 2 * first["images"]  # each image and its flip
    assert abs(first["num_forwarded"] - second["num_forwarded"]) <= 4
    from samples import conv_net, make_task

    fabric = cps.make_fabric(accelerator="cpu")
    learner = cps.load(two_processes / "2.cps", conv_net(), pruner=cps.NNrelief(), fabric=fabric)
    by_one = cps.evaluate(learner, [make_task(f, images=29) for f in (0, 10)], group_sizes=[1, 5], flips=True)
    assert json.loads(json.dumps(by_one.encode())) == first["results"]


def test_the_command_line_starts_several_processes(tmp_path):
    command = [sys.executable, "-m", "cps", "bench", "digits", "--epochs-scale", "0.05", "--devices", "2"]
    short = ["--accelerator", "cpu", "--no-bounds", "--tasks", "2"]
    run([*command, *short, "--out", str(tmp_path / "run")], tmp_path)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert "2 process" in results["device"]
