"""Fuzz the server: `python -m fuzz.server --examples 400`.

`schemathesis` generates requests from the OpenAPI document of `cps serve` and checks the replies. One check is off:
that random bytes are accepted as images.
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
from cps.storage.atomic import write_json

OPTIONS = ("--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-color")


def fuzz_server(address: str, *options: str, folder: Path) -> tuple[int, int, str]:
    """Run schemathesis in `folder`; return the number of requests, how many of them passed, and its output."""
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program, "schemathesis is not installed: pip install -e '.[dev]'"
    command = [program, "run", f"{address}/openapi.json", *OPTIONS, *options]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+) generated, (\d+) passed", output)
    return (int(found[1]), int(found[2]), output) if found else (0, 0, output)


def main() -> None:
    """Fuzz a served model, print the output of schemathesis, and exit with 1 unless every request passed."""
    parser = argparse.ArgumentParser(description="Fuzz the server.")
    parser.add_argument("--examples", type=int, default=100, help="maximum number of requests for each path and phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.cps"
        make_model(model)
        with served(model) as address:
            arguments = ("--max-examples", str(options.examples), "--seed", str(options.seed))
            requests, passed, output = fuzz_server(address, *arguments, folder=Path(folder))
    print(output)
    if options.out is not None:
        results = {
            "device": describe_device(cps.make_fabric(accelerator="cpu")),
            "versions": versions() | {"schemathesis": version("schemathesis")},
            "examples": options.examples,
            "seed": options.seed,
            "minutes": (time.perf_counter() - started) / 60,
            "requests": requests,
            "passed": passed,
        }
        write_json(options.out, results)
    sys.exit(not 0 < requests == passed)


if __name__ == "__main__":
    main()
