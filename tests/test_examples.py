"""Every example runs as its docstring says, learns, and has noise in every pass of its training."""

import os
import re
import sys
from pathlib import Path

import pytest

import gloo
from watched import WATCHED, passes

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

SCHEDULE_BEGINS_AT_ZERO = {"amp_accumulation_clipping": 4, "vit_digits": 5}  # layers' calls in the first step


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    launcher, ranks = [sys.executable], 1
    if "torchrun" in example.read_text().split('"""')[1]:
        launcher, ranks = [*launcher, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = gloo.run([*launcher, WATCHED, example], timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"test accuracy (\d\.\d+)", done.stdout)
    assert accuracy is not None, done.stdout
    assert float(accuracy.group(1)) > 0.85
    assert len(passes(done.stdout)) == ranks, done.stdout
    for noisy, clean in passes(done.stdout):
        assert noisy > 100
        assert clean == SCHEDULE_BEGINS_AT_ZERO.get(example.stem, 0)
