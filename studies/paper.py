"""`python -m studies.paper --data DIR`: run the published runs, of the paper's recipes and of those for single images.

`python -m studies.paper --digits` runs those of the digits, which take minutes on a CPU. The command can be interrupted
at any time: running it again resumes, and finished runs are not repeated. Compact results go to benchmarks/results, and
`python -m studies.tables` makes the tables from them.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks import RESULTS

from cps.experiments.results import read_results
from studies.published import write_compact

ORDERS = ("1993", "1605", "2022")
RUNS = [f"{recipe}:{order}" for recipe in ("cifar100-10", "cifar100-20", "cifar100-5") for order in ORDERS]
RUNS += [f"{recipe}:{order}" for recipe in ("cifar100-b50", "cifar100-b50-frozen") for order in ORDERS]
RUNS += ["cifar100-50:1993", "cub200:sorted"]
RUNS += [f"cifar100-{tasks}-single:{order}" for order in ORDERS for tasks in ("10", "20", "5", "b50")]
DIGITS = [f"digits:{order}" for order in range(10)]
RUNS_WITH_BOUNDS = {"cifar100-10:1993", *DIGITS}  # finetuning and joint training run, too


def main() -> None:
    """Run the given runs, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", default=RUNS, help="RECIPE:ORDER; the order is a seed or 'sorted'")
    parser.add_argument("--digits", action="store_true", help="all runs of the digits instead")
    parser.add_argument("--data", type=Path, help="folder of the data sets, which come with cps for the digits")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the compact results")
    parser.add_argument("--at-once", type=int, default=1, help="number of runs that share the machine")
    parser.add_argument("--more", default="", help="further options of `cps bench`")
    arguments = parser.parse_args()
    runs = DIGITS if arguments.digits else arguments.runs
    with ThreadPoolExecutor(arguments.at_once) as pool:
        done = list(pool.map(partial(_run, arguments), runs))
    failed = [run for run, is_done in zip(runs, done, strict=True) if not is_done]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(arguments: argparse.Namespace, run: str) -> bool:
    """Run `cps bench` unless it has finished before; return True if there are results."""
    recipe, order = run.split(":")
    folder = arguments.out / f"{recipe}-{order}"
    results = folder / "results.json"
    if not results.exists():
        start = time.monotonic()
        command = [sys.executable, "-m", "cps", "bench", recipe, "--out", str(folder)]
        command += [] if arguments.data is None else ["--data", str(arguments.data)]
        command += [] if order == "sorted" else ["--order", order]
        command += [] if recipe == "digits" or recipe.endswith("-single") else ["--flips"]
        command += ["--bounds" if run in RUNS_WITH_BOUNDS else "--no-bounds", *arguments.more.split()]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.at_once))}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | threads)
        print(f"{run}: {time.monotonic() - start:.0f} s\n{(done.stdout + done.stderr)[-1500:]}", flush=True)
    if results.exists():
        arguments.results.mkdir(parents=True, exist_ok=True)
        write_compact(arguments.results / f"{recipe}-{order}.json", read_results(results).encode())
    return results.exists()


if __name__ == "__main__":
    main()
