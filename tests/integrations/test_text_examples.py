"""The examples on text run under noise, as their docstrings say, and learn: characters drawn blindly cost six bits."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from watched import WATCHED, passes

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "text").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, WATCHED, example], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    bits = re.search(r"test bits per character (\d\.\d+) before, (\d\.\d+) after 120 steps", done.stdout)
    assert bits is not None, done.stdout
    before, after = map(float, bits.groups())
    assert before > 5.5
    assert after < 4
    ((noisy, clean),) = passes(done.stdout)
    assert noisy >= 120
    assert clean == (2 if example.stem == "transformers_gpt2" else 0)  # its schedule begins at 0: two micro-batches
