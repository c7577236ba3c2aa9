"""The training step at the speed of a GPU."""
