"""Tasks are checked before training and images before prediction: errors are clear, and nothing changes."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import IterableDataset

import cps
from samples import ListDataset, conv_net, make_task

IMAGES, LABELS = make_task(10).train


def with_pixel(value):
    images = IMAGES.clone()
    images[3, 0, 0, 0] = value
    return images


class Iterable(IterableDataset):
    def __iter__(self):
        return iter([])


INVALID_TASKS = {
    "no images": (lambda: cps.Task([10, 11], train=(IMAGES[:0], [])), "at least one image"),
    "a class that was learned before": (lambda: cps.Task([0, 11], train=(IMAGES, [0, 11] * 12)), "0 was already learned, in task 0"),
    "a label out of range": (lambda: cps.Task([10, 11], train=(IMAGES, [10, 12] * 12)), "label 12 is not one of"),
    "one class only": (lambda: cps.Task([10], train=(IMAGES, [10] * 24)), "at least two"),
    "no class": (lambda: cps.Task([], train=(IMAGES, [])), "names no class"),
    "a class twice": (lambda: cps.Task([10, 10], train=(IMAGES, [10] * 24)), "twice"),
    "a class without images": (lambda: cps.Task([10, 11, 12], train=(IMAGES, LABELS)), "12 has no training image"),
    "NaN pixels": (lambda: cps.Task([10, 11], train=(with_pixel(torch.nan), LABELS)), "image 3 has NaN or infinite"),
    "infinite pixels": (lambda: cps.Task([10, 11], train=(with_pixel(-torch.inf), LABELS)), "NaN or infinite"),
    "wrong channel count": (lambda: cps.Task([10, 11], train=(IMAGES[:, :1], LABELS)), r"images must have shape \(2, 6, 6\)"),
    "wrong number of axes": (lambda: cps.Task([10, 11], train=(IMAGES[:, 0], LABELS)), "images must have shape"),
    "labels missing": (lambda: cps.Task([10, 11], train=(IMAGES, LABELS[:-1])), "one label per image"),
    "no data at all": (lambda: cps.Task([10, 11], train=None), "must be a data set or a pair"),
    "an iterable dataset": (lambda: cps.Task([10, 11], train=Iterable()), "a data set must have a length"),
    "a string label": (lambda: cps.Task([10, 11], train=(IMAGES, ["cat"] * 24)), "'cat' is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("what", INVALID_TASKS)
def test_an_invalid_task_raises_and_changes_nothing(learned, what):
    make, message = INVALID_TASKS[what]
    before = learned.fingerprint(0)
    with pytest.raises((ValueError, TypeError), match=message):
        learned.learn(make())
    assert learned.fingerprint(0) == before
    assert len(learned.network.subnetworks) == 1


def test_nan_pixels_of_a_dataset_are_found_while_it_is_read(make_learner):
    learner = make_learner()
    with pytest.raises(ValueError, match="NaN or infinite"):
        learner.learn(cps.Task([10, 11], train=ListDataset(with_pixel(torch.nan).numpy(), LABELS)))
    assert learner.network.subnetworks == []


def test_predict_before_learn_raises(make_learner):
    with pytest.raises(RuntimeError, match="nothing has been learned"):
        make_learner().predict(IMAGES)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES[:, :1], "images must have shape"),
        (IMAGES[0, 0, 0], "batch of images"),
        (with_pixel(torch.nan), "NaN"),
        ([], "at least one image"),
    ],
)
def test_predict_raises_for_invalid_images(learned, images, message):
    with pytest.raises(ValueError, match=message):
        learned.predict(images)


def test_predict_raises_for_an_empty_batch(learned):
    with pytest.raises(ValueError, match="at least one image"):
        learned.predict(IMAGES[:0])


def test_images_with_other_channels_than_the_normalisation_raise(make_learner):
    learner = make_learner(conv_net(1), normalize=cps.Normalize((0.5,) * 3, (0.2,) * 3))
    with pytest.raises(ValueError, match="3 channels"):
        learner.learn(make_task(0, shape=(1, 6, 6)))


@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64])
def test_integer_images_other_than_uint8_raise_since_their_scale_is_unknown(make_learner, kind):
    task = make_task(0)
    learner = make_learner()
    with pytest.raises(ValueError, match="bytes .* or floats, got int"):
        learner.learn(cps.Task([0, 1], train=(task.train[0].to(kind), task.train[1])))
    learner.learn(task)
    with pytest.raises(ValueError, match="bytes .* or floats, got int"):
        learner.predict(task.train[0].to(kind))


def test_labels_with_two_axes_raise(make_learner):
    images = torch.rand(8, 2, 6, 6)
    for labels in (torch.zeros(8, 1), torch.eye(8)):
        with pytest.raises(ValueError, match="one class per image, got shape"):
            make_learner().learn(cps.Task([0, 1], train=(images, labels)))


def test_images_of_another_size_warn_once_and_paths_raise(learned, caplog):
    for side in (8, 9):
        learned.predict(torch.rand(3, 2, side, side))
    assert [record.message[:42] for record in caplog.records] == ["some images do not have shape (2, 6, 6), a"]
    for path in ("a.png", ["a.png"]):
        with pytest.raises(TypeError, match="got the path 'a.png'; read it with cps.read_image"):
            learned.predict(path)


def test_pil_images_and_arrays_are_accepted_with_channels_first(make_learner):
    learner, pixels = make_learner(conv_net(3)), np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), np.uint8)
    channels_first = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    channels_first.flags.writeable = False
    learner.learn(cps.Task([0, 1], train=(channels_first, [0, 1] * 12)))
    expected = learner.predict(channels_first).confidence
    single = learner.predict(channels_first[:1]).confidence
    assert torch.equal(learner.predict(Image.fromarray(pixels[0])).confidence, single)
    assert torch.equal(learner.predict([*map(Image.fromarray, pixels)]).confidence, expected)
    with pytest.raises(ValueError, match=r"got \(8, 8, 3\); the channel axis must come first"):
        learner.predict(pixels)
    with pytest.raises(
        ValueError, match=r"got \(8, 3\); pass a single image as image\[None\]; the channel axis must come first"
    ):
        learner.predict(pixels[0])


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (None, TypeError, "got NoneType"),
        ((IMAGES, LABELS), TypeError, "without labels, got a pair"),
        ([None], TypeError, "got NoneType"),
        ([b"x"], TypeError, "got bytes"),
        (np.array([None, 1]), TypeError, "got an array of object"),
        (np.zeros((2, 2, 6, 6), complex), TypeError, "got an array of complex128"),
        (torch.zeros(2, 2, 6, 6, dtype=torch.complex64), TypeError, "got complex ones"),
        ([np.zeros((2, 6, 6)), np.zeros((2, 5, 6))], ValueError, r"one shape, got \(2, 6, 6\) and \(2, 5, 6\)"),
    ],
)
def test_the_error_names_the_type_of_what_is_not_an_image(learned, images, error, message):
    with pytest.raises(error, match=message):
        learned.predict(images)


def test_arrays_of_another_byte_order_are_accepted(learned):
    images = IMAGES.numpy()
    assert learned.predict(images.astype(">f4")).classes == learned.predict(images).classes


def test_grey_images_without_a_channel_axis_get_a_hint(make_learner):
    learner = make_learner(conv_net(1))
    learner.learn(cps.Task([0, 1], train=(torch.rand(24, 1, 6, 6), [0, 1] * 12)))
    with pytest.raises(ValueError, match=r"got \(6, 6\); add the channel axis of grey images with images\[:, None\]"):
        learner.predict(torch.rand(4, 6, 6))


def test_values_far_from_the_first_task_warn_once(make_learner, caplog):
    pixels = torch.randint(0, 256, (24, 2, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    learner = make_learner()
    learner.learn(cps.Task([0, 1], train=(pixels, [0, 1] * 12)))
    learner.predict(pixels)
    learner.predict(pixels / 255)
    assert caplog.records == []
    for part in (pixels[:5], pixels[5:]):
        learner.predict(part.float())
    assert [record.message for record in caplog.records] == [
        "some images have values far from those of the first task, 0 to 1: predictions may be wrong; scale all images alike"
    ]


def normalised(images):
    return (images - 0.45) / 0.225


@pytest.mark.parametrize(
    ("learn_as", "predict_as", "warns"),
    [
        (lambda x: x, normalised, True),
        (lambda x: x, lambda x: x * 255, True),
        (lambda x: x, lambda x: (x * 255).to(torch.uint8), False),
        (normalised, normalised, False),
        (normalised, lambda x: x * 255, True),
        (torch.zeros_like, lambda x: x, False),
        (lambda x: (x * 9).long().flatten(1), lambda x: (x * 30000).long().flatten(1), False),
    ],
)
def test_which_values_count_as_far_from_the_first_task(make_learner, caplog, learn_as, predict_as, warns):
    images = torch.rand(24, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    is_flat = learn_as(images).ndim == 2
    learner = make_learner(nn.Sequential(nn.Linear(72, 16), nn.ReLU()) if is_flat else None)
    learner.learn(cps.Task([0, 1], train=(learn_as(images), [0, 1] * 12)))
    learner.predict(predict_as(images))
    assert bool(caplog.records) == warns


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64])
def test_uint8_inputs_that_are_not_images_warn_that_they_are_scaled(make_learner, caplog, kind):
    values = torch.randint(0, 20, (24, 8), generator=torch.Generator().manual_seed(0)).to(kind)
    make_learner(nn.Sequential(nn.Linear(8, 16), nn.ReLU())).learn(cps.Task([0, 1], train=(values, [0, 1] * 12)))
    assert ["divided by 255" in record.message for record in caplog.records] == [True] * (kind == torch.uint8)


def test_images_of_a_size_that_the_backbone_cannot_process_raise(make_learner):
    learner = make_learner(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 8)))
    learner.learn(make_task())
    with pytest.raises(
        ValueError, match=r"cannot process images of shape \(2, 9, 9\); those of the first task are \(2, 6, 6\)"
    ):
        learner.predict(torch.rand(3, 2, 9, 9))


def test_labels_of_held_out_images_are_checked_before_training_or_ignored(make_learner):
    images, labels = make_task().train
    wrong = [*labels[:-1], 99]
    epochs = []
    with pytest.raises(ValueError, match="label 99 is not one of"):
        make_learner(on_epoch=epochs.append).learn(cps.Task([0, 1], train=(images, labels), val=(images, wrong)))
    assert epochs == []
    learner = make_learner()  # the labels of a dataset without targets are not read, since they are not needed
    learner.learn(cps.Task([0, 1], train=(images, labels), val=ListDataset(images, wrong)))
    assert learner.classes == [(0, 1)]


def test_held_out_images_are_checked_before_training(make_learner):
    task = make_task(0)
    learner = make_learner(on_epoch=lambda progress: pytest.fail("training has started"))
    with pytest.raises(ValueError, match="is not one of the task's classes"):
        learner.learn(cps.Task(task.classes, train=task.train, val=(task.test[0][:2], [0, 7])))


def test_only_square_images_can_be_learned_in_rotations(make_learner):
    with pytest.raises(ValueError, match="only square images"):
        make_learner(rotations=cps.Rotations()).learn(make_task(0, shape=(2, 6, 8)))


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_grey_pictures_for_a_network_of_colour_pictures_get_a_hint(make_learner, mode):
    pictures = {kind: [Image.new(kind, (6, 6), color=200 + index) for index in range(24)] for kind in ("L", "RGBA")}
    colour = [picture.convert("RGB") for picture in pictures["L"]]
    learner, labels = make_learner(conv_net(3)), [0, 1] * 12
    with pytest.raises(ValueError, match=r'cannot process .*make pictures RGB with image.convert\("RGB"\)'):
        learner.learn(cps.Task([0, 1], train=(pictures[mode], labels)))
    learner.learn(cps.Task([0, 1], train=(colour, labels)))
    with pytest.raises(
        ValueError, match=r'must have shape \(3, 6, 6\).* make pictures RGB with image.convert\("RGB"\)'
    ):
        learner.predict(pictures[mode])
