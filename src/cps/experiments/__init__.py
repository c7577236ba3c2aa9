"""Recipes, runs, results and reports."""
