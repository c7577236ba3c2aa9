"""Other continual-learning methods, to compare with."""
