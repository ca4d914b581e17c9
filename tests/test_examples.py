"""Every example runs as its docstring says, and learns."""

import os
import re
import sys
from pathlib import Path

import pytest

import gloo

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    launcher = [sys.executable]
    if "torchrun" in example.read_text().split('"""')[1]:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = gloo.run([*launcher, example], timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"test accuracy (\d\.\d+)", done.stdout)
    assert accuracy is not None, done.stdout
    assert float(accuracy.group(1)) > 0.85
