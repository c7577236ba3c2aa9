"""Descriptions of the hardware and software of a run."""

import os
import platform

import pytest
import torch

import cps
from cps.runtime.environment import busy_warning, describe_device, free_memory, reproducibility_context, versions


def test_a_cpu_is_described_with_threads_and_processes():
    text = describe_device(cps.make_fabric(accelerator="cpu"))
    assert text.startswith("CPU (")
    assert f"{torch.get_num_threads()} threads, 1 process(es)" in text


def test_versions_are_those_of_cps_torch_and_python():
    assert versions() == {
        "cps": cps.__version__, "torch": torch.__version__, "python": platform.python_version()
    }  # fmt: skip


def test_the_reproducibility_context_names_torch_and_the_number_of_threads():
    context = reproducibility_context(torch.device("cpu"))
    assert torch.__version__ in context
    assert f"{torch.get_num_threads()} thread(s)" in context


def test_free_memory_has_a_default_where_the_system_does_not_report_it(monkeypatch):
    assert free_memory() > 0
    monkeypatch.delattr(os, "sysconf")
    assert free_memory() == 8 * 2**30


@pytest.mark.parametrize(("threads", "load", "is_warned"), [(2, 1000.0, True), (1, 1000.0, False), (2, 0.5, False)])
def test_several_threads_on_a_busy_machine_are_warned_of(monkeypatch, threads, load, is_warned):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    message = busy_warning()
    assert (message is not None) == is_warned
    assert message is None or "training with 2 threads" in message
