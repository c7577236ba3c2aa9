"""The memory: which images it keeps, and how many."""

import pytest
import torch
import torch.nn.functional as F

from cps.data.examples import TensorExamples
from cps.methods.blocks.memory import Exemplars, FirstImages, Herding, Memory, RandomImages

DRAWS = torch.Generator()


def test_herding_chooses_the_images_worked_by_hand():
    """Unit vectors along (1, 0), (0, 1), (1, 1) and (1, 0.2); their mean is (0.6719, 0.4758)."""
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.2]])
    torch.testing.assert_close(
        F.normalize(points, dim=1).mean(dim=0), torch.tensor([0.6719, 0.4758]), atol=1e-4, rtol=0
    )
    assert Herding()(7 * points, 4, DRAWS).tolist() == [2, 3, 1, 0]


def test_any_first_part_of_a_herding_order_is_the_order_of_fewer_images():
    features = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    whole = Herding()(features, 20, DRAWS)
    assert sorted(whole.tolist()) == list(range(20))
    assert torch.equal(Herding()(features, 7, DRAWS), whole[:7])


def test_herding_follows_the_mean_better_than_random_images():
    features = F.normalize(torch.randn(200, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    herded, drawn = Herding()(features, 10, DRAWS), RandomImages()(features, 10, torch.Generator().manual_seed(0))
    errors = [(features[chosen].mean(dim=0) - features.mean(dim=0)).norm() for chosen in (herded, drawn)]
    assert errors[0] < errors[1] / 3


def test_a_total_is_shared_by_all_classes_and_a_number_per_class_is_not():
    assert [Memory(20).quota(classes) for classes in (1, 3, 20)] == [20, 6, 1]
    assert [Memory(per_class=4).quota(classes) for classes in (1, 30)] == [4, 4]
    assert Memory(0).quota(5) == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"total": -1}, "0 or more"), ({"total": 1.5}, "0 or more"), ({"total": None}, "pass one of them")],
)
def test_wrong_sizes_raise(settings, match):
    with pytest.raises(ValueError, match=match):
        Memory(**settings)


def test_a_memory_smaller_than_the_number_of_classes_raises():
    with pytest.raises(ValueError, match="a memory of 5 images cannot hold one of each of 6 classes"):
        Memory(5).quota(6)


def test_old_classes_shrink_to_their_first_images_and_new_ones_come_behind():
    images = torch.arange(24).reshape(12, 2).to(torch.uint8)
    exemplars, choose = Exemplars(), FirstImages()
    exemplars.add_classes(TensorExamples(images, torch.arange(12) % 2), [0, 1], 4, choose, torch.Tensor, DRAWS)
    exemplars.shrink(2)
    exemplars.add_classes(TensorExamples(images + 100, torch.full((12,), 2)), [2], 2, choose, torch.Tensor, DRAWS)
    examples = exemplars.examples()
    assert examples.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert examples.images.tolist() == images[[0, 2, 1, 3]].tolist() + (images[:2] + 100).tolist()
    assert exemplars.nbytes == 12
    other = Exemplars()
    other.restore(exemplars.state())
    assert torch.equal(other.examples().images, examples.images)


def test_an_empty_memory_has_no_examples():
    exemplars = Exemplars()
    exemplars.add_classes(
        TensorExamples(torch.zeros(3, 2), torch.zeros(3).long()), [0], 0, Herding(), torch.Tensor, DRAWS
    )
    assert exemplars.examples() is None
    assert len(exemplars) == 0
