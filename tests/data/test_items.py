"""Data sets of other libraries: dicts, lists, one-hot labels and anything with a length and items."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset, TensorDataset

import cps
from cps.data.examples import as_examples, iterate_batches
from cps.data.images import as_images
from samples import ListDataset, make_task

IMAGES, LABELS = make_task(0).train
PAIRS = list(zip(IMAGES, LABELS, strict=True))


class Items:
    """A data set that is not a torch `Dataset`."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


DATA = {
    "tuples": Items(PAIRS),
    "lists": Items([list(pair) for pair in PAIRS]),
    "more than a pair": Items([(*pair, "camera A") for pair in PAIRS]),
    "dicts": Items([{"image": image, "label": label} for image, label in PAIRS]),
    "dicts with other keys": cps.DictDataset(Items([{"x": image, "y": label} for image, label in PAIRS]), "x", "y"),
    "a list of images": ([*IMAGES], LABELS),
    "lists of a torch data set": Subset(Items([list(pair) for pair in PAIRS]), range(24)),
}


@pytest.mark.parametrize("form", DATA)
def test_every_form_of_a_data_set_gives_the_same_examples(form):
    examples = as_examples(DATA[form], torch.tensor)
    images, labels = map(torch.cat, zip(*iterate_batches(examples, batch_size=5), strict=True))
    assert torch.equal(images, IMAGES)
    assert labels.tolist() == LABELS


@pytest.mark.parametrize("form", DATA)
def test_every_form_of_a_data_set_is_split_learned_and_predicted(make_learner, form):
    data = DATA[form]
    learner = make_learner()
    learner.learn(cps.split_by_class(data, sizes=2)[0])
    expected = make_learner()
    expected.learn(cps.Task([0, 1], train=ListDataset(IMAGES, LABELS)))
    images = data[0] if isinstance(data, tuple) else data
    assert learner.predict(images).classes == expected.predict(IMAGES).classes


def test_dicts_with_unknown_keys_are_refused_with_their_keys():
    data = Items([{"img": image, "fine_label": label} for image, label in PAIRS])
    with pytest.raises(
        ValueError, match=r"dicts with the keys 'img', 'fine_label', and none is 'image'; .*cps.DictDat"
    ):
        as_examples(data, torch.tensor)
    with pytest.raises(ValueError, match="none is 'label'"):
        cps.DictDataset(data, image="img")
    with pytest.raises(
        ValueError, match=r"expected images, got dicts with the keys 'img', 'fine_label'; pass the images"
    ):
        as_images(data)
    with pytest.raises(ValueError, match="expected images, got dicts with the keys 'img'"):
        as_images({"img": IMAGES})
    assert torch.equal(as_images({"image": IMAGES, "label": LABELS}), IMAGES)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((IMAGES, torch.eye(2)[LABELS]), r"got shape \(24, 2\); of one-hot labels pass labels.argmax\(1\)"),
        (
            Items([(image, torch.eye(2)[label]) for image, label in PAIRS]),
            "got 2 values; of a one-hot label pass its argmax",
        ),
        (Items([(image, [0, 1]) for image in IMAGES]), "got 2 values; of a one-hot label pass its argmax"),
        ((IMAGES, torch.tensor(LABELS)[:, None]), r"got shape \(24, 1\); of a column of labels pass labels\[:, 0\]"),
    ],
    ids=["an array", "tensors", "lists", "a column"],
)
def test_labels_with_another_shape_are_refused_with_a_hint(data, message):
    with pytest.raises(ValueError, match=message):
        list(iterate_batches(as_examples(data, torch.tensor)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Items([*IMAGES]), r"an item of a data set must be a pair \(image, label\) or a dict, got Tensor"),
        (TensorDataset(IMAGES), "must be a pair"),
        (PAIRS, r"got list; of a list of pairs pass tuple\(zip\(\*pairs\)\)"),
        (DataLoader(TensorDataset(IMAGES, torch.tensor(LABELS))), r"got a DataLoader; pass loader.dataset"),
        ((image for image in PAIRS), "got generator"),
        ({"train": PAIRS, "test": PAIRS}, r"got dict; it has the keys 'train', 'test': pass the data set of one"),
    ],
    ids=["images alone", "one tensor", "a list", "a loader", "a generator", "a dict of data sets"],
)
def test_data_that_is_no_data_set_of_pairs_is_refused_with_a_hint(data, message):
    with pytest.raises(TypeError, match=message):
        as_examples(data, torch.tensor)
    with pytest.raises(TypeError):
        cps.split_by_class(data, sizes=1)


def test_a_loader_of_images_to_predict_is_refused_with_a_hint(learned):
    with pytest.raises(TypeError, match="pass loader.dataset"):
        learned.predict(DataLoader(TensorDataset(IMAGES)))


def picture(mode):
    return Image.new(mode, (6, 6))


def test_pictures_of_several_modes_or_of_a_palette_are_refused_with_a_hint():
    with pytest.raises(
        ValueError, match=r"got \(3, 6, 6\) and \(1, 6, 6\); convert pictures to one mode: image.convert"
    ):
        as_images([picture("RGB"), picture("L")])
    with pytest.raises(ValueError, match=r'mode \'P\' does not hold pixel values; pass image.convert\("RGB"\)'):
        as_images([picture("P")])


def pictures(mode, number=24):
    noise = np.random.default_rng(0).integers(0, 256, (number, 6, 6, len(picture(mode).getbands())), dtype=np.uint8)
    return [Image.fromarray(each.squeeze(), mode) for each in noise]


@pytest.mark.filterwarnings("ignore:.mode. parameter is deprecated")
def test_hugging_face_data_sets_are_learned_as_they_are(make_learner, monkeypatch):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["cat", "dog", "eel"])}
    )
    rows = {"img": pictures("RGB"), "fine_label": [0, 1, 2] * 8}
    data = datasets.Dataset.from_dict(rows, features=features)
    torch.manual_seed(0)
    learner = make_learner(cps.SmallConvNet(3, (8, 12)))
    with pytest.raises(ValueError, match="the keys 'img', 'fine_label'"):
        cps.split_by_class(data, sizes=2)
    wrapped = cps.DictDataset(data, image="img", label="fine_label")
    assert list(wrapped.targets) == rows["fine_label"]
    for task in cps.split_by_class(wrapped, wrapped, sizes=[2, 1]):
        if len(task.classes) > 1:
            learner.learn(task)
    renamed = data.rename_columns({"img": "image", "fine_label": "label"})
    prediction = learner.predict(renamed)
    assert len(prediction) == 24
    assert prediction.classes == learner.predict(data["img"]).classes == learner.predict(renamed[:24]).classes
    assert learner.predict(renamed.with_format("torch")).classes == prediction.classes
    shifted = data.with_transform(lambda batch: {**batch, "fine_label": [label + 1 for label in batch["fine_label"]]})
    moved = cps.DictDataset(shifted, image="img", label="fine_label")
    assert moved.targets is None
    assert moved[0][1] == 1
