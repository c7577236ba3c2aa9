"""`python -m benchmarks.serving`: how many images per second a server predicts, and what happens under more load."""

import argparse
import asyncio
import io
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

import cps
from cps.runtime.environment import describe_device, versions
from cps.storage.atomic import write_json

TASKS, SIZE = 5, 32
CLIENTS = (1, 4, 8, 16, 64)


def make_model(path: Path) -> None:
    """Write a ResNet-18(1/3) with a few tasks; what it has learned does not matter here."""
    draws = torch.Generator().manual_seed(0)
    quick = cps.Training(1, batch_size=16)
    learner = cps.Learner(cps.Architecture("resnet18-third"), rounds=1, train=quick, retrain=quick)
    for task in range(TASKS):
        names = [f"{task}a", f"{task}b"]
        learner.learn(cps.Task(names, train=(torch.rand(32, 3, SIZE, SIZE, generator=draws), names * 16)))
    learner.save(path)


@contextmanager
def served(path: Path) -> Iterator[str]:
    """Serve a model in another process, as the command line does, and yield its address."""
    command = [sys.executable, "-m", "cps", "serve", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found, "the server did not start"
    try:
        yield found[0]
    finally:
        process.terminate()
        process.wait(30)


async def load(address: str, image: bytes, clients: int, seconds: float) -> dict[str, Any]:
    """Let a number of clients send one image after another, and return their statistics."""
    end = time.perf_counter() + seconds
    seconds_taken: list[float] = []
    statuses: list[int] = []

    async def send() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while (start := time.perf_counter()) < end:
                reply = await client.post(f"{address}/predict", files={"images": ("image.jpg", image)})
                statuses.append(reply.status_code)
                if reply.status_code == 200:
                    seconds_taken.append(time.perf_counter() - start)
                else:
                    await asyncio.sleep(float(reply.headers["retry-after"]))

    await asyncio.gather(*(send() for _ in range(clients)))
    assert set(statuses) <= {200, 503}, statuses
    return {
        "clients": clients,
        "answered": statuses.count(200),
        "told_to_come_back": statuses.count(503),
        "per_second": len(seconds_taken) / seconds,
        "median_ms": 1000 * statistics.median(seconds_taken),
        "p95_ms": 1000 * statistics.quantiles(seconds_taken, n=20)[-1],
    }


def main() -> None:
    """Run the load test and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration for each number of clients")
    parser.add_argument("--out", type=Path, default=Path("runs/serving.json"))
    arguments = parser.parse_args()
    image = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((640, 480)).save(image, "JPEG")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.cps"
        make_model(path)
        with served(path) as address:
            asyncio.run(load(address, image.getvalue(), 2, 1.0))  # warm-up
            rows = [asyncio.run(load(address, image.getvalue(), number, arguments.seconds)) for number in CLIENTS]
    results = {
        "device": describe_device(cps.make_fabric(accelerator="cpu")),
        "versions": versions(),
        "model": f"ResNet-18(1/3), {TASKS} tasks, {SIZE} x {SIZE} pixels; JPEG files of 640 x 480",
        "seconds": arguments.seconds,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, results)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
