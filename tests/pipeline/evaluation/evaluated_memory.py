"""Evaluates positions on a text in a process of its own; prints its peak memory before and after.

Arguments: the folder of a run, the text, the context.
"""

import resource
import sys

import torch

from longhaul.pipeline.cli import main
from longhaul.pipeline.generation.decoding import tokens_per_pass


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


folder, text, context = sys.argv[1:]
# Warm: what a first call loads and allocates for good is no memory of the context.
words = ("evaluate", folder, "--tasks", "positions", "--text", text, "--again", "--context")
assert main([*words, str(2 * tokens_per_pass(torch.device("cpu")))]) == 0
before = peak()
assert main([*words, context]) == 0
print("peak", before, peak())
