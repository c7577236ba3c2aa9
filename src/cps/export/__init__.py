"""Subnetworks for programs without cps."""
