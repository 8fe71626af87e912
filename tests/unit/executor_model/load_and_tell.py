"""Run by a test, in a process of its own: reads all parameters of the file in argv[1] in bfloat16, keeps none,
and prints whether the gguf library was imported and how many MiB of memory stayed."""

import sys
from pathlib import Path

import torch

from quartet.services.executor.weights.gguf_file import GGUFFile


def private_mebibytes() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Private_Dirty")


torch.set_num_threads(1)
# Code is not weights: what a read imports and allocates once is there before the first look.
torch.empty(1).bfloat16()
before = private_mebibytes()
source = GGUFFile(Path(sys.argv[1]))
for name in source.shapes:
    source.read(name, torch.bfloat16)
print("gguf" in sys.modules, private_mebibytes() - before)
