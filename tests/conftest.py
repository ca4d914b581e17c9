import pytest
import torch

torch.set_num_threads(1)  # two workers on two cores; also the same bits everywhere


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
