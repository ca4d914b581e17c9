import signal

import pytest
import torch

torch.set_num_threads(1)  # two workers on two cores; also the same bits everywhere
# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them press.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
