"""Devices, seeding, locks, CUDA graphs and text formatting. Imports no other room."""
