"""`python -m benchmarks`: run all benchmarks, print the ratios and write them as JSON."""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import cps
from benchmarks import growth
from benchmarks.prediction import benchmark_prediction
from benchmarks.training import benchmark_memory, benchmark_pruning, benchmark_step
from benchmarks.views import benchmark_selectors, benchmark_views
from cps.runtime.environment import describe_device, versions
from cps.storage.atomic import write_json


def main() -> None:
    """Run the benchmarks on the best available device, or on the given one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="auto", help="cpu, cuda, mps or auto")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks.json"))
    arguments = parser.parse_args()
    fabric = cps.make_fabric(accelerator=arguments.accelerator)
    console = Console()
    start = time.monotonic()
    with console.status("growth ..."):  # first, while nothing else has allocated memory
        measured = growth.measure_growth(fabric)
    rows = []
    for benchmark in (
        benchmark_step,
        benchmark_pruning,
        benchmark_memory,
        benchmark_prediction,
        benchmark_views,
        benchmark_selectors,
    ):
        name = benchmark.__name__.removeprefix("benchmark_")
        with console.status(f"{name} ..."):
            rows += benchmark(fabric)
    rows += growth.make_rows(measured)
    table = Table("benchmark", "ours", "baseline", "ratio", "limit")
    for row in rows:
        table.add_row(row["what"], row["ours"], row["baseline"], f"{row['ratio']:.3f}", str(row["limit"] or ""))
    console.print(table)
    results = {
        "device": describe_device(fabric),
        "versions": versions(),
        "seconds": time.monotonic() - start,
        "results": rows,
        "growth": measured,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, results)
    machine = f"{results['device']}, torch {torch.__version__}, {results['seconds']:.0f} s"
    console.print(f"Wrote {arguments.out} ({machine})")


if __name__ == "__main__":
    main()
