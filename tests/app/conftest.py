"""Fixtures for predictions of files."""

import pytest
from safetensors.torch import save_file

import cps
from cps.data.image_folder import read_folder
from samples import write_image_folder


@pytest.fixture(scope="session")
def learner(tmp_path_factory):
    """Return a learner of two tasks of two classes, learned from folders."""
    root = tmp_path_factory.mktemp("folders")
    training = cps.Training(6, cps.Adam(3e-3), batch_size=8)
    learner = cps.Learner(
        cps.Architecture("small"), rounds=1, train=training, retrain=training, fabric=cps.make_fabric(accelerator="cpu")
    )
    for classes in (["bolt", "nut"], ["gear", "spring"]):
        read = read_folder(write_image_folder(root / classes[0], classes), size=8)
        learner.learn(cps.Task(read.classes, train=(read.images, read.labels)))
    return learner


@pytest.fixture
def images(tmp_path):
    """Return a folder with six images each of the classes bolt and gear."""
    return write_image_folder(tmp_path / "images", ["bolt", "gear"], images=6, seed=9)


@pytest.fixture
def inbox(tmp_path):
    """Return an empty folder to watch."""
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """Return a file of weights of the backbone `small`, as if it were pretrained."""
    file = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file(cps.Architecture("small").make(7).state_dict(), file)
    return file
