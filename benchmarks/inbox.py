"""`python -m benchmarks.inbox`: how many images of a folder `cps predict` names in a minute, one by one."""

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
from cps.storage.container import write_json


def make_images(folder: Path, number: int) -> None:
    """Write so many PNG files of noise."""
    draws = np.random.default_rng(0)
    folder.mkdir()
    for index in range(number):
        Image.fromarray(draws.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(folder / f"{index}.png")


def predict(folder: Path, model: Path) -> tuple[float, float]:
    """Predict a folder as the command line does; return the seconds it took, and those of a core."""
    used, began = _core_seconds(), time.perf_counter()
    command = [sys.executable, "-m", "cps", "predict", str(folder), "--model", str(model), "--json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == len(list(folder.iterdir())), "an image has no line"
    return time.perf_counter() - began, _core_seconds() - used


def _core_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure it, without the time that starting takes, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("runs/inbox.json"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model, one, many = (Path(place) / name for name in ("model.cps", "one", "many"))
        make_model(model)
        make_images(one, 1)
        make_images(many, asked.images + 1)
        start, whole = predict(one, model), predict(many, model)
    seconds, of_a_core = (longer - shorter for longer, shorter in zip(whole, start, strict=True))
    results = {
        "device": describe_device(cps.make_fabric(accelerator="cpu")),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "model": f"ResNet-18(1/3), {TASKS} tasks; PNG files of {SIZE} x {SIZE} pixels",
        "images": asked.images,
        "per_minute": 60 * asked.images / seconds,
        "core_ms_per_image": 1000 * of_a_core / asked.images,
        "start_seconds": start[0],
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(asked.out, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
