"""Learn two tasks as one of several processes, and write the state of this rank; run by test_distributed.py."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import cps.training.trainer
from samples import conv_net, make_task


class RandomPruner:
    """A pruner that switches off different connections in each process."""

    def __init__(self, rank: int):
        self.draws = torch.Generator().manual_seed(rank)

    def __call__(self, backbone, masks, batches):
        return {name: mask & (torch.rand(mask.shape, generator=self.draws) < 0.7) for name, mask in masks.items()}


def error_of(save, path: Path) -> str:
    try:
        save(path)
    except Exception as error:
        return type(error).__name__
    return ""


def main(folder: Path, devices: int, network: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    backbone = plain if network == "plain" else conv_net()
    training = cps.Training(3, cps.Adam(1e-2), cps.Cosine(), batch_size=8)
    if network == "no averaging":  # the negative control
        cps.training.trainer.average_buffers = lambda model, fabric: None
    fabric = cps.make_fabric(accelerator="cpu", devices=devices, precision="32-true" if network == "plain" else None)
    pruner = RandomPruner(fabric.global_rank) if network == "norms" else cps.NNrelief()
    learner = cps.Learner(backbone, pruner=pruner, rounds=1, train=training, retrain=training, fabric=fabric)
    tasks = [make_task(first, images=29) for first in (0, 10)]
    first = []
    for task in tasks:
        learner.learn(task, checkpoint=folder / "checkpoint.safetensors")
        first.append(learner.fingerprint(0))
    batch_sizes = []
    outputs = learner.network.outputs
    learner.network.outputs = lambda batches, asked, features: (
        batch_sizes.append(sum(map(len, batches))) or outputs(batches, asked, features)
    )
    results = cps.evaluate(learner, tasks, group_sizes=[1, 5], flips=True)
    report = {
        "first task": first,
        "results": results.encode(),
        "num_forwarded": sum(batch_sizes),
        "error": error_of(learner.save, Path(__file__) / "no folder" / "model.cps"),
        "images": sum(len(task.test[1]) for task in tasks),
    }
    behind = cps.Learner(
        conv_net(), trunk="2", map_copies=2, augment=cps.PadCrop(1), rounds=1, train=training, retrain=training,
        fabric=fabric,
    )  # fmt: skip
    behind.learn(tasks[0])
    report["behind a trunk"] = behind.evidence(tasks[0].test[0])[0].logits.tolist()
    (folder / f"{devices}-{fabric.global_rank}.json").write_text(json.dumps(report))
    state = {
        "weights": learner.network.weights,
        "taken": learner.network.taken,
        "subnetworks": [(s.masks, s.private, s.head, s.statistics) for s in learner.network.subnetworks],
    }
    torch.save(state, folder / f"{devices}-{fabric.global_rank}.pt")
    learner.save(folder / f"{devices}.cps")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
