"""Runs a script, and says which of its training passes were under noise: `python watched.py SCRIPT`."""

import re
import runpy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

WATCHED = Path(__file__)


def passes(printed):
    """For each process those of linear layers under noise, and without."""
    found = re.findall(r"^(\d+) training passes under noise, (\d+) without$", printed, re.MULTILINE)
    return [(int(noisy), int(clean)) for noisy, clean in found]


def main(script):
    from smoothout import perturb

    counts = {True: 0, False: 0}

    def count(module, args):
        if isinstance(module, nn.Linear) and module.training and torch.is_grad_enabled():
            counts[any(each.noisy for each in perturb._applied)] += 1

    register_module_forward_pre_hook(count)
    runpy.run_path(script, run_name="__main__")
    sys.stdout.write(f"\n{counts[True]} training passes under noise, {counts[False]} without\n")  # ranks share a pipe
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
