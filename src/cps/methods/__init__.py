"""Other continual-learning methods, for comparison."""
