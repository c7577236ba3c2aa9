"""`python -m benchmarks`: run all, print the ratios, write them as JSON."""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import cps
from benchmarks import growth
from benchmarks.looking import choosing, looking
from benchmarks.selecting import selecting
from benchmarks.training import masked_step, memory, scoring
from cps.runtime.environment import describe_device, versions
from cps.storage.container import write_json


def main() -> None:
    """Run the benchmarks on the best device there is, or on the one asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks.json"))
    arguments = parser.parse_args()
    fabric = cps.make_fabric(accelerator=arguments.accelerator)
    console = Console()
    began = time.monotonic()
    with console.status("growth ..."):  # first, while the memory is nobody else's
        grown = growth.growth(fabric)
    rows = []
    for benchmark in (masked_step, scoring, memory, selecting, looking, choosing):
        with console.status(f"{benchmark.__name__.replace('_', ' ')} ..."):
            rows += benchmark(fabric)
    rows += growth.rows(grown)
    table = Table("what", "ours", "against", "ratio", "at most")
    for row in rows:
        table.add_row(row["what"], row["ours"], row["baseline"], f"{row['ratio']:.3f}", str(row["limit"] or ""))
    console.print(table)
    results = {
        "device": describe_device(fabric),
        "versions": versions(),
        "seconds": time.monotonic() - began,
        "results": rows,
        "growth": grown,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, results)
    where = f"{results['device']}, torch {torch.__version__}, {results['seconds']:.0f} s"
    console.print(f"Wrote {arguments.out} ({where})")


if __name__ == "__main__":
    main()
