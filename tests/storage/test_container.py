"""The safetensors container beyond what tests/invariants/test_model_file.py claims."""

import pytest
import torch

from cps.storage.container import FileError, check_file, digest, read, read_header, write


def test_header_and_tensors_round_trip(tmp_path):
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.tensor([0.5, float("nan")]), "empty": torch.zeros(0)}
    write(tmp_path / "file", "test", {"name": "häschen"}, tensors)
    header, found = read(tmp_path / "file", "test")
    assert header == {"name": "häschen"}
    assert digest(found) == digest(tensors)
    assert read_header(tmp_path / "file", "test")["name"] == "häschen"


def test_tensors_that_share_memory_are_stored_separately(tmp_path):
    values = torch.arange(4.0)
    write(tmp_path / "file", "test", {}, {"all": values, "half": values[:2]})
    assert read(tmp_path / "file", "test")[1]["half"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([1.0, 2.0])},
        {"values": torch.tensor([1.0, 2.5])},
        {"values": torch.tensor([1, 2])},
        {"values": torch.tensor([[1.0, 2.0]])},
    ],
)
def test_a_digest_depends_on_names_values_types_and_shapes(other):
    values = {"values": torch.tensor([1.0, 2.0])}
    assert digest(other) != digest(values)
    assert digest(values, "extra") != digest(values)


def test_digests_never_change():
    """Files written earlier hold them."""
    tensors = {"b": torch.tensor([True, False]), "a": torch.tensor([[1.0, -2.0]])}
    assert digest(tensors, "extra") == "b188b4c01c9d45db3afcb3d0af4c4329124afd748c96234c437b29c66a853660"


def test_a_file_of_another_kind_is_refused(tmp_path):
    write(tmp_path / "file", "checkpoint", {}, {})
    with pytest.raises(FileError, match=r"is not a cps model file \(its format is 'cps checkpoint'\)"):
        read(tmp_path / "file", "model")


def test_what_is_not_a_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is a folder, not a file"):
        check_file(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file '.*nothing'"):
        read_header(tmp_path / "nothing", "model")
