"""Train with several processes or GPUs: `torchrun --nproc-per-node 2 several_processes.py`.

Started with `python`, the same code runs in one process.
"""

import os
import sys

import torch

import cps

processes = int(os.environ.get("WORLD_SIZE", "1"))
fabric = cps.make_fabric(devices=processes)

torch.manual_seed(0)
training = cps.Training(1 if "--quick" in sys.argv else 5, batch_size=64)
learner = cps.Learner(cps.SmallConvNet(3), rounds=1, train=training, retrain=training, fabric=fabric)
for index in range(2):
    images = torch.rand(256, 3, 16, 16, generator=torch.Generator().manual_seed(index))
    learner.learn(cps.Task([2 * index, 2 * index + 1], train=(images, [2 * index, 2 * index + 1] * 128)))
print(f"process {fabric.global_rank} of {fabric.world_size}: {learner.fingerprint(0).tensors[:16]}")
