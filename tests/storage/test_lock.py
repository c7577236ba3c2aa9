"""A file lock: one holder at a time, no stale locks, no file left behind."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from cps.storage.lock import LockedError, locked

fcntl = pytest.importorskip("fcntl")

HOLD = """
import sys, time
from cps.storage.lock import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_holder_is_refused_and_the_message_says_why(tmp_path):
    path = tmp_path / "model.cps"
    with locked(path):
        with pytest.raises(LockedError, match=r"another program is changing '.*model\.cps'; wait"), locked(path):
            pass
        with pytest.raises(LockedError), locked(path):  # the first refusal released nothing
            pass
    with locked(path):
        pass


def test_the_lock_of_another_process_is_respected_until_it_is_killed(tmp_path):
    path = tmp_path / "model.cps"
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(LockedError), locked(path):
            pass
        holder.send_signal(signal.SIGKILL)
    with locked(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_a_killed_program_left_does_not_block(tmp_path):
    (tmp_path / ".model.cps.lock").touch()
    with locked(tmp_path / "model.cps"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_released_if_the_block_raises(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "model.cps"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_on_nfs", [False, True])
def test_a_lock_file_that_its_holder_removed_meanwhile_is_locked_again(tmp_path, monkeypatch, is_on_nfs):
    """NFS renames a removed file that is still open, so it keeps its link."""
    flock, lock_file, locks = fcntl.flock, tmp_path / ".model.cps.lock", []

    def lock_late(descriptor, operation):
        flock(descriptor, operation)
        if operation & fcntl.LOCK_EX:
            locks.append(descriptor)
            if len(locks) == 1:
                lock_file.rename(tmp_path / ".nfs0001") if is_on_nfs else lock_file.unlink()

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with locked(tmp_path / "model.cps"):
        assert len(locks) == 2
        assert os.path.samestat(os.fstat(locks[1]), lock_file.stat())
    assert not lock_file.exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_not_reported_as_another_program(tmp_path, monkeypatch, code):
    def fail(descriptor, operation):
        raise OSError(code, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    message = r"file system of '.*model\.cps' does not support locks \(No locks available\)"
    with pytest.raises(RuntimeError, match=message), locked(tmp_path / "model.cps"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_cannot_be_locked(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder, not a file"), locked(tmp_path):
        pass


def test_the_folder_of_the_file_is_created_and_named_if_it_cannot_be_written(tmp_path):
    with locked(tmp_path / "new" / "model.cps"):
        assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write in '.*file'"), locked(tmp_path / "file" / "model.cps"):
        pass
