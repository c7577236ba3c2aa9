"""The benchmark that decides about custom kernels runs as a whole, on tiny sizes, and can be resumed."""

import json

import pytest
from benchmarks import gpu_step
from benchmarks.gpu_step import QUICK_CASES, VARIANTS, main, measure_in_new_process, verdict

QUICK = ["--quick", "--accelerator", "cpu"]
NAMES = [f"{case}/{variant}" for case in QUICK_CASES for variant in VARIANTS]


@pytest.mark.slow
def test_the_quick_benchmark_measures_all_variants_and_resumes(tmp_path, capsys, monkeypatch):
    path = tmp_path / "results" / "gpu-step.json"
    main([*QUICK, "--out", str(path)])
    lines = capsys.readouterr().out.strip().splitlines()
    found = json.loads(path.read_text())
    assert lines[-1] == found["verdict"]
    assert lines[-1].startswith("No verdict (these are not GPU figures): custom kernels save")
    assert found["note"].startswith("not GPU figures")
    assert list(found["results"]) == NAMES
    for case in QUICK_CASES:
        results = [found["results"][f"{case}/{variant}"] for variant in VARIANTS]
        assert all(result["step_ms"] > 0 and result["first_step_seconds"] > 0 for result in results)
        for steps in ("one_step", "an_epoch"):  # without custom kernels all variants do the same, up to rounding
            captured, compiled, plain = (result[f"distance_after_{steps}"] for result in results)
            assert compiled == pytest.approx(captured, rel=1e-2)
            assert captured > 0  # the negative control: bf16 differs from full precision
            assert plain == 0 or case == "resnet18 at 224"  # plain steps on a CPU leave small layers in float32

    measured = []
    monkeypatch.setattr(gpu_step, "measure", lambda case, variant, _: measured.append(variant) or {"error": "none"})
    main([*QUICK, "--out", str(path)])
    assert not measured  # everything is in the file
    del found["results"][NAMES[1]]
    found["results"][NAMES[2]] = {"error": "stopped"}
    path.write_text(json.dumps(found))
    main([*QUICK, "--out", str(path), "--seconds", "-1"])
    assert not measured
    assert "Run the same command again" in capsys.readouterr().out
    main([*QUICK, "--out", str(path)])
    assert measured == ["compiled", "plain"]  # the missing one and the failed one
    measured.clear()
    path.write_text(json.dumps({**json.loads(path.read_text()), "device": "another"}))
    main([*QUICK, "--out", str(path)])
    assert len(measured) == len(NAMES)  # figures of another device do not count


@pytest.mark.slow
def test_a_measurement_runs_in_a_new_process_and_errors_are_recorded():
    assert measure_in_new_process("resnet32 at 32/plain", QUICK, 120.0)["step_ms"] > 0
    assert "KeyError: 'no case'" in measure_in_new_process("no case/plain", QUICK, 120.0)["error"]
    assert measure_in_new_process("resnet32 at 32/plain", QUICK, 0.01) == {"error": "stopped after 0 s"}


def test_custom_kernels_stay_only_where_they_save_more_than_ten_percent():
    def result(milliseconds, *, has_custom_kernels=False, is_compiled=False):
        return {"step_ms": milliseconds, "ran": {"has_custom_kernels": has_custom_kernels, "is_compiled": is_compiled}}

    results = {
        "a/custom": result(0.8, has_custom_kernels=True),
        "a/compiled": result(1.0, is_compiled=True),
        "b/custom": result(0.95, has_custom_kernels=True),
        "b/compiled": result(1.0, is_compiled=True),
        "c/custom": result(0.5, has_custom_kernels=True),
        "c/compiled": result(1.0),  # torch.compile has failed
        "d/custom": {"error": "no compiler"},
    }
    assert verdict(results, list("abcd"), is_gpu=True) == (
        "Verdict: custom kernels save a: +20%, keep; b: +5%, drop; "
        "c: +50%, undecided, since a variant could not be built; d: not measured "
        "(they stay where they save more than 10% of a step)"
    )


def test_without_a_gpu_only_the_quick_benchmark_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--accelerator", "cpu", "--out", str(tmp_path / "results.json")])
    assert "there is no GPU; --quick runs on a CPU" in capsys.readouterr().err
