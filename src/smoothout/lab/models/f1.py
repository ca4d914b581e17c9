"""F1, the fully connected network of the MNIST experiments, and a small MLP for the embedded digits."""

import math

from torch import Tensor, nn


class FullyConnected(nn.Module):
    """inputs → (Linear, BatchNorm, ReLU) for every width → Linear. Images are flattened.

    Initialisation: PyTorch's default; the sources say nothing else.
    """

    def __init__(self, inputs: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip((inputs, *widths), widths):
            layers += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True)]
        self.hidden = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.hidden(x.flatten(1)))


def f1(classes: int = 10, input_shape: tuple[int, ...] = (1, 28, 28)) -> FullyConnected:
    """F1: five hidden layers of 512; 1,462,794 parameters at 784 inputs and 10 classes."""
    return FullyConnected(math.prod(input_shape), (512,) * 5, classes)


def mlp(classes: int = 10, input_shape: tuple[int, ...] = (1, 8, 8), width: int = 64, depth: int = 2) -> nn.Module:
    """A small network without BatchNorm, trained on the digits in seconds: `depth` × (Linear, ReLU) → Linear."""
    layers: list[nn.Module] = [nn.Flatten()]
    before = math.prod(input_shape)
    for _ in range(depth):
        layers += [nn.Linear(before, width), nn.ReLU(inplace=True)]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, classes))
