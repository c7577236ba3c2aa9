"""Speed and memory, as ratios against plain PyTorch measured in the same run."""
