"""Examples: tensors and data sets read in batches of indices."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

import cps
from cps.data import examples as module
from cps.data.examples import (
    DatasetExamples,
    ImageBatches,
    JoinedExamples,
    TensorExamples,
    as_examples,
    as_labels,
    choose_examples,
    iterate_batches,
    join_examples,
    read_labels,
)
from cps.network.subnetwork import local_labels
from samples import ACCELERATOR, ListDataset, make_task


class Pictures(Dataset):
    """A data set of grey PIL images with named classes, without `targets`."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Image.fromarray(np.full((5, 4), index, dtype=np.uint8)), ["cat", "dog"][index % 2]


def encode(labels):
    return local_labels(("cat", "dog"), labels)


def test_a_data_set_of_pil_images_with_class_names_is_read_in_batches():
    examples = as_examples(Subset(Pictures(), [1, 3, 5, 7]), encode)
    images, labels = next(examples.batches([torch.tensor([0, 2])]))
    assert images.shape == (2, 1, 5, 4)
    assert images[:, 0, 0, 0].tolist() == [1, 5]
    assert labels.tolist() == [1, 1]


def test_labels_that_are_not_known_are_read_from_the_images():
    examples = as_examples(Pictures(), encode)
    assert isinstance(examples, DatasetExamples)
    assert examples.labels() is None
    assert examples.digest() is None
    assert read_labels(examples).tolist() == [0, 1] * 4
    assert [len(labels) for _, labels in iterate_batches(examples, batch_size=3)] == [3, 3, 2]


def test_pairs_and_tensor_data_sets_are_the_same_examples():
    images, labels = torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 1, 0])
    pair, dataset = (as_examples(data, torch.tensor) for data in ((images, labels), TensorDataset(images, labels)))
    assert isinstance(pair, TensorExamples)
    assert pair.digest() == dataset.digest()
    assert read_labels(pair).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_image_batches_yield_every_image_once_in_order(parts):
    images = torch.arange(40.0).reshape(10, 1, 2, 2)
    examples = TensorExamples(images, torch.zeros(10, dtype=torch.long))
    batches = [ImageBatches(examples, batch_size=3, part=part, parts=parts) for part in range(parts)]
    assert torch.equal(torch.cat([batch for part in batches for batch in part]), images)
    assert torch.equal(torch.cat([batch for part in batches for batch in part]), images)  # a second time
    flipped = ImageBatches(examples, batch_size=3, flipped=True)
    assert torch.equal(torch.cat(list(flipped)), images.flip(-1))


def test_a_data_set_too_large_for_memory_is_read_image_by_image(tmp_path, monkeypatch, caplog):
    (tmp_path / "bolt").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "bolt" / "0.png")
    folder = cps.ImageFolder(tmp_path, size=4)
    assert isinstance(as_examples(folder, lambda labels: torch.zeros(len(labels))), TensorExamples)
    monkeypatch.setattr(module, "free_memory", lambda: 2 * folder.bytes_per_image - 1)
    assert isinstance(as_examples(folder, lambda labels: torch.zeros(len(labels))), DatasetExamples)
    assert "do not fit in memory" in caplog.text


def test_labels_of_any_form_become_python_values():
    assert as_labels(torch.tensor([1, 2])) == as_labels(np.array([1, 2])) == as_labels([np.int64(1), torch.tensor(2)])
    with pytest.raises(ValueError, match=r"labels must be one class per image, got shape \(2, 2\)"):
        as_labels(torch.zeros(2, 2))


def test_a_data_set_is_learned_with_worker_processes(make_learner):
    images, labels = make_task(0).train
    learner = make_learner(workers=2)

    learner.learn(cps.Task([0, 1], train=ListDataset(images, labels)))
    alone = make_learner()
    # On a GPU, images in tensors are trained by other steps than those read from a data set.
    alone.learn(cps.Task([0, 1], train=(images, labels) if ACCELERATOR == "cpu" else ListDataset(images, labels)))
    assert learner.fingerprint(0) == alone.fingerprint(0)


def test_labels_are_on_the_device_of_their_images():
    images = torch.zeros(4, 2, 6, 6, dtype=torch.uint8, device="meta")
    assert as_examples((images, [0, 1, 0, 1]), torch.tensor).targets.device.type == "meta"


def test_some_examples_of_a_data_set_are_those_of_the_same_tensors():
    images, labels, indices = torch.rand(8, 1, 3, 3), torch.tensor([0, 1] * 4), torch.tensor([6, 1, 4])
    known = as_examples((images, labels), torch.tensor)
    for whole in (known, as_examples(ListDataset(images, labels.tolist()), torch.tensor)):
        chosen = choose_examples(whole, indices).to(torch.device("cpu"))
        assert len(chosen) == 3
        assert read_labels(chosen).tolist() == [0, 1, 0]
        found, of_them = next(chosen.batches([torch.tensor([2, 0])]))
        assert torch.equal(found, images[[4, 6]])
        assert of_them.tolist() == [0, 0]
    assert choose_examples(known, indices).digest() != choose_examples(known, indices[:2]).digest()


def joined_examples():
    """Return seven images as a tensor, three of a data set and two as a tensor; image i is i everywhere."""
    images = torch.arange(12.0)[:, None, None, None].expand(12, 1, 2, 2).clone()
    labels = torch.arange(12)
    dataset = DatasetExamples(ListDataset(images[7:10], list(range(7, 10))), torch.tensor)
    return join_examples(
        TensorExamples(images[:7], labels[:7]), dataset, None, TensorExamples(images[10:], labels[10:])
    )


@pytest.mark.parametrize("batches", [[[0, 11, 8, 3], [9, 1], [10, 10, 2]], [[7, 8, 9]], [[11]], [list(range(12))]])
def test_joined_examples_are_read_in_the_order_of_the_indices(batches):
    examples = joined_examples()
    assert isinstance(examples, JoinedExamples)
    assert len(examples) == 12
    read = list(examples.batches(torch.tensor(batch) for batch in batches))
    assert [images[:, 0, 0, 0].tolist() for images, _ in read] == batches
    assert [labels.tolist() for _, labels in read] == batches


def test_tensors_are_joined_into_one_tensor_and_a_single_part_stays_as_it_is():
    first = TensorExamples(torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    second = TensorExamples(torch.ones(2, 2), torch.tensor([2, 2]))
    joined = join_examples(first, None, second)
    assert isinstance(joined, TensorExamples)
    assert joined.targets.tolist() == [0, 1, 0, 2, 2]
    assert join_examples(first, None) is first


def test_labels_and_digests_of_joined_examples_are_known_if_those_of_all_parts_are():
    examples = joined_examples()
    assert examples.labels() is None  # the data set would have to be read
    assert examples.digest() is None
    assert read_labels(examples).tolist() == list(range(12))
    known = JoinedExamples((examples.parts[0], examples.parts[2]))
    assert known.labels().tolist() == [*range(7), 10, 11]
    other = JoinedExamples((examples.parts[2], examples.parts[0]))
    assert known.digest() not in (None, other.digest())
    assert len(known.to(torch.device("cpu"))) == 9
