"""Bad input gives a clear error, and nothing is lost."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import cps
from cps.data.images import as_images
from cps.network.backbones import Builtin
from samples import ACCELERATOR, ListDataset, conv_net, make_task

GOOD = make_task(10)
IMAGES, LABELS = GOOD.train


def with_pixel(value):
    images = IMAGES.clone()
    images[3, 0, 0, 0] = value
    return images


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


BAD_TASKS = {
    "no images": (lambda: cps.Task([10, 11], train=(IMAGES[:0], [])), "no images"),
    "a class learned already": (lambda: cps.Task([0, 11], train=(IMAGES, [0, 11] * 12)), "0 was learned already, in task 0"),
    "a label out of range": (lambda: cps.Task([10, 11], train=(IMAGES, [10, 12] * 12)), "label 12 is not one of"),
    "one class only": (lambda: cps.Task([10], train=(IMAGES, [10] * 24)), "at least two"),
    "no class": (lambda: cps.Task([], train=(IMAGES, [])), "names no class"),
    "a class twice": (lambda: cps.Task([10, 10], train=(IMAGES, [10] * 24)), "twice"),
    "a class without images": (lambda: cps.Task([10, 11, 12], train=(IMAGES, LABELS)), "12 has no training image"),
    "NaN pixels": (lambda: cps.Task([10, 11], train=(with_pixel(torch.nan), LABELS)), "image 3 has NaN or infinite"),
    "infinite pixels": (lambda: cps.Task([10, 11], train=(with_pixel(-torch.inf), LABELS)), "NaN or infinite"),
    "wrong channel count": (lambda: cps.Task([10, 11], train=(IMAGES[:, :1], LABELS)), r"expected images of shape \(2, 6, 6\)"),
    "wrong number of axes": (lambda: cps.Task([10, 11], train=(IMAGES[:, 0], LABELS)), "expected images of shape"),
    "labels missing": (lambda: cps.Task([10, 11], train=(IMAGES, LABELS[:-1])), "one label per image"),
    "no data at all": (lambda: cps.Task([10, 11], train=None), "Dataset"),
    "a stream": (lambda: cps.Task([10, 11], train=Stream()), "Dataset with a length"),
    "a string label": (lambda: cps.Task([10, 11], train=(IMAGES, ["cat"] * 24)), "'cat' is not one of"),
}  # fmt: skip


@pytest.fixture(scope="module")
def learned(fabric):
    torch.manual_seed(0)
    quick = cps.Training(1, batch_size=16)
    learner = cps.Learner(conv_net(), rounds=1, train=quick, retrain=quick, fabric=fabric)
    learner.learn(make_task(0))
    return learner


@pytest.mark.parametrize("what", BAD_TASKS)
def test_a_bad_task_is_refused_and_nothing_is_lost(learned, what):
    make, message = BAD_TASKS[what]
    before = learned.fingerprint(0)
    with pytest.raises((ValueError, TypeError), match=message):
        learned.learn(make())
    assert learned.fingerprint(0) == before
    assert len(learned.network.subnetworks) == 1


def test_bad_pixels_in_a_data_set_are_found_while_it_is_read(make_learner):
    learner = make_learner()
    with pytest.raises(ValueError, match="NaN or infinite"):
        learner.learn(cps.Task([10, 11], train=Broken()))
    assert learner.network.subnetworks == []


class Broken(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return with_pixel(torch.nan)[index].numpy(), LABELS[index]


def test_a_task_smaller_than_a_batch_is_learned(make_learner):
    learner = make_learner()
    images, labels = make_task(0).train
    learner.learn(cps.Task([0, 1], train=(images[:5], labels[:5])))
    assert len(learner.predict(images).classes) == 24


def test_a_batch_of_one_left_over_is_no_problem_for_batch_norm(make_learner):
    learner = make_learner(train=cps.Training(1, batch_size=8), retrain=cps.Training(1, batch_size=8))
    images, labels = make_task(0, images=25).train
    learner.learn(cps.Task([0, 1], train=(images, labels)))


def test_predict_before_learn_is_refused(make_learner):
    with pytest.raises(RuntimeError, match="nothing has been learned"):
        make_learner().predict(IMAGES)


@pytest.mark.parametrize("task", [1, 7, -1])
def test_an_unknown_task_is_refused(learned, task):
    with pytest.raises(ValueError, match="1 were learned"):
        learned.predict(IMAGES, task=task)
    with pytest.raises(ValueError, match="1 were learned"):
        learned.fingerprint(task)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES[:, :1], "expected images of shape"),
        (IMAGES[0, 0, 0], "batch of images"),
        (with_pixel(torch.nan), "NaN"),
        ([], "no images"),
    ],
)
def test_bad_images_to_predict_are_refused(learned, images, message):
    with pytest.raises(ValueError, match=message):
        learned.predict(images)


def test_a_group_size_below_one_is_refused(learned):
    with pytest.raises(ValueError, match="group_size"):
        learned.predict(IMAGES, group_size=0)


def test_a_diverging_loss_is_said_and_nothing_is_lost(make_learner):
    learner = make_learner(train=cps.Training(4, cps.SGD(1e30), batch_size=16))
    with pytest.raises(FloatingPointError, match="learning rate"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


def test_channels_last_images_are_recognised(make_learner):
    images = torch.zeros(24, 32, 32, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="channels-last"):
        make_learner(conv_net(3)).learn(cps.Task([0, 1], train=(images, [0, 1] * 12)))


def test_every_form_of_data_gives_the_same_result(make_learner):
    """Tensors, arrays, a TensorDataset, a Dataset of arrays; ints, names, positions."""
    images, labels = make_task(0).train
    local = torch.tensor(labels)

    class Pairs(Dataset):
        targets = labels

        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return images[index].numpy(), np.int64(labels[index])

    names = ["cat", "dog"]
    forms = [
        cps.Task([0, 1], train=(images, labels)),
        cps.Task([0, 1], train=(images.numpy(), np.array(labels))),
        cps.Task([0, 1], train=(images.double().numpy(), local)),
        cps.Task([0, 1], train=TensorDataset(images, local)),
        cps.Task([0, 1], train=Pairs()),
        cps.Task(names, train=(images, [names[label] for label in labels])),
        cps.Task(names, train=(images, labels)),
        cps.Task(np.array([0, 1]), train=(images, np.array(labels))),
    ]
    by_name = forms[5]
    if ACCELERATOR != "cpu":  # a GPU takes other steps on images that are read from a data set
        forms = [task for task in forms if not isinstance(task.train, Pairs)]
    logits = []
    for task in forms:
        learner = make_learner()
        learner.learn(task)
        logits.append(learner.evidence(images)[0].logits)
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    assert set(make_learner_names(make_learner, by_name, images)) <= set(names)


def make_learner_names(make_learner, task, images):
    learner = make_learner()
    learner.learn(task)
    return learner.predict(images).classes


def test_bytes_are_scaled(make_learner):
    learner = make_learner()
    images = torch.randint(0, 256, (24, 2, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    learner.learn(cps.Task([0, 1], train=(images, [0, 1] * 12)))
    scaled = learner.evidence(images.to(learner.network.device).float() / 255)[0].logits  # devices divide differently
    torch.testing.assert_close(learner.evidence(images)[0].logits, scaled)


def test_a_full_network_says_so_before_it_hurts(make_learner):
    learner = make_learner(rounds=0)
    learner.learn(make_task(0))
    with pytest.warns(cps.CapacityWarning, match=r"2 of 2 layers .* \('0' 0.0%"):
        learner.learn(make_task(10))


def test_a_network_with_nothing_left_to_learn_is_a_capacity_error(make_learner):
    bare = nn.Sequential(nn.Flatten(), nn.Linear(72, 8, bias=False), nn.ReLU())
    learner = make_learner(bare, rounds=0)
    learner.learn(make_task(0))
    before = learner.fingerprint(0)
    with pytest.raises(cps.CapacityError, match="no free weights"):
        learner.learn(make_task(10))
    assert learner.fingerprint(0) == before


@pytest.mark.parametrize("names", [[True, False], [0.5, 1.5], [(0, 1), (0, 2)], [None, "a"], [b"a", b"b"]], ids=str)
def test_class_names_that_no_file_could_hold_are_refused(names):
    with pytest.raises(TypeError, match="strings or ints"):
        cps.Task(names, train=(IMAGES, [names[0], names[1]] * 12))


def test_batches_of_one_image_are_learned(make_learner):
    learner = make_learner(train=cps.Training(1, batch_size=1))
    learner.learn(make_task(0, images=4))


def test_settings_that_make_no_sense_are_refused(make_learner):
    with pytest.raises(ValueError, match="prune_images"):
        make_learner(prune_images=0)
    with pytest.raises(ValueError, match="bf16-true"):
        cps.make_fabric(accelerator="cpu", precision="bf16-true")
    with pytest.raises(ValueError, match=r"epochs of Training must be an integer, got 1\.5"):
        cps.Training(1.5)  # pyright: ignore
    with pytest.raises(ValueError, match="0 or more, got -1"):
        cps.PadCrop(-1)
    with pytest.raises(ValueError, match="deviation of zero"):
        cps.Normalize((0.5,), (0.0,))


SMALLEST = {"Steps": {"at": (1,)}, "Training": {"epochs": 1}, "Builtin": {"name": "small"}}  # fields without defaults
NUMBERS = [
    (kind, field.name, field.type)
    for kind in (
        cps.SGD, cps.Adam, cps.Steps, cps.Cosine, cps.Training, cps.Contrastive, cps.PadCrop, cps.Rotate, cps.Colour,
        cps.Capacity, cps.Upright, cps.Rotations, cps.ImportanceSignature, cps.Cascade, cps.Magnitude, cps.NNrelief,
        Builtin,
    )
    for field in dataclasses.fields(kind)
    if field.type in (int, float, bool)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "of"), NUMBERS)
def test_settings_are_the_numbers_they_say(kind, name, of):
    def make(value):
        return getattr(kind(**{**SMALLEST.get(kind.__name__, {}), name: value}), name)

    wrong = ["1", None, [1], math.nan, math.inf, 10**400, 2 if of is bool else True, *([2.5] if of is int else [])]
    for value in wrong:
        with pytest.raises(ValueError, match=f"{name} of {kind.__name__} must be"):
            make(value)
    for value in (1, np.bool_(True)) if of is bool else (of(1), np.float32(1.0)):  # numpy's become Python's, for files
        assert make(value) == 1
        assert type(make(value)) is of


@pytest.mark.parametrize("wrong", [5, "ab", (1, "x"), (1, math.nan), (True, 1), (1,), None])
def test_numbers_in_a_row_are_numbers(wrong):
    for make, name in (
        (lambda row: cps.ResizedCrop(area=row), "area of ResizedCrop"),
        (lambda row: cps.Normalize(row, (1.0, 1.0)), "mean of Normalize|as many means"),
        (lambda row: cps.Steps(row if row != (1,) else 1), "at of Steps"),
    ):
        with pytest.raises(ValueError, match=name):
            make(wrong)
    assert cps.Normalize(np.array([0.5, 0.25]), [1, 2]) == cps.Normalize((0.5, 0.25), (1, 2))


def test_an_optimizer_of_ones_own_may_have_settings_that_are_no_numbers():
    @dataclass(frozen=True)
    class Nesterov(cps.SGD):
        tag: str = "mine"
        betas: tuple[float, float] = (0.9, 0.999)

    assert Nesterov(0.1).tag == "mine"
    with pytest.raises(ValueError, match="lr of Nesterov must be 0 or more"):
        Nesterov(-0.1)


def test_a_selector_that_knows_nothing_of_the_tasks_is_refused(learned):
    with pytest.raises(ValueError, match="kept no 'mean'"):
        learned.predict(IMAGES, selector=cps.ImportanceSignature(norm=1))


def test_images_that_do_not_fit_the_normalisation_are_refused(make_learner):
    learner = make_learner(conv_net(1), normalize=cps.Normalize((0.5,) * 3, (0.2,) * 3))
    with pytest.raises(ValueError, match="3 channels"):
        learner.learn(make_task(0, shape=(1, 6, 6)))


def test_no_images_to_predict_are_refused(learned):
    with pytest.raises(ValueError, match="no images"):
        learned.predict(IMAGES[:0])


def test_a_pruner_that_forgets_a_layer_is_refused(make_learner):
    class Forgetful:
        def __call__(self, backbone, masks, batches):
            return {name: masks[name] for name in list(masks)[1:]}

    with pytest.raises(ValueError, match="every weight"):
        make_learner(pruner=Forgetful()).learn(make_task(0))


@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64])
def test_pictures_of_integers_other_than_bytes_are_refused_since_their_scale_is_unknown(make_learner, kind):
    task = make_task(0)
    learner = make_learner()
    with pytest.raises(ValueError, match="bytes .* or floats, got int"):
        learner.learn(cps.Task([0, 1], train=(task.train[0].to(kind), task.train[1])))
    learner.learn(task)
    with pytest.raises(ValueError, match="bytes .* or floats, got int"):
        learner.predict(task.train[0].to(kind))


def test_a_task_is_asked_for_by_its_number(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    with pytest.raises(TypeError, match="a task is a number, counted from 0, got 'cat'"):
        learner.predict(make_task(0).train[0], task="cat")


def test_parts_of_another_form_are_refused_in_words(make_learner):
    with pytest.raises(TypeError, match="a loss is a function of features, logits and labels"):
        cps.Training(1, loss=nn.CrossEntropyLoss())
    cps.Training(1, loss=lambda features, logits, labels: logits.sum())
    with pytest.raises(TypeError, match="an augmentation is a function .* `draws`"):
        make_learner(augment=lambda images, uniform: images).learn(make_task(0))


@pytest.mark.filterwarnings("ignore:.*layers without masks")
def test_a_module_that_fails_on_noise_is_no_alarm(make_learner, capsys):
    """Images to try a small network on are noise, which an embedding does not know."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(50, 16), nn.Linear(16, 8)

        def forward(self, tokens):
            return self.layer(self.table(tokens.long()).mean(1)).relu()

    tokens = torch.randint(0, 50, (24, 6), generator=torch.Generator().manual_seed(0)).float()
    learner = make_learner(Tokens())
    found = learner.learn(cps.Task([0, 1], train=(tokens, [0, 1] * 12)))
    assert len(learner.predict(tokens).classes) == 24
    assert "Traceback" not in capsys.readouterr().err
    assert len(repr(found)) < 200


@pytest.mark.parametrize(
    "settings",
    [
        {"train": 3},
        {"pruner": cps.NNrelief},
        {"augment": cps.Flip},
        {"rotations": "turned"},
        {"selectors": [cps.MaxOutput]},
    ],
    ids=str,
)
def test_settings_of_another_kind_are_refused_at_once(make_learner, settings):
    with pytest.raises(TypeError, match=r"cannot be|a selector is an object such as cps.MaxOutput\(\)"):
        make_learner(**settings)


def test_what_cannot_select_is_refused_in_words(learned):
    learner, images = learned, make_task(0).test[0]
    with pytest.raises(TypeError, match="a selector is an object"):
        learner.predict(images, selector="MaxOutput")
    with pytest.raises(ValueError, match="give the task, or a selector"):
        learner.predict(images, selector=cps.MaxOutput(), task=0)
    with pytest.raises(ValueError, match="there is no task 99"):
        learner.predict(images, selector=cps.Oracle(99))
    with pytest.raises(ValueError, match="a number of images"):
        learner.predict(images, group_size=2.5)


def test_labels_of_several_numbers_are_refused(make_learner):
    images = torch.rand(8, 2, 6, 6)
    for labels in (torch.zeros(8, 1), torch.eye(8)):
        with pytest.raises(ValueError, match="one class for each image, got shape"):
            make_learner().learn(cps.Task([0, 1], train=(images, labels)))


def test_a_class_that_only_reading_shows_to_have_no_image_is_told(make_learner, caplog):
    class Reading(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.rand(2, 6, 6), "a"

    make_learner().learn(cps.Task(["a", "b"], train=Reading()))
    assert "class 'b' had no training image" in caplog.text


def test_test_images_of_classes_that_nobody_learns_are_told():
    images = torch.rand(10, 1, 8, 8)
    with pytest.warns(UserWarning, match="class 9 of the test data has no training image"):
        cps.split_by_class((images, [0, 1] * 5), (images, [0, 9] * 5), sizes=np.int64(1))


def test_a_loss_with_parameters_is_refused():
    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, features, logits, labels):
            return torch.nn.functional.cross_entropy(self.scale * logits, labels)

    with pytest.raises(ValueError, match="parameters of its own"):
        cps.Training(1, loss=Learned())


def test_weights_that_the_last_step_ruins_are_not_sealed(make_learner):
    learner = make_learner()
    fit = learner._trainer.fit

    def ruin(model, *given, seed, **settings):
        fit(model, *given, seed=seed, **settings)
        if seed[-1] == learner.rounds:  # the last phase
            model.backbone[0].bias.data[0] = torch.nan

    learner._trainer.fit = ruin
    with pytest.raises(FloatingPointError, match="training left '0.bias' with NaN or infinite values; lower the"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


def test_a_subnetwork_whose_outputs_are_no_numbers_is_not_kept(make_learner):
    learner = make_learner(train=cps.Training(1, cps.SGD(1e38, momentum=0), batch_size=64), rounds=0)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


def test_a_constant_of_the_backbone_may_be_infinite(make_learner):
    class Masked(nn.Sequential):
        def __init__(self):
            super().__init__(*conv_net())
            self.register_buffer("mask", torch.triu(torch.full((3, 3), -torch.inf), 1))

    learner = make_learner(Masked())
    learner.learn(make_task(0))
    assert learner.network.subnetworks[0].private["mask"].isinf().any()


def test_statistics_that_are_no_numbers_are_not_kept(make_learner):
    class Ruined(cps.MaxOutput):
        def observe(self, subnetwork, evidence, labels, earlier):
            return {"mean": torch.tensor([0.0, torch.nan])}

    learner = make_learner(selectors=[Ruined()])
    with pytest.raises(FloatingPointError, match="MaxOutput would keep NaN as 'mean'"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cps.Training(1, 0.01), r"object such as cps.SGD\(0.1\), or a function of \(parameters\), got 0.01"),
        (lambda: cps.Training(1, cps.Adam), "optimizer is an object such as"),
        (lambda: cps.Training(1, cps.Adam(), "cosine"), r"schedule is an object such as cps.Cosine\(\)"),
        (lambda: cps.setting(type("Mine", (), {})), "needs a dataclass"),
        (lambda: cps.Task("ab", train=(IMAGES, LABELS)), "classes are a list of names"),
        (lambda: cps.Learner(conv_net(), rounds="3"), "rounds cannot be '3'; it is a whole number, 0 or more"),
        (lambda: cps.Learner(conv_net(), rounds=2.5), "rounds cannot be 2.5; it is a whole number, 0 or more"),
        (
            lambda: cps.Learner(conv_net(), rotations=cps.Rotations),
            r"the class, not one of its objects\); it is an object",
        ),
        (lambda: cps.Learner(conv_net(), watch=3), "watch cannot be 3; it is a function of the progress"),
        (lambda: cps.Learner(conv_net(), selectors=None), "selectors are a tuple, .* got None alone"),
        (lambda: cps.Learner(conv_net(), selectors=cps.Cascade), "selectors are a tuple, .* got <class"),
        (lambda: cps.Task(None, train=(IMAGES, LABELS)), "labels and classes are lists of names or numbers, got None"),
    ],
)
def test_what_could_only_fail_later_is_refused_when_it_is_made(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_single_image_and_odd_numbers_are_refused_in_words(learned):
    with pytest.raises(ValueError, match=r"one image is image\[None\]"):
        learned.predict(IMAGES[0])
    with pytest.raises(TypeError, match="a task is a number"):
        learned.predict(IMAGES, task=True)
    with pytest.raises(ValueError, match="group_size is a number of images, 1 or more, got '2'"):
        learned.predict(IMAGES, group_size="2")
    for size in (np.int64(2), torch.tensor(2), 2.0):
        assert len(learned.predict(IMAGES, group_size=size).classes) == len(IMAGES)
    with pytest.raises(ValueError, match=r"precision '64-true' cannot be used; there are: 32-true"):
        cps.make_fabric(precision="64-true")


def test_answers_can_be_compared_without_an_error(learned):
    assert learned.predict(IMAGES) != learned.predict(IMAGES)
    assert make_task(0) != make_task(0)


def test_learning_leaves_the_users_images_without_gradients(make_learner):
    images = IMAGES.clone().requires_grad_()
    make_learner().learn(cps.Task([10, 11], train=(images, LABELS)))
    assert images.grad is None


def test_images_of_another_size_are_warned_of_once_and_paths_are_refused(learned, caplog):
    for side in (8, 9):
        learned.predict(torch.rand(3, 2, side, side))
    assert [record.message[:34] for record in caplog.records] == ["some images are not (2, 6, 6), as "]
    for path in ("a.png", ["a.png"]):
        with pytest.raises(TypeError, match="got the path 'a.png'; read it with cps.read_image"):
            learned.predict(path)


def test_pictures_and_arrays_are_taken_as_they_come_and_channels_come_first(make_learner):
    learner, pixels = make_learner(conv_net(3)), np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), np.uint8)
    first = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    first.flags.writeable = False
    learner.learn(cps.Task([0, 1], train=(first, [0, 1] * 12)))
    expected = learner.predict(first).confidence
    assert torch.equal(learner.predict(Image.fromarray(pixels[0])).confidence, learner.predict(first[:1]).confidence)
    assert torch.equal(learner.predict([*map(Image.fromarray, pixels)]).confidence, expected)
    with pytest.raises(ValueError, match=r"got \(8, 8, 3\); channels come first"):
        learner.predict(pixels)
    with pytest.raises(ValueError, match=r"got \(8, 3\); one image is image\[None\]; channels come first"):
        learner.predict(pixels[0])


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (None, TypeError, "got NoneType"),
        ((IMAGES, LABELS), TypeError, "without labels here, got a pair"),
        ([None], TypeError, "got NoneType"),
        ([b"x"], TypeError, "got bytes"),
        (np.array([None, 1]), TypeError, "got an array of object"),
        (np.zeros((2, 2, 6, 6), complex), TypeError, "got an array of complex128"),
        (torch.zeros(2, 2, 6, 6, dtype=torch.complex64), TypeError, "got complex ones"),
        ([np.zeros((2, 6, 6)), np.zeros((2, 5, 6))], ValueError, r"of one shape, got \(2, 6, 6\) and \(2, 5, 6\)"),
    ],
)
def test_what_are_no_images_is_called_by_its_name(learned, images, error, message):
    with pytest.raises(error, match=message):
        learned.predict(images)


def test_two_images_are_no_pair_of_images_and_labels():
    assert as_images((torch.rand(2, 3, 6, 6), torch.rand(2, 3, 6, 6))).shape == (2, 2, 3, 6, 6)
    assert as_images((torch.rand(5), torch.rand(5))).shape == (2, 5)


def test_arrays_of_another_byte_order_are_images(learned):
    images = IMAGES.numpy()
    assert learned.predict(images.astype(">f4")).classes == learned.predict(images).classes


def test_grey_images_without_channels_are_told_what_they_lack(make_learner):
    learner = make_learner(conv_net(1))
    learner.learn(cps.Task([0, 1], train=(torch.rand(24, 1, 6, 6), [0, 1] * 12)))
    with pytest.raises(ValueError, match=r"got \(6, 6\); grey images are images\[:, None\]"):
        learner.predict(torch.rand(4, 6, 6))


@pytest.mark.parametrize("reject", [np.float32(0.05), 0, 0.05])
def test_a_share_may_be_one_of_numpys(learned, reject):
    assert len(learned.predict(torch.rand(1, 2, 6, 6), reject=reject).classes) == 1


@pytest.mark.parametrize("reject", [1, -0.1, "0.05", None])
def test_what_is_no_share_is_not_taken_for_one(learned, reject):
    with pytest.raises(ValueError, match="at least 0 and below 1, got"):
        learned.predict(torch.rand(1, 2, 6, 6), reject=reject)


def test_values_far_from_those_learned_are_told_once(make_learner, caplog):
    pixels = torch.randint(0, 256, (24, 2, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    learner = make_learner()
    learner.learn(cps.Task([0, 1], train=(pixels, [0, 1] * 12)))
    learner.predict(pixels)
    learner.predict(pixels / 255)
    assert caplog.records == []
    for part in (pixels[:5], pixels[5:]):
        learner.predict(part.float())
    assert [record.message for record in caplog.records] == [
        "some images have values far from those learned first, which are 0 to 1: answers may be wrong; scale them alike"
    ]


def normalised(images):
    return (images - 0.45) / 0.225


@pytest.mark.parametrize(
    ("learned_as", "asked_as", "is_told"),
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
def test_what_is_far_from_what_was_learned(make_learner, caplog, learned_as, asked_as, is_told):
    images = torch.rand(24, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    flat = learned_as(images).ndim == 2
    learner = make_learner(nn.Sequential(nn.Linear(72, 16), nn.ReLU()) if flat else None)
    learner.learn(cps.Task([0, 1], train=(learned_as(images), [0, 1] * 12)))
    learner.predict(asked_as(images))
    assert bool(caplog.records) == is_told


def test_positions_are_labels_unless_another_class_is_called_so(make_learner):
    for names in (["0", "1"], ["cat", "101"], ["cat", "dog"]):
        make_learner().learn(cps.Task(names, train=(IMAGES, [0, 1] * (len(IMAGES) // 2))))
    with pytest.raises(ValueError, match="classes are called by numbers here, so a label is a name"):
        make_learner().learn(cps.Task(["1", "0"], train=(IMAGES, [0, 1] * (len(IMAGES) // 2))))


def test_optimizers_take_numbers_of_numpy_and_can_be_inherited_from():
    assert cps.SGD(np.float32(0.5), np.int64(0)) == cps.SGD(0.5, 0)
    assert isinstance(cps.SGD(np.float32(0.5)).lr, float)

    @dataclass(frozen=True)
    class Nesterov(cps.SGD):
        nesterov: bool = True

    assert Nesterov(0.1).nesterov


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64])
def test_bytes_that_are_no_picture_are_said_to_be_scaled(make_learner, caplog, kind):
    values = torch.randint(0, 20, (24, 8), generator=torch.Generator().manual_seed(0)).to(kind)
    make_learner(nn.Sequential(nn.Linear(8, 16), nn.ReLU())).learn(cps.Task([0, 1], train=(values, [0, 1] * 12)))
    assert ["divided by 255" in record.message for record in caplog.records] == [True] * (kind == torch.uint8)


def test_a_backbone_in_half_precision_is_refused(make_learner):
    with pytest.raises(ValueError, match="'0.weight' is in half precision, which overflows"):
        make_learner(nn.Sequential(nn.Linear(8, 16), nn.ReLU()).half())


def test_images_of_a_size_that_the_backbone_cannot_process_are_refused_in_words(make_learner):
    learner = make_learner(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 8)))
    learner.learn(make_task())
    with pytest.raises(
        ValueError, match=r"cannot process images of shape \(2, 9, 9\); those learned first are \(2, 6, 6\)"
    ):
        learner.predict(torch.rand(3, 2, 9, 9))


def test_a_learner_says_what_it_knows(make_learner):
    learner = make_learner()
    learner.learn(make_task(3))
    assert learner.classes == [(3, 4)]
    assert repr(learner) == "Learner(tasks=1, classes=2)"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cps.Learner(nn.Linear), TypeError, "an object and not its class"),
        (lambda: cps.Learner("small"), TypeError, r"cps.Builtin\('small'\) is one of ours"),
        (lambda: cps.Learner(conv_net(), selectors=cps.MaxOutput()), TypeError, "selectors are a tuple"),
        (lambda: cps.Learner(conv_net()).learn(cps.Scenario((), "given")), TypeError, "learn its tasks one by one"),
        (lambda: cps.Training(1, cps.Cosine()), TypeError, "optimizer is an object such as"),
        (lambda: cps.Adam("x"), ValueError, "lr of Adam must be a finite number, got 'x'"),
        (lambda: cps.SGD(0.1, -1), ValueError, "momentum of SGD must be 0 or more, got -1"),
        (lambda: cps.check_pruner(lambda *_: None), AssertionError, "must return masks by name, got NoneType"),
        (lambda: cps.Training(1, schedule=lambda epoch: 1.0), TypeError, r"a function of \(epoch, epochs\)"),
    ],
)
def test_first_mistakes_are_explained(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_labels_of_held_out_images_are_refused_before_training_or_not_at_all(make_learner):
    images, labels = make_task().train
    strange = [*labels[:-1], 99]
    epochs = []
    with pytest.raises(ValueError, match="label 99 is not one of"):
        make_learner(watch=epochs.append).learn(cps.Task([0, 1], train=(images, labels), val=(images, strange)))
    assert epochs == []
    make_learner().learn(cps.Task([0, 1], train=(images, labels), val=ListDataset(images, strange)))


def test_evidence_can_be_cut(learned):
    evidence = learned.evidence(IMAGES)
    assert torch.equal(evidence[:1][0].logits, evidence[0].logits)
    assert len(evidence[-1:]) == 1
