"""The command `cps serve`."""

import re
import signal
import socket
import subprocess
import sys

import pytest
from served import wait_for_health
from typer.testing import CliRunner

from cps.cli import app


@pytest.mark.slow
def test_the_command_warns_if_other_machines_can_connect_and_stops_on_ctrl_c(model):
    command = [sys.executable, "-m", "cps", "serve", str(model), "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            started = re.match(r"Serving model\.cps at http://0\.0\.0\.0:(\d+)", process.stdout.readline())
            assert wait_for_health(f"http://127.0.0.1:{started[1]}", lambda health: True)["status"] == "ok"
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert "can be reached from other machines" in errors
    assert "no password and no encryption" in errors
    assert "Traceback" not in errors
    assert output == "Stopped.\n"
    assert process.returncode == 0


@pytest.mark.parametrize("package", ["python_multipart", "fastapi", "uvicorn"])
def test_a_missing_package_is_reported_in_one_line(model, monkeypatch, package):
    for name in [name for name in sys.modules if name.startswith("cps.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    done = CliRunner().invoke(app, ["serve", str(model), "--port", "0"])
    assert done.exit_code == 1
    assert f"cps serve needs {package}, which is not installed" in done.output
    assert "[serve]" in done.output


def test_an_address_in_use_is_reported_in_one_line(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = CliRunner().invoke(app, ["serve", str(model), "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 1
    assert "choose another --port or --host" in done.output
    assert "warning" not in done.output


def test_a_missing_model_file_is_reported_in_one_line():
    done = CliRunner().invoke(app, ["serve", "nothing.cps"])
    assert done.exit_code == 1
    assert "there is no file 'nothing.cps'" in done.output
