"""Scenarios, examples, augmentation and schedules."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

import cps
from cps.data.examples import as_examples
from cps.data.images import as_images
from cps.network.subnetwork import local_labels
from cps.training.trainer import epoch_order
from samples import ACCELERATOR, ListDataset, make_task

LABELS = np.repeat(np.arange(10), 6)
IMAGES = np.arange(60, dtype=np.float32)[:, None].repeat(3, axis=1)


def test_every_class_is_in_exactly_one_task():
    scenario = cps.split_by_class((IMAGES, LABELS), (IMAGES, LABELS), sizes=2)
    assert [task.classes for task in scenario] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    for task in scenario:
        assert set(task.train[1]) == set(task.test[1]) == set(task.classes)
        assert all(LABELS[int(image[0])] == label for image, label in zip(*task.train, strict=True))


def test_unequal_tasks_as_in_50_plus_5_times_10():
    scenario = cps.split_by_class((IMAGES, LABELS), sizes=[5, 1, 1, 1, 1, 1])
    assert [len(task.classes) for task in scenario] == [5, 1, 1, 1, 1, 1]


def test_the_order_of_a_seed_is_that_of_icarl():
    scenario = cps.split_by_class((IMAGES, LABELS), sizes=5, order=1993)
    np.random.seed(1993)
    expected = np.random.permutation(10).tolist()
    assert [name for task in scenario for name in task.classes] == expected
    assert scenario.order == 1993


def test_a_given_order_is_taken_and_must_name_every_class():
    order = list(range(9, -1, -1))
    assert cps.split_by_class((IMAGES, LABELS), sizes=5, order=order)[0].classes == (9, 8, 7, 6, 5)
    with pytest.raises(ValueError, match="every class"):
        cps.split_by_class((IMAGES, LABELS), sizes=5, order=[1, 2])


def test_validation_images_come_from_each_class_and_are_not_trained_on():
    task = cps.split_by_class((IMAGES, LABELS), sizes=2, validation=0.3)[0]
    train, val = set(task.train[0][:, 0].tolist()), set(task.val[0][:, 0].tolist())
    assert train | val == set(range(12))
    assert not train & val
    assert sorted(task.val[1]) == [0, 0, 1, 1]


@pytest.mark.parametrize("sizes", [0, [3, 3], [5, 5, 0], [-1, 11]])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="size"):
        cps.split_by_class((IMAGES, LABELS), sizes=sizes)


class Pictures(Dataset):
    """A data set of grey PIL pictures with named classes, whose labels only reading tells."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Image.fromarray(np.full((5, 4), index, dtype=np.uint8)), ["cat", "dog"][index % 2]


def test_a_data_set_of_pictures_with_names_can_be_cut_and_read():
    scenario = cps.split_by_class(Pictures(), sizes=1)
    assert [task.classes for task in scenario] == [("cat",), ("dog",)]
    examples = as_examples(scenario[1].train, lambda labels: local_labels(("dog",), labels))
    images, labels = next(examples.batches([torch.tensor([0, 2])]))
    assert images.shape == (2, 1, 5, 4)
    assert images[:, 0, 0, 0].tolist() == [1, 5]
    assert labels.tolist() == [0, 0]
    assert as_images(Pictures()).shape == (8, 1, 5, 4)


def test_a_data_set_is_learned_with_worker_processes(make_learner):
    images, labels = make_task(0).train
    learner = make_learner(workers=2)

    learner.learn(cps.Task([0, 1], train=ListDataset(images, labels)))
    alone = make_learner()
    # On tensors a GPU takes other steps than on images that are read from a data set.
    alone.learn(cps.Task([0, 1], train=(images, labels) if ACCELERATOR == "cpu" else ListDataset(images, labels)))
    assert learner.fingerprint(0) == alone.fingerprint(0)


def test_pad_crop_shifts_each_image_by_its_own_draw():
    images = torch.arange(1, 401, dtype=torch.uint8).reshape(25, 1, 4, 4).clamp_min(1)
    shifted = cps.PadCrop(1)(images, torch.rand(25, 2, generator=torch.Generator().manual_seed(0)))
    padded = torch.nn.functional.pad(images, [1] * 4)
    found = set()
    for index, image in enumerate(shifted):
        places = [
            (top, left)
            for top in range(3)
            for left in range(3)
            if torch.equal(padded[index, :, top : top + 4, left : left + 4], image)
        ]
        assert places
        found.update(places)
    assert len(found) > 3


def test_flip_mirrors_about_half_of_the_images():
    images = torch.rand(200, 1, 3, 3)
    result = cps.Flip()(images, torch.rand(200, 1, generator=torch.Generator().manual_seed(0)))
    flipped = (result == images.flip(-1)).flatten(1).all(dim=1)
    kept = (result == images).flatten(1).all(dim=1)
    assert (flipped | kept).all()
    assert 60 < int(flipped.sum()) < 140


def test_schedules_are_the_papers():
    steps = cps.Steps((20, 40, 60), 0.2)
    assert [round(steps(epoch, 70), 6) for epoch in (0, 19.9, 20, 45, 69)] == [1, 1, 0.2, 0.04, 0.008]
    cosine = cps.Cosine(warmup=2)
    assert cosine(0, 10) < 0.01
    assert cosine(2, 10) == 1
    assert cosine(6, 10) == pytest.approx(0.5)
    assert cosine(10, 10) == pytest.approx(0)


def drawn(number, draws):
    return torch.rand(number, draws, generator=torch.Generator().manual_seed(0))


def picture(number=1, height=20, width=20):
    """Return smooth colour images as bytes."""
    down, across = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 2, width), indexing="ij")
    channels = [torch.sin(down + shift) * torch.cos(across * (shift + 1)) for shift in range(3)]
    return ((torch.stack(channels) + 1) * 127).to(torch.uint8).repeat(number, 1, 1, 1)


def test_a_resized_crop_is_the_part_of_the_image_that_its_draws_say():
    images = picture()
    assert torch.equal(cps.ResizedCrop((1.0, 1.0), (1.0, 1.0))(images, drawn(1, 4)), images)
    quarter = cps.ResizedCrop((0.25, 0.25), (1.0, 1.0))
    corner = quarter(images, torch.tensor([[0.5, 0.5, 0.0, 1.0]]))  # left and low
    expected = tv.resize(images[:, :, 10:, :10], [20, 20], antialias=False)
    assert (corner.int() - expected.int())[:, :, 2:-2, 2:-2].abs().max() <= 3
    plain = torch.full((50, 3, 9, 7), 200, dtype=torch.uint8)
    assert torch.equal(cps.ResizedCrop()(plain, drawn(50, 4)), plain)
    several = cps.ResizedCrop()(picture(20), drawn(20, 4))
    assert len({image.numpy().tobytes() for image in several}) == 20


@pytest.mark.parametrize("angle", [-90, -25, 0, 40, 90])
def test_rotation_turns_as_torchvision_does(angle):
    images = picture()
    turned = cps.Rotate(180)(images, torch.tensor([[0.5 + angle / 360]]))
    expected = tv.rotate(images, angle, InterpolationMode.BILINEAR)
    assert (turned.int() - expected.int()).abs()[:, :, 5:-5, 5:-5].max() <= 3


def test_colour_changes_as_torchvision_does():
    images, factors = picture(), (0.8, 1.3, 0.5)
    uniform = torch.tensor([[0.5 + (factor - 1) for factor in factors]])  # with strengths of one half
    expected = tv.adjust_brightness(images / 255, factors[0])
    expected = tv.adjust_saturation(tv.adjust_contrast(expected, factors[1]), factors[2])
    floats = cps.Colour(0.5, 0.5, 0.5)(images / 255, uniform)
    assert (floats - expected).abs().max() <= 2e-3  # torchvision's weights of the colours have three digits more
    changed = cps.Colour(0.5, 0.5, 0.5)(images, uniform)
    assert changed.dtype == torch.uint8
    assert (255 * floats - changed).abs().max() <= 1
    assert torch.equal(cps.Colour()(images, torch.full((1, 3), 0.5)), images)
    grey = images[:, :1]
    assert cps.Colour()(grey, drawn(1, 3)).shape == grey.shape


@pytest.mark.parametrize(
    "wrong",
    [lambda: cps.ResizedCrop((0.0, 1.0)), lambda: cps.ResizedCrop((0.5, 0.4)), lambda: cps.Colour(contrast=2)],
)
def test_augmentations_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="got"):
        wrong()


@pytest.mark.parametrize(("images", "batch", "processes"), [(10, 4, 1), (9, 4, 1), (10, 4, 2), (3, 128, 1), (9, 4, 2)])
def test_an_epoch_has_each_image_once_and_no_batch_too_small_to_normalise(images, batch, processes):
    batches = list(epoch_order(images, batch, torch.Generator().manual_seed(0), processes))
    seen = torch.cat(batches).tolist()
    assert len(set(seen)) == len(seen) >= images - 2 * processes + 1
    assert all(len(indices) >= 2 * processes for indices in batches)


@pytest.mark.parametrize(("images", "left_out"), [(5000, 8), (2500, 0), (330, 0)])
def test_a_small_batch_beside_many_whole_ones_is_left_out(images, left_out):
    batches = list(epoch_order(images, 128, torch.Generator().manual_seed(0)))
    assert sum(map(len, batches)) == images - left_out


def test_an_epoch_too_small_for_its_processes_is_refused():
    with pytest.raises(ValueError, match="too small"):
        list(epoch_order(1, 4, torch.Generator(), 2))


def test_lists_of_pictures_become_channels_first():
    pictures = [Image.fromarray(np.full((5, 4, 3), index, dtype=np.uint8)) for index in range(4)]
    assert cps.split_by_class((pictures, [0, 1, 0, 1]), sizes=1)[1].train[0].shape == (2, 3, 5, 4)


def test_labels_are_those_after_the_target_transform():
    class Shifted(ListDataset):
        def __init__(self):
            super().__init__(IMAGES, LABELS.tolist())
            self.targets = self.labels
            self.target_transform = lambda label: label + 100

        def __getitem__(self, index):
            return self.images[index], self.labels[index] + 100

    assert cps.split_by_class(Shifted(), sizes=5)[0].classes == (100, 101, 102, 103, 104)


@pytest.mark.parametrize("order", [torch.arange(9, -1, -1), np.arange(9, -1, -1)])
def test_orders_may_be_tensors_and_arrays(order):
    assert cps.split_by_class((IMAGES, LABELS), sizes=2, order=order)[0].classes == (9, 8)
    assert cps.split_by_class((IMAGES, LABELS), sizes=2, order=np.int64(1993)).order == 1993


def test_images_may_be_half_precision_or_run_backwards(make_learner):
    images, labels = make_task(0).train
    learner = make_learner()
    learner.learn(cps.Task([0, 1], train=(images.half(), labels)))
    assert len(learner.predict(images.numpy()[::-1]).classes) == len(labels)
