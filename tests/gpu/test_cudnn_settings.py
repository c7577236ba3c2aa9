"""The settings of cuDNN that learning, predicting and fingerprints need; these matter only on a GPU."""

import pytest
import torch
from torch import nn

from cps.network.backbone_checks import check_forward
from samples import make_task


class Recorder(nn.Module):
    """Records settings of torch in each forward pass."""

    def __init__(self, settings):
        super().__init__()
        self.layer, self.settings, self.seen = nn.Linear(72, 4), settings, []

    def forward(self, images):
        self.seen.append(self.settings())
        return self.layer(images.flatten(1))


def test_learning_and_predicting_never_search_for_the_fastest_kernels(make_learner, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    learner = make_learner(Recorder(lambda: torch.backends.cudnn.benchmark))
    learner.learn(make_task(0))
    learner.predict(make_task(0).test[0])
    assert set(learner.network.backbone.seen) == {False}
    assert torch.backends.cudnn.benchmark


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9 has other settings")
def test_fingerprints_are_computed_in_full_precision(make_learner):
    learner = make_learner(Recorder(lambda: torch.backends.cudnn.conv.fp32_precision))
    learner.learn(make_task(0))
    learner.network.backbone.seen.clear()
    learner.fingerprint(0)
    assert set(learner.network.backbone.seen) == {"ieee"}


def test_the_check_forward_of_a_backbone_is_deterministic():
    backbone = Recorder(lambda: torch.backends.cudnn.deterministic)
    check_forward(backbone, ["layer.weight"], make_task(0).train[0][:2])
    assert set(backbone.seen) == {True}
    assert not torch.backends.cudnn.deterministic
