"""Methods whose network grows with every task."""
