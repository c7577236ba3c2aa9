"""Experiments: recipes, runs, results, reports and plots."""
