"""The frame of methods with a cosine head: imprinted vectors, frozen ones, and the balanced phase."""

import pytest
import torch
import torch.nn.functional as F
from method_samples import MEMORY, QUICK

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.cosine.cosine_method import CosineMethod
from samples import make_task

ROUGH = cps.SGD(0.1, momentum=0.9, weight_decay=0.1)  # moves all that is not frozen
BALANCED = cps.Training(2, ROUGH, batch_size=8)


def make(fabric, **settings):
    torch.manual_seed(0)
    backbone = cps.SmallConvNet(2, widths=(4, 6))
    return CosineMethod(backbone, fabric=fabric, **{"train": QUICK, "memory": MEMORY, **settings})


@pytest.mark.slow
def test_it_keeps_the_contract_of_methods_with_a_balanced_phase(fabric):
    cps.check_method(
        lambda backbone: CosineMethod(backbone, train=QUICK, balanced=BALANCED, memory=MEMORY, proxies=2, fabric=fabric)
    )


def test_features_have_both_signs(fabric):
    method = make(fabric)
    method.learn(make_task(0))
    assert method.features([make_task(0).test[0]]).min() < 0


def test_vectors_of_new_classes_start_from_their_features_with_the_mean_length_of_old_ones(fabric):
    method = make(fabric)
    method.learn(make_task(0))
    lengths, task = method.head.weight.norm(dim=1).detach(), make_task(10)
    features = F.normalize(method.features([task.train[0]]), dim=1)
    expected = torch.stack([features[index::2].mean(dim=0) for index in range(2)])
    method.train = cps.Training(0)
    method.learn(task)
    torch.testing.assert_close(method.head.weight[2:].detach(), F.normalize(expected, dim=1) * lengths.mean())


def test_vectors_of_old_classes_do_not_move_by_a_bit_before_the_balanced_phase(fabric):
    method = make(fabric, train=cps.Training(3, ROUGH, batch_size=16), proxies=2)
    method.learn(make_task(0))
    before = method.head.weight.detach().clone()
    method.learn(make_task(10))
    assert torch.equal(method.head.weight[:4], before)
    assert method.head.weight[4:].norm() > 0


def test_the_balanced_phase_trains_the_head_alone_on_as_many_images_of_every_class(fabric, monkeypatch):
    method, seen = make(fabric, balanced=BALANCED, memory=Memory(13)), []
    method.learn(make_task(0))
    fit = method.trainer.fit

    def watch(model, examples, *arguments, **options):
        before = {name: value.clone() for name, value in method.model.state_dict().items()}
        fit(model, examples, *arguments, **options)
        after = method.model.state_dict()
        moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
        seen.append((torch.bincount(examples.labels()).tolist(), moved))

    monkeypatch.setattr(method.trainer, "fit", watch)
    method.learn(make_task(10))
    (counts, moved), (balanced, by_last) = seen
    assert counts == [6, 6, 12, 12]
    assert balanced == [6, 6, 6, 6]
    assert len(moved) > len(by_last) == 1
    assert by_last == {"head.weight"}


def test_a_budget_is_shared_with_the_balanced_phase(fabric):
    settings = {"balanced": BALANCED, "passes": 3.0}
    for memory, phases in ((MEMORY, 2), (Memory(0), 1)):
        method, names = make(fabric, memory=memory, **settings), set()
        method.learn(make_task(0))
        before = method.image_passes
        method.learn(make_task(10), on_epoch=lambda at, names=names: names.add(at.phase_name))
        assert 3 * 24 <= method.image_passes - before < 3 * 24 + 16 + 8
        assert len(names) == phases


def test_a_fixed_scale_stays(fabric):
    learned, fixed = (make(fabric, scale=3.0, learns_scale=learns) for learns in (True, False))
    for method in (learned, fixed):
        method.learn(make_task(0))
        method.learn(make_task(10))
    assert fixed.head.scale.item() == 3 != learned.head.scale.item()


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"proxies": 0}, "proxies of cosine head must be above 0"), ({"scale": 0.0}, "scale .* must be above 0")],
)
def test_wrong_settings_raise(fabric, settings, match):
    with pytest.raises(ValueError, match=match):
        make(fabric, **settings)
