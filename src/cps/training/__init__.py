"""Train a subnetwork: the loop, its steps, losses, settings and checkpoints."""
