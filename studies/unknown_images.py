"""Unknown images (open set): how well images of classes that no task has learned are rejected."""

from typing import Any

import torch
from torch import Tensor

import cps
from cps.evaluation.metrics import auroc, false_positive_rate
from cps.network.outputs import Evidence
from cps.selection.predict import select
from cps.selection.rejection import STEPS, rejection_score
from studies.measurement import percent

REJECT = (0.01, 0.05, 0.1, 0.2)


def measure_rejection(
    learner: cps.Learner, selector: cps.Selector, evidence: Evidence, is_known: Tensor
) -> dict[str, Any]:
    """Measure how the subnetworks that gave the evidence reject images they have not learned (`is_known` is False)."""
    network, groups = learner.network, torch.arange(len(is_known), device=is_known.device)
    tasks = select(selector, evidence, network.statistics(selector.name)[: len(evidence)], groups).tasks
    scores, is_known = rejection_score(network, evidence, tasks, selector), is_known.cpu()
    known, unknown = scores[is_known], scores[~is_known]
    rejected = {str(share): [percent(part < share * STEPS) for part in (known, unknown)] for share in REJECT}
    print("AUROC", auroc(known, unknown), "rejected", rejected, flush=True)
    return {
        "AUROC": auroc(known, unknown),
        "FPR95": false_positive_rate(known, unknown, 0.95),
        "rejected (known, strangers)": rejected,
    }
