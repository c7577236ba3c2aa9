"""`python -m benchmarks.predict_files`: how many images of a folder `cps predict` predicts per minute, one by one."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import cps
from benchmarks.serving import SIZE, TASKS, make_model
from cps.runtime.environment import describe_device, versions
from cps.storage.atomic import write_json


def make_images(folder: Path, number: int) -> None:
    """Write a number of PNG files of noise."""
    draws = np.random.default_rng(0)
    folder.mkdir()
    for index in range(number):
        Image.fromarray(draws.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(folder / f"{index}.png")


def predict(folder: Path, model: Path) -> tuple[float, float]:
    """Predict a folder with the command line; return the elapsed time and the CPU time in seconds."""
    cpu_start, start = _cpu_seconds(), time.perf_counter()
    command = [sys.executable, "-m", "cps", "predict", str(folder), "--model", str(model), "--json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == len(list(folder.iterdir())), "every image must have a line"
    return time.perf_counter() - start, _cpu_seconds() - cpu_start


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure the time without starting the program, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("runs/predict-files.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model, one, many = (Path(place) / name for name in ("model.cps", "one", "many"))
        make_model(model)
        make_images(one, 1)
        make_images(many, arguments.images + 1)
        start, total = predict(one, model), predict(many, model)
    seconds, cpu_seconds = (longer - shorter for longer, shorter in zip(total, start, strict=True))
    results = {
        "device": describe_device(cps.make_fabric(accelerator="cpu")),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "model": f"ResNet-18(1/3), {TASKS} tasks; PNG files of {SIZE} x {SIZE} pixels",
        "images": arguments.images,
        "per_minute": 60 * arguments.images / seconds,
        "core_ms_per_image": 1000 * cpu_seconds / arguments.images,
        "start_seconds": start[0],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
