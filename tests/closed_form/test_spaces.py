"""Spaces give the same features everywhere, for any image that a backbone accepts, at a bounded cost."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

import cps
from cps.closed_form import spaces
from cps.closed_form.classifiers import LDA
from cps.closed_form.spaces import (
    MOST_FEATURES,
    MOST_VALUES,
    Joined,
    Pretrained,
    RandomPatches,
    RandomReLU,
    default_space,
    patch_filters,
    root_normalize,
)
from cps.runtime import devices
from cps.storage.settings_codec import Unknown, decode, encode

PATCHES = RandomPatches(filters=10)
JOINED = Joined((RandomReLU(20), PATCHES))
SPACES = [RandomReLU(20), PATCHES, JOINED]


def _make(space, shape=(3, 20, 20)):
    return space.make(shape, lambda: pytest.fail("no pretrained backbone is needed")).eval()


def _images(number, *shape, seed=0):
    """Return smooth random images from 0 to 1."""
    noise = torch.rand(number, *shape, generator=torch.Generator().manual_seed(seed))
    return (noise + noise.roll(1, -1) + noise.roll(1, -2)) / 3


@pytest.mark.slow  # starts Python and imports torch
def test_a_fresh_process_with_another_seed_and_dtype_computes_the_same_features(tmp_path):
    images = _images(3, 3, 20, 20)
    torch.save(images, tmp_path / "images.pt")
    code = f"""
import numpy as np, torch
torch.manual_seed(7), np.random.seed(7), torch.set_default_dtype(torch.float64)
from cps.closed_form.spaces import Joined, RandomPatches, RandomReLU
images = torch.load({str(tmp_path / "images.pt")!r})
torch.save(Joined((RandomReLU(20), RandomPatches(10))).make((3, 20, 20), None)(images), {str(tmp_path / "out.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    found = torch.load(tmp_path / "out.pt")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, _make(JOINED)(images), rtol=1e-5, atol=1e-6)


def test_global_generators_are_neither_read_nor_changed():
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        patch_filters.cache_clear()
        results.append(_make(JOINED)(_images(2, 3, 20, 20)))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(*results)


def test_two_modules_do_not_share_the_cached_filters():
    first = _make(PATCHES)
    first.filters.zero_()
    assert _make(PATCHES).filters.any()


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_features_of_an_image_do_not_depend_on_its_batch(space, monkeypatch):
    module, images = _make(space), _images(9, 3, 20, 20)
    features = module(images)
    assert features.dtype == torch.float32
    torch.testing.assert_close(torch.cat([module(image[None]) for image in images]), features, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(features[0], features[1], rtol=1e-2)
    monkeypatch.setitem(spaces.RESPONSES_AT_ONCE, "cpu", 4 * 10 * 15 * 15)  # four images at once
    torch.testing.assert_close(module(images), features, rtol=1e-4, atol=1e-5)
    assert module(images[:0]).shape == (0, features.shape[1])


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float64])
def test_images_of_any_dtype_give_float32_features(space, dtype):
    module, images = _make(space), 200 * _images(4, 3, 20, 20)
    found = module(images.to(dtype))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, module(images.to(dtype).float()))
    assert found.isfinite().all()


@pytest.mark.parametrize("channels", [1, 2, 7])
@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_images_may_have_any_number_of_channels(space, channels):
    features = _make(space, (channels, 18, 18))(_images(4, channels, 18, 18))
    assert features.isfinite().all()
    assert features.std(dim=0).gt(0).float().mean() > 0.3


SIZES = [(1, 1), (2, 40), (5, 5), (6, 6), (7, 300), (17, 17), (33, 47), (100, 100)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("first", [(6, 6), (20, 20), (12, 40)], ids=str)
@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_images_of_another_size_than_those_of_the_first_task_give_finite_features(space, first, size):
    module = _make(space, (2, *first))
    features = module(_images(3, 2, *size))
    assert features.shape == module(_images(3, 2, *first)).shape
    assert features.isfinite().all()


@pytest.mark.parametrize("space", [RandomReLU(200), RandomPatches(50)], ids=repr)
def test_images_of_another_size_have_features_like_their_own_at_the_size_of_the_first_task(space):
    module = _make(space, (2, 16, 16))
    images = nn.functional.interpolate(_images(6, 2, 4, 4), size=(16, 16), mode="bilinear")
    others = {
        "smaller": images[..., ::2, ::2],
        "larger": nn.functional.interpolate(images, size=(24, 24), mode="bilinear"),
    }
    for resized in others.values():
        similarity = nn.functional.cosine_similarity(module(resized)[:, None], module(images), dim=2)
        assert (similarity.argmax(dim=1) == torch.arange(6)).all()


def test_random_relu_sees_an_enlarged_image_as_the_image():
    module, images = _make(RandomReLU(20), (2, 6, 6)), _images(3, 2, 6, 6)
    enlarged = images.repeat_interleave(3, 2).repeat_interleave(3, 3)
    torch.testing.assert_close(module(enlarged), module(images))


@pytest.mark.parametrize(
    ("shape", "other"),
    [((), None), ((1,), None), ((30,), None), ((5, 12), (9, 12)), ((2, 4, 6, 6), (2, 3, 9, 9)), ((50000,), None)],
    ids=str,
)
def test_random_relu_accepts_vectors_tokens_and_volumes(shape, other):
    module = RandomReLU(16).make(shape, None)
    features = module(_images(4, *shape) if len(shape) > 1 else torch.rand(4, *shape))
    assert features.shape == (4, 16)
    assert features.isfinite().all()
    if other is not None:
        assert module(_images(4, *other)).shape == (4, 16)


def test_random_relu_is_a_random_layer_with_relu():
    module, images = _make(RandomReLU(300), (1, 8, 8)), _images(5, 1, 8, 8)
    torch.testing.assert_close(module(images), (images.flatten(1) @ module.weights).relu())
    assert module.weights.std() == pytest.approx(1 / 8, rel=0.02)
    large, of_large = _make(RandomReLU(300), (1, 32, 32)), _images(5, 1, 32, 32)
    means = of_large.reshape(5, 1, 16, 2, 16, 2).mean(dim=(3, 5))
    torch.testing.assert_close(large(of_large), (means.flatten(1) @ large.weights).relu())


def test_patch_features_are_those_of_a_loop_over_patches():
    module, image = _make(RandomPatches(3, 4), (2, 9, 11)), _images(1, 2, 9, 11)[0].double()
    image = (image - image.mean()) / (image.std(correction=0) + 1e-3)
    responses = torch.zeros(3, 6, 8, dtype=torch.float64)
    for row in range(6):
        for column in range(8):
            patch = image[:, row : row + 4, column : column + 4]
            contrast = (patch.var(correction=0) + 0.16**2).sqrt()
            response = (module.filters.double() * (patch - patch.mean())).sum(dim=(1, 2, 3)) / contrast
            responses[:, row, column] = response.sign() * (response.abs() - 0.5).clamp(min=0)
    quadrants = [
        (slice(0, 3), slice(0, 4)),
        (slice(0, 3), slice(4, 8)),
        (slice(3, 6), slice(0, 4)),
        (slice(3, 6), slice(4, 8)),
    ]
    expected = [
        torch.stack([values[:, r, c].mean(dim=(1, 2)) for r, c in quadrants], dim=1)
        for values in (responses, responses.abs())
    ]
    found = module(_images(1, 2, 9, 11))[0].double()
    torch.testing.assert_close(found, torch.cat([part.flatten() for part in expected]), rtol=1e-4, atol=1e-5)
    assert (responses != 0).float().mean() > 0.3


@pytest.mark.parametrize("channels", [1, 3, 7])
@pytest.mark.parametrize("patch", [2, 3, 6])
def test_filters_are_finite_different_and_have_mean_zero(channels, patch):
    filters = patch_filters(channels, 12, patch).flatten(1)
    assert filters.isfinite().all()
    assert filters.mean(dim=1).abs().max() < 1e-6
    assert filters.norm(dim=1).min() > 0.1
    similar = nn.functional.cosine_similarity(filters[:, None], filters, dim=2) - torch.eye(12)
    assert similar.max() < 0.9999


def test_patch_features_do_not_depend_on_brightness_and_contrast():
    module, images = _make(RandomPatches(50)), _images(6, 3, 20, 20)
    features = module(images)
    for changed in (255 * images, 4 * images - 2, -0.5 + 0.5 * images):
        assert (module(changed) - features).norm() < 0.02 * features.norm()
    assert (module(images.flip(-1)) - features).norm() > 0.2 * features.norm()


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("value", [0.0, 0.1, 255.0, -1e4])
def test_constant_images_give_finite_features(space, value):
    features = _make(space)(torch.full((2, 3, 20, 20), value))
    assert features.isfinite().all()
    if space is PATCHES:
        assert features.abs().max() < 0.1


def test_large_images_cost_no_more_than_small_ones_but_for_reducing_them():
    module = _make(RandomPatches(), (3, 224, 224))
    sizes = []
    convolve = torch.nn.functional.conv2d

    def record(pixels, weights):
        sizes.append(tuple(pixels.shape[-2:]))
        return convolve(pixels, weights)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spaces.F, "conv2d", record)
        assert module(torch.rand(2, 3, 224, 224)).shape == (2, 1000)
        module(torch.rand(1, 3, 20, 5000))
    assert set(sizes) == {(32, 32), (20, 32)}
    assert _make(RandomReLU(), (3, 224, 224)).weights.shape == (3 * 16 * 16, 1000)


def test_responses_of_many_images_are_never_all_in_memory():
    module, largest = _make(RandomPatches(), (3, 32, 32)), 0
    shrink = torch.nn.functional.softshrink

    def record(values, threshold):
        nonlocal largest
        largest = max(largest, values.numel() * values.element_size())
        return shrink(values, threshold)

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(spaces.F, "softshrink", record)
        assert module(torch.rand(64, 3, 32, 32)).shape == (64, 1000)
    assert 0 < largest <= 4 * 2**20  # bytes, whatever the number of images


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("size", [(8, 8), (18, 25), (40, 40)], ids=str)
def test_an_exported_graph_accepts_any_number_of_images(space, size):
    module, images = _make(space, (2, *size)), _images(5, 2, *size)
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (images[:2],), dynamic_shapes=({0: batch},))
    for number in (1, 5):
        expected = module(images[:number])
        torch.testing.assert_close(program.module()(images[:number]), expected, rtol=1e-4, atol=1e-5)


def test_an_exported_graph_is_not_split_into_parts(monkeypatch):
    monkeypatch.setitem(spaces.RESPONSES_AT_ONCE, "cpu", 1)  # one image at once
    module, images = _make(PATCHES, (2, 8, 8)), _images(5, 2, 8, 8)
    program = torch.export.export(module, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(images), module(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # writing an ONNX graph takes about a second
@pytest.mark.parametrize("size", [(8, 8), (18, 25), (40, 40)], ids=str)
def test_onnxruntime_computes_the_same_features(size, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    from cps.export.onnx import write_onnx

    module, images = _make(JOINED, (2, *size)), _images(5, 2, *size)
    write_onnx(module, tmp_path / "space.onnx", images[:2], output_names=["features"], metadata={})
    session = onnxruntime.InferenceSession((tmp_path / "space.onnx").read_bytes())
    for number in (1, 5):
        found = session.run(None, {"images": images[:number].numpy()})[0]
        np.testing.assert_allclose(found, module(images[:number]).numpy(), rtol=1e-3, atol=1e-4)


def test_pretrained_features_are_normalised_roots_of_the_backbone_s():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).to(torch.bfloat16)
    images = torch.rand(4, 3, 2, 2, dtype=torch.bfloat16)
    found = Pretrained().make((3, 2, 2), lambda: backbone)(images)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, root_normalize(backbone(images).float()))


def test_root_normalize_takes_signed_roots_and_scales_to_length_one():
    found = root_normalize(torch.tensor([[16.0, -9.0], [0.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.8, -0.6], [0.0, 0.0]]))


def test_joined_features_are_side_by_side():
    images = _images(3, 3, 20, 20)
    torch.testing.assert_close(
        _make(JOINED)(images), torch.cat([_make(RandomReLU(20))(images), _make(PATCHES)(images)], 1)
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 8, 8), RandomReLU()),
        ((3, 16, 40), RandomReLU()),
        ((30,), RandomReLU()),
        ((5, 12), RandomReLU()),
        ((), RandomReLU()),
        ((512, 32, 32), RandomReLU()),  # so many channels that whitening would take minutes
        ((3, 17, 17), RandomPatches()),
        ((3, 32, 32), RandomPatches()),
        ((1, 224, 224), RandomPatches()),
    ],
    ids=str,
)
def test_the_default_space_depends_on_the_shape(shape, expected):
    assert default_space(shape) == expected
    assert expected.make(shape, None)(torch.rand(2, *shape)).isfinite().all()


def test_patches_need_images_with_few_channels():
    for shape in ((30,), (5, 12), (512, 32, 32)):
        with pytest.raises(ValueError, match=r"at most 21 channels, got .* use RandomReLU"):
            RandomPatches().make(shape, None)


@pytest.mark.parametrize(
    "encoded",
    [
        {"type": "RandomReLU", "size": 10**9},
        {"type": "RandomReLU", "size": MOST_FEATURES + 1},
        {"type": "RandomReLU", "size": 0},
        {"type": "RandomReLU", "size": "many"},
        {"type": "RandomReLU", "size": [1]},
        {"type": "RandomPatches", "filters": -1},
        {"type": "RandomPatches", "filters": MOST_FEATURES // 8 + 1},
        {"type": "RandomPatches", "filters": 1.5},
        {"type": "RandomPatches", "patch": 1},
        {"type": "RandomPatches", "patch": 10**6},
        {"type": "Pretrained", "weights": "x"},
        {"type": "Joined"},
        {"type": "Joined", "spaces": []},
        {"type": "Joined", "spaces": 5},
        {"type": "Joined", "spaces": "ab"},
        {"type": "Joined", "spaces": [1, None]},
        {"type": "Joined", "spaces": {"type": "RandomReLU"}},
        {"type": "Joined", "spaces": [{"type": "LDA"}]},
        {"type": "Joined", "spaces": [{"type": "RandomReLU"}] * 5},
        {"type": "Joined", "spaces": [{"type": "Joined", "spaces": [{"type": "RandomReLU"}]}]},
    ],
    ids=str,
)
def test_hostile_settings_of_a_file_raise(encoded):
    assert isinstance(decode({"type": "LDA"}), LDA)  # known, but no space
    with pytest.raises(ValueError, match=f"damaged setting {encoded['type']}"):
        decode(encoded)


def test_joined_accepts_lists_but_no_classes():
    assert hash(Joined([RandomReLU()])) == hash(Joined((RandomReLU(),)))
    with pytest.raises(ValueError, match="spaces of Joined must be a tuple of at most 4 spaces such as"):
        Joined((RandomReLU,))


@pytest.mark.parametrize("space", [*SPACES, Pretrained(), cps.Joined((Pretrained(), RandomReLU(3)))], ids=repr)
def test_files_can_hold_spaces(space):
    assert decode(encode(space)) == space
    assert isinstance(decode({"type": "Joined", "spaces": [{"type": "NoSuchSpace"}]}), Unknown)


@pytest.mark.parametrize("shape", [(2**24,), (2**20, 4, 4), (64, 200, 3), (3, 2**12, 2**12), (2, 2**20)], ids=str)
def test_inputs_of_any_size_need_a_bounded_number_of_weights(shape):
    tracemalloc.start()  # counts what numpy allocates
    weights = RandomReLU(30).make(shape, None).weights
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(weights) <= MOST_VALUES
    assert peak < 2**20


def test_exact_features_are_those_of_the_backbone_without_half_precision(monkeypatch):
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda: True)
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    module = cps.Pretrained().make((3, 224, 224), lambda: backbone)
    photos = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        rounded, expected = module(photos), spaces.root_normalize(backbone(photos))
        with devices.exact_photos():
            assert torch.equal(module(photos), expected)
        assert torch.equal(module(photos), rounded)
    assert not torch.equal(rounded, expected)
    torch.testing.assert_close(rounded, expected, rtol=0.05, atol=0.05)
