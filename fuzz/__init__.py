"""Fuzzing: files made to break what reads them. Not part of the package."""
