"""Stands in for the Triton kernels, which an exported model neither carries nor chooses."""
