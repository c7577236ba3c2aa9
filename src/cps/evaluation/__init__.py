"""Accuracy matrices and metrics."""

from cps.evaluation import metrics as metrics  # so that `cps.metrics` needs no other import
