"""Accuracy matrices and metrics."""
