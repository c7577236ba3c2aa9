"""`python -m benchmarks`: run all, print the ratios, write them as JSON."""

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import cps
from benchmarks.core import growth, masked_step, memory, scoring
from cps.bench import describe_device, versions


def main() -> None:
    """Run the benchmarks on the best device there is, or on the one asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks.json"))
    arguments = parser.parse_args()
    fabric = cps.make_fabric(accelerator=arguments.accelerator)
    rows = [benchmark(fabric) for benchmark in (masked_step, scoring, memory, growth)]
    table = Table("what", "ours", "plain PyTorch", "ratio", "at most")
    for row in rows:
        table.add_row(row["what"], row["ours"], row["baseline"], f"{row['ratio']:.3f}", str(row["limit"] or ""))
    console = Console()
    console.print(table)
    results = {"device": describe_device(fabric), "versions": versions(), "results": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"Wrote {arguments.out} ({results['device']}, torch {torch.__version__})")


if __name__ == "__main__":
    main()
