"""Benchmarks of speed and memory, as ratios to plain PyTorch measured in the same run."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"  # the published JSON files
