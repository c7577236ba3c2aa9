"""Fixtures for the server tests."""

import pytest
from served import learn_two_tasks, serve


@pytest.fixture(scope="session")
def learner():
    return learn_two_tasks()


@pytest.fixture(scope="session")
def model(learner, tmp_path_factory):
    """Return the model file of the learner."""
    path = tmp_path_factory.mktemp("served") / "model.cps"
    learner.save(path)
    return path


@pytest.fixture(scope="module")
def address(model):
    """Return the address of a server that accepts local host names only."""
    with serve(model, hosts={"127.0.0.1", "localhost"}) as address:
        yield address
