"""Strangers: how well images of classes that no task has learned are told from those of learned ones."""

from typing import Any

import torch
from torch import Tensor

import cps
from cps.evaluation.metrics import auroc, false_positive_rate
from cps.network.outputs import Evidence
from cps.selection.base import select
from cps.selection.rejection import STEPS, rejection_score

REJECT = (0.01, 0.05, 0.1, 0.2)


def told_apart(learner: cps.Learner, selector: cps.Selector, evidence: Evidence, is_known: Tensor) -> dict[str, Any]:
    """Return what the first subnetworks, those that gave the evidence, make of images they know and do not know."""
    network, each = learner.network, torch.arange(len(is_known), device=is_known.device)
    tasks = select(selector, evidence, network.statistics(selector.name)[: len(evidence)], each).tasks
    familiar, is_known = rejection_score(network, evidence, tasks), is_known.cpu()
    known, strange = familiar[is_known], familiar[~is_known]
    rejected = {str(share): [percent(part < share * STEPS) for part in (known, strange)] for share in REJECT}
    print("AUROC", auroc(known, strange), "rejected", rejected, flush=True)
    return {
        "AUROC": auroc(known, strange),
        "FPR95": false_positive_rate(known, strange, 0.95),
        "rejected (known, strangers)": rejected,
    }


def percent(are_so: Tensor) -> float:
    """Return how many in a hundred are so."""
    return 100 * float(are_so.double().mean())
