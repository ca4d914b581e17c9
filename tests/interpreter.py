"""Where kernels are tested: on CUDA, or on a CPU in Triton's interpreter.

Triton decides when it is imported whether it interprets, so tests of kernels run once more in a process of their own.
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernels = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="neither CUDA nor the interpreter here")
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
outside_the_interpreter = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")


def python(*arguments, **environment):
    """What a process of its own prints; it must end well."""
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def passes_in_the_interpreter(*files):
    """Run test files there, all but tests of CUDA and of what importing does."""
    pytest.importorskip("triton", reason="Triton is not installed; it interprets on a CPU too: pip install triton")
    chosen = ("-m", "not gpu", "-k", "not importing")
    said = python("-m", "pytest", *map(str, files), *chosen, TRITON_INTERPRET="1", SMOOTHOUT_KERNELS="fused")
    assert " passed" in said
