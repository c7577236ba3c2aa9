"""`python -m studies.rivals --data DIR [NAMES]`: run the comparisons of methods that the documentation shows.

Each is one call of `cps compare`, which resumes. Without names, those that need a GPU run. `--minutes` ends the whole
call in time, and the same call goes on later. Compact results of finished comparisons go to benchmarks/results, and
`python -m studies.tables` makes the tables from them.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import RESULTS

from cps.experiments.comparison import Comparison, merge_comparisons, read_comparison
from cps.experiments.comparison_tables import accuracy_table, cost_table
from cps.storage.json_codec import to_json
from studies.published import describe_machine, markdown, write_compact

SECONDS_TO_STOP = 60.0  # that a comparison has after Ctrl-C
B50 = "cps,icarl,lucir,podnet-cnn,podnet-nme,afc"
MAIN = "cps,finetuning,joint,er,icarl,wa,bic,lucir,der,packnet"  # the ten main methods
BEHIND_TRUNK = "cps,icarl,itaml"


@dataclass(frozen=True)
class Job:
    """A comparison: the recipe, and the options of `cps compare`. `folder` is that of its data in the data folder."""

    recipe: str
    methods: str
    orders: str
    options: str = ""
    folder: str = ""


GPU_JOBS = {
    "b50-own": Job("cifar100-b50", B50, "3", "--budget own --memory-per-class 20"),
    "b50-own-podnet-orders": Job(
        "cifar100-b50", B50, "podnet-1,podnet-2,podnet-3", "--budget own --memory-per-class 20"
    ),
    "b50": Job("cifar100-b50", B50, "3", "--memory-per-class 20"),
    "b50-frozen": Job("cifar100-b50-frozen", "cps", "3", "--memory-per-class 20"),
    "cifar100-10-own": Job("cifar100-10", "cps,itaml,icarl", "3", "--budget own --memory 2000"),
    "cifar100-20-own": Job("cifar100-20", "cps,itaml,icarl", "3", "--budget own --memory 2000"),
    "cifar100-5-own": Job("cifar100-5", "cps,itaml,icarl", "3", "--budget own --memory 2000"),
    "cifar100-10": Job("cifar100-10", "all", "1", "--memory 2000"),
    "cub200-1000": Job("cub200", "cps,itaml,icarl", "identity", "--budget own --memory 1000", "cub200"),
    "cub200-2000": Job("cub200", "cps,itaml,icarl", "identity", "--budget own --memory 2000", "cub200"),
    "imagenet100": Job("imagenet100", "cps,itaml,icarl,der", "1", "--memory 2000", "imagenet"),
}
CPU_JOBS = {
    "digits": Job("digits", "all", "10", "--memory 100"),
    "small": Job("cifar100-10-small", "all", "1", "--memory 2000"),
    "small-main": Job("cifar100-10-small", MAIN, "3", "--memory 2000"),
    "cub200-trunk-1000": Job("cub200-trunk", BEHIND_TRUNK, "identity", "--memory 1000", "cub200"),
    "cub200-trunk-2000": Job("cub200-trunk", BEHIND_TRUNK, "identity", "--memory 2000", "cub200"),
}
JOBS = {**GPU_JOBS, **CPU_JOBS}


def main() -> None:
    """Run the given comparisons, or those that need a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"comparisons, from: {', '.join(JOBS)}; default: {', '.join(GPU_JOBS)}"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--weights", type=Path, help="file of pretrained weights, for CUB-200")
    parser.add_argument("--out", type=Path, default=Path("runs/rivals"), help="folder of the comparisons")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the compact results")
    parser.add_argument("--minutes", type=float, help="the time for all comparisons together")
    parser.add_argument("--more", default="", help="further options of `cps compare`")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in JOBS:
            parser.error(f"unknown comparison '{name}'; choose from: {', '.join(JOBS)}")
    end = float("inf") if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    left = [name for name in arguments.names or GPU_JOBS if not _run(name, arguments, end)]
    if left:
        sys.exit(f"not finished: {', '.join(left)}; run the same command again to resume")


def command_of(name: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a comparison."""
    job = JOBS[name]
    command = [sys.executable, "-m", "cps", "compare", job.recipe, "--methods", job.methods, "--orders", job.orders]
    command += [*job.options.split(), "--out", str(arguments.out / name)]
    if job.recipe != "digits":
        command += ["--data", str(arguments.data / job.folder)]
    if job.recipe.startswith("cub200") and arguments.weights is not None:
        command += ["--weights", str(arguments.weights)]
    return [*command, *arguments.more.split()]


def _run(name: str, arguments: argparse.Namespace, end: float) -> bool:
    """Run or resume a comparison until the end of the time; return True if it has finished."""
    if time.monotonic() >= end:
        return False
    start = time.monotonic()
    process = subprocess.Popen(command_of(name, arguments), env=os.environ)
    try:
        process.wait(timeout=None if end == float("inf") else end - start)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"{name}: {time.monotonic() - start:.0f} s, exit status {process.returncode}", flush=True)
    if process.returncode == 0:
        publish(name, read_comparison(arguments.out / name / "results.json"), arguments.results)
    return process.returncode == 0


def publish(name: str, comparison: Comparison, folder: Path) -> None:
    """Write the compact results of a comparison, without the accuracy of selection."""
    results = []
    for each in comparison.results:
        class_il = {
            selector: {size: replace(metrics, selection=None) for size, metrics in by_size.items()}
            for selector, by_size in each.class_il.items()
        }
        results.append(replace(each, class_il=class_il))
    folder.mkdir(parents=True, exist_ok=True)
    write_compact(folder / f"compare-{name}.json", to_json(replace(comparison, results=tuple(results))))


def published_comparison(*names: str) -> Comparison | None:
    """Return the published comparisons of these names as one; None if none of them was measured."""
    paths = [RESULTS / f"compare-{name}.json" for name in names]
    merged = merge_comparisons([read_comparison(path) for path in paths if path.exists()])
    assert len(merged) <= 1, f"{names} must be comparisons of one recipe with one budget"
    return merged[0] if merged else None


def comparison_table(*names: str) -> str:
    """Return the table of published comparisons: accuracy, cost and assumptions of each method."""
    comparison = published_comparison(*names)
    if comparison is None:
        return "Not measured yet."
    head, rows = accuracy_table(comparison)
    costs = {row[0]: row[1:] for row in cost_table(comparison)[1]}
    *cost_head, assumes = cost_table(comparison)[0][1:]
    rows = [[*row, *costs[row[0].split(", ")[0]]] for row in rows]
    machines = {describe_machine(each.device, each.versions) for each in comparison.results}
    budget = f"{comparison.passes} image passes for every task" if comparison.passes else "each method as published"
    note = f"Accuracy in %, mean and standard deviation over class orders; training: {budget}; memory: "
    note += f"{comparison.memory or 'as published'}; {' and '.join(sorted(machines))}."
    return markdown([*head, *cost_head, assumes], rows, note)


if __name__ == "__main__":
    main()
