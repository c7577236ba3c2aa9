"""Fuzzers for everything that reads input from outside. Not part of the package."""
