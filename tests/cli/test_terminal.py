"""Output to the terminal: progress, Ctrl-C, JSON, and names that contain markup."""

import io
import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from commands import CPU, run_cps
from cps.cli import terminal
from cps.cli.terminal import CtrlC, ProgressLines, format_json
from samples import write_image_folder


def test_progress_is_printed_as_lines_without_a_terminal(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    printed = io.StringIO()
    lines = ProgressLines(Console(file=printed))
    for second in range(0, 200, 10):
        now[0] = float(second)
        lines.update("task 1 of 2, training", second // 10, 20, "loss 0.5")
    lines.update("a moment", 1, 1, "")
    lines.end()
    assert printed.getvalue().splitlines() == [
        "task 1 of 2, training: 7 of 20, loss 0.5, 70 s",
        "task 1 of 2, training: 14 of 20, loss 0.5, 140 s",
        "task 1 of 2, training: 19 of 20, loss 0.5, 190 s",
    ]


@pytest.fixture
def interruptible():
    """Handle Ctrl-C as in the foreground; a shell lets background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_noticed_even_if_a_finaliser_discards_the_interrupt(monkeypatch):
    class InterruptsWhenDeleted:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    ignored, stop = [], CtrlC()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with stop:
        InterruptsWhenDeleted()
        assert stop()
    assert [error.exc_type for error in ignored] == [KeyboardInterrupt]
    with stop:
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_is_valid_in_every_output_encoding(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    row = {"path": "gr\u00fcn \U0001f600.jpg"}
    stream.write(format_json(row))
    stream.flush()
    assert json.loads(stream.buffer.getvalue().decode(encoding)) == row


def test_markup_in_class_names_is_printed_as_it_is_and_control_characters_are_replaced(tmp_path):
    folder = write_image_folder(tmp_path / "march", ["[red]bolt", "\x1b[31mnut"], images=5)
    run_cps("learn", folder, "--model", tmp_path / "m.cps", "--epochs", 1, *CPU)
    assert "[red]bolt" in run_cps("inspect", tmp_path / "m.cps").output.replace("\n", "")
    assert "[red]" in run_cps("predict", folder, "--model", tmp_path / "m.cps", "--group-by-folder", *CPU).output
    assert "\x1b[31m" not in run_cps("inspect", tmp_path / "m.cps").output


def test_emoji_codes_in_file_names_are_printed_as_they_are(trained, tmp_path):
    image = Path(shutil.copy(trained[0] / "inbox" / "bolt" / "0.png", tmp_path / ":smile:.png"))
    assert ":smile:" in run_cps("predict", image, "--model", trained[0] / "parts.cps", *CPU).stdout.replace("\n", "")
