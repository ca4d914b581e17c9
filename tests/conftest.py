import signal

import pytest
import torch

from two_processes import TwoProcesses

torch.set_num_threads(1)  # two workers on two cores; also the same bits everywhere
torch.backends.cudnn.allow_tf32 = False  # what kernels are compared with is exact
# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them press.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take longest begin first, so that no worker is alone with one at the end.
LONGEST_FIRST = (
    *("test_documentation", "test_kernels", "test_examples", "test_demo", "test_processes", "test_interruption"),
    *("test_lightning_processes", "test_text_examples", "test_ghost_conv", "test_runner", "test_whole_step"),
)


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(scope="module")
def in_two_processes():
    pool = TwoProcesses()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
