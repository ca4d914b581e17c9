"""C1 and C3, the shallow convolutional networks of the CIFAR-10 and CIFAR-100 experiments."""

from torch import Tensor, nn

from smoothout.lab.models.image_conv import image_conv
from smoothout.lab.models.norm_relu import has_hooks, norm_relu
from smoothout.lab.models.pooling import MaxPool


class Convolutions(nn.Sequential):
    """Layers one after another: images' own convolution, and BatchNorm with the ReLU behind it, where kernels are."""

    def forward(self, input: Tensor) -> Tensor:
        x, layers = input, list(self)
        while layers:
            layer = layers.pop(0)
            if isinstance(layer, nn.BatchNorm2d) and layers and type(layers[0]) is nn.ReLU and not has_hooks(layers[0]):
                x = norm_relu(layer, x)
                layers.pop(0)
            elif isinstance(layer, nn.Conv2d):
                x = image_conv(layer, x)
            else:
                x = layer(x)
        return x


class Shallow(nn.Module):
    """Two convolutions of 64 filters of 5 × 5, then 384 and 192 hidden units with dropout ½.

    Each convolution is followed by max-pooling (3 × 3, stride 2), BatchNorm and ReLU, in this order; the layers before
    a BatchNorm have no bias. Initialisation: PyTorch's default; the sources say nothing else.
    """

    def __init__(self, classes: int, input_shape: tuple[int, ...], dropout: float = 0.5) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.features = Convolutions(*_convolution(channels, 64), *_convolution(64, 64))
        inputs = 64 * _pooled(_pooled(height)) * _pooled(_pooled(width))
        self.hidden = nn.Sequential(*_fully_connected(inputs, 384, dropout), *_fully_connected(384, 192, dropout))
        self.classifier = nn.Linear(192, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.hidden(self.features(x).flatten(1)))


def c1(classes: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), dropout: float = 0.5) -> Shallow:
    """C1, for CIFAR-10: 1,388,490 parameters."""
    return Shallow(classes, input_shape, dropout)


def c3(classes: int = 100, input_shape: tuple[int, ...] = (3, 32, 32), dropout: float = 0.5) -> Shallow:
    """C3, for CIFAR-100: C1 with 100 outputs, 1,405,860 parameters."""
    return Shallow(classes, input_shape, dropout)


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, kernel_size=5, padding=2, bias=False),
        MaxPool(kernel_size=3, stride=2),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def _fully_connected(inputs: int, outputs: int, dropout: float) -> tuple[nn.Module, ...]:
    return (
        nn.Linear(inputs, outputs, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
    )


def _pooled(length: int) -> int:
    return (length - 3) // 2 + 1
