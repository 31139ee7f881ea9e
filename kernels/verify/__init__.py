"""Checks and timings of the kernels on a GPU: `python -m longhaul.kernels.verify`."""
