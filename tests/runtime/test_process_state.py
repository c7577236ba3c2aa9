"""Locks that can be copied, and settings that threads share."""

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest

from cps.runtime.process_state import CopyableLock, SharedSettings


def is_free(lock):
    """Return whether another thread can take the lock at once."""
    taken = []
    thread = threading.Thread(target=lambda: taken.append(lock._lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    return taken[0]


def test_a_lock_is_re_entrant_and_excludes_other_threads():
    lock = CopyableLock()
    with lock, lock:
        assert not is_free(lock)
    assert is_free(lock)


def test_a_copy_of_a_held_lock_is_free():
    lock = CopyableLock()
    with lock:
        assert is_free(copy.deepcopy(lock))
        assert is_free(pickle.loads(pickle.dumps(lock)))


def test_settings_are_restored_by_the_last_user():
    owner = SimpleNamespace(first="a", second="b")
    settings = SharedSettings([(owner, "first", 1), (owner, "second", 2)])
    one, two = settings.applied(), settings.applied()
    one.__enter__()
    assert (owner.first, owner.second) == (1, 2)
    two.__enter__()
    one.__exit__(None, None, None)
    assert (owner.first, owner.second) == (1, 2)
    two.__exit__(None, None, None)
    assert (owner.first, owner.second) == ("a", "b")


def test_settings_are_restored_after_an_error():
    owner = SimpleNamespace(first="a")
    with pytest.raises(KeyError), SharedSettings([(owner, "first", 1)]).applied():
        raise KeyError
    assert owner.first == "a"
