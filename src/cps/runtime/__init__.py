"""Devices, seeds, locks and CUDA graphs: what the rest runs on."""
