"""Cached compact networks give the outputs of the full backbone."""

import torch

from cps.network.compact.parallel_inference import ParallelInference
from cps.network.outputs import Outputs
from cps.runtime.devices import full_precision
from samples import ACCELERATOR, make_task, use_all_compact

TOLERANCE = 1e-4 if ACCELERATOR == "cpu" else 3e-3  # a GPU rounds the inputs of convolutions


def test_compact_outputs_match_the_full_backbone_and_keep_their_bits_when_more_is_learned(learner, images):
    use_all_compact(learner)
    with full_precision():
        fast = learner.network.outputs([images], [0])[0]
        slow = learner.network.full_outputs([images], 0)
    torch.testing.assert_close(fast.features, slow.features, rtol=1e-3, atol=TOLERANCE)

    def recompute():
        learner.network.clear_compact()
        use_all_compact(learner)
        with full_precision():
            return learner.network.outputs([images], [0])[0].logits

    learner.learn(make_task(20, shape=(2, 8, 8)))
    assert torch.equal(recompute(), fast.logits)
    for weight in learner.network.weights.values():  # the negative control
        weight.mul_(1.01)
    assert not torch.equal(recompute(), fast.logits)


def test_features_that_overflow_in_half_precision_are_computed_by_the_full_backbone(learner, images, monkeypatch):
    use_all_compact(learner)
    full = learner.network.full_outputs([images], 1)
    overflowed = Outputs(torch.full_like(full.features, float("inf")), full.logits)
    monkeypatch.setattr(ParallelInference, "__call__", lambda self, pixels: [full, overflowed])
    assert torch.equal(learner.network.outputs([images], [0, 1])[1].features, full.features)
