"""Channels that the features do not depend on are found, and no others."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cps.pruning.dead_channels import find_dead_channels
from samples import make_task


def test_unread_channels_are_found_through_the_whole_network():
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 1, bias=False), nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).eval()  # fmt: skip
    weights = {n: p.detach().clone().abs() for n, p in backbone.named_parameters() if p.ndim > 1}
    weights["5.weight"][:, 2] = 0  # nothing reads channel 2 of layer 3 ...
    weights["3.weight"][[0, 1, 3], 1] = 0  # ... and only that channel reads channel 1 of layer 0
    unread = find_dead_channels(backbone, weights, [torch.rand(4, 2, 5, 5)])
    assert unread["5.weight"].tolist() == [False] * 3
    assert unread["3.weight"].tolist() == [False, False, True, False]
    assert unread["0.weight"].tolist() == [False, True, False, False]


def test_an_inactive_channel_that_would_become_active_stays_and_an_unread_one_goes():
    backbone = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    with torch.no_grad():
        backbone[0].bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    weights = {
        "0.weight": torch.tensor([[-9.0, -9.0], [1.0, 1.0], [1.0, 2.0]]),
        "2.weight": torch.tensor([[3.0, 0.0, 1.0], [2.0, 0.0, 1.0]]),
    }
    images = 0.5 + torch.rand(6, 2)
    assert find_dead_channels(backbone, weights, [images])["0.weight"].tolist() == [False, True, False]


def test_a_channel_that_only_later_images_use_stays():
    backbone = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    weights = {"0.weight": torch.eye(3, 2), "2.weight": torch.tensor([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0]])}
    with torch.no_grad():
        backbone[0].bias.zero_()
    first, second = torch.tensor([[1.0, -1.0]] * 4), torch.tensor([[1.0, 1.0]] * 4)
    assert find_dead_channels(backbone, weights, [first])["0.weight"].tolist() == [False, True, True]
    assert find_dead_channels(backbone, weights, [first, second])["0.weight"].tolist() == [False, False, True]


class Saturated(nn.Sequential):
    """Blocks with an activation that is saturated in channel 0 for all images, so that the gradient there is zero."""

    def __init__(self, blocks):
        super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.Hardtanh(-0.1, 0.1)) for _ in range(blocks)))

    def forward(self, pixels):
        for block in self:
            pixels = pixels + block(pixels)
        return pixels


def test_layers_whose_saturated_channels_matter_keep_them_and_three_passes_are_enough():
    torch.manual_seed(0)
    backbone, images = Saturated(blocks=24).eval(), 1 + torch.rand(256, 6)
    weights = {name: value.detach().clone() for name, value in backbone.named_parameters() if value.ndim > 1}
    matter = {"3.0.weight", "20.0.weight"}  # without it: the other bound; in the other layers: the same
    with torch.no_grad():
        for name, weight in weights.items():
            bias = backbone.get_parameter(name.replace("weight", "bias")).zero_()
            weight.mul_(0.01)
            weight[0], bias[0] = (1.0, -3.0) if name in matter else (0.1, 2.0)
    passed = []
    backbone.register_forward_pre_hook(lambda _module, inputs: passed.append(len(inputs[0])))
    dead = find_dead_channels(backbone, weights, list(images.split(64)))
    assert 2 * len(images) < sum(passed) <= 3 * len(images)
    for name, mask in dead.items():
        assert mask.tolist() == [name not in matter, *[False] * 5]


def test_other_networks_take_two_passes():
    torch.manual_seed(0)
    backbone, passed = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), []
    weights = {name: value.detach().clone() for name, value in backbone.named_parameters() if value.ndim > 1}
    weights["2.weight"][:, 2] = 0
    backbone.register_forward_pre_hook(lambda _module, inputs: passed.append(len(inputs[0])))
    assert find_dead_channels(backbone, weights, [torch.rand(8, 4)] * 4)["0.weight"][2]
    assert sum(passed) == 2 * 32


def test_a_layer_before_a_detach_keeps_its_channels():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.layer = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(self.stem(x).detach()) + 0 * x.sum()

    backbone = Detached().eval()
    weights = {n: p.detach() for n, p in backbone.named_parameters() if p.ndim > 1}
    assert not find_dead_channels(backbone, weights, [torch.rand(5, 4)])["stem.weight"].any()


def test_nan_features_leave_all_channels():
    class Ruined(nn.Sequential):
        def forward(self, pixels):
            return super().forward(pixels) * torch.nan

    backbone = Ruined(nn.Linear(4, 6), nn.Linear(6, 3))
    weights = {name: value.detach() for name, value in backbone.named_parameters() if value.ndim > 1}
    unread = find_dead_channels(backbone, weights, [torch.randn(5, 4)])
    assert not any(mask.any() for mask in unread.values())


def test_checkpointed_layers_are_pruned(make_learner):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(72, 16), nn.Linear(16, 8)

        def forward(self, images):
            hidden = checkpoint(lambda x: self.first(x).relu(), images.flatten(1), use_reentrant=False)
            return self.second(hidden)

    learner = make_learner(Checkpointed())
    learner.learn(make_task(0))
    assert learner.network.density(0) < 1
