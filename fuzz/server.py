"""Fuzz the server: `python -m fuzz.server --examples 400`.

`schemathesis` derives requests from the OpenAPI document of `cps serve` and checks the answers, all but that random
bytes are taken for images.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.serving import make_model, served

import cps
from cps.runtime.environment import describe_device, versions
from cps.storage.container import write_json

OPTIONS = ("--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-color")


def ask(address: str, *options: str, folder: Path) -> tuple[int, int, str]:
    """Return how many requests were made of the server, how many answers passed, and all that was said."""
    fuzzer = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert fuzzer, "schemathesis is not installed: pip install -e '.[dev]'"
    command = [fuzzer, "run", f"{address}/openapi.json", *OPTIONS, *options]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+) generated, (\d+) passed", said)
    return (int(found[1]), int(found[2]), said) if found else (0, 0, said)


def main() -> None:
    """Ask a served model as often as the command line says, and tell what came of it."""
    parser = argparse.ArgumentParser(description="Fuzz the server.")
    parser.add_argument("--examples", type=int, default=100, help="of requests, at most, for each path and phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file to write the counts to")
    asked = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model.cps"
        make_model(model)
        with served(model) as address:
            options = ("--max-examples", str(asked.examples), "--seed", str(asked.seed))
            made, passed, said = ask(address, *options, folder=Path(place))
    print(said)
    if asked.out is not None:
        results = {
            "device": describe_device(cps.make_fabric(accelerator="cpu")),
            "versions": versions() | {"schemathesis": version("schemathesis")},
            "examples": asked.examples,
            "seed": asked.seed,
            "minutes": (time.perf_counter() - began) / 60,
            "requests": made,
            "passed": passed,
        }
        write_json(asked.out, results)
    sys.exit(not 0 < made == passed)


if __name__ == "__main__":
    main()
