"""AlexNet with BatchNorm, as the ImageNet experiments use it."""

from torch import Tensor, nn

from smoothout.lab.models.pooling import MaxPool


class AlexNet(nn.Module):
    """Five convolutions and three linear layers, BatchNorm after all but the last; 61,110,184 parameters.

    A convolution's block is: convolution, max-pooling (3 × 3, stride 2; the 1st, 2nd and 5th), ReLU, BatchNorm. Layers
    before a BatchNorm have no bias. Initialisation: PyTorch's default; the sources say nothing else.

    Args:
        input_shape: 224 × 224 for the paper; at least 63 × 63. Other sizes change the first linear layer.
        dropout: after the hidden linear layers; 0 for the paper's rows.
    """

    def __init__(self, classes: int, input_shape: tuple[int, ...], dropout: float = 0.0) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.features = nn.Sequential(
            *_block(nn.Conv2d(channels, 64, kernel_size=11, stride=4, padding=2, bias=False), pool=True),
            *_block(nn.Conv2d(64, 192, kernel_size=5, padding=2, bias=False), pool=True),
            *_block(nn.Conv2d(192, 384, kernel_size=3, padding=1, bias=False), pool=False),
            *_block(nn.Conv2d(384, 256, kernel_size=3, padding=1, bias=False), pool=False),
            *_block(nn.Conv2d(256, 256, kernel_size=3, padding=1, bias=False), pool=True),
        )
        side_by_side = _side_after_features(height) * _side_after_features(width)
        self.hidden = nn.Sequential(*_hidden(256 * side_by_side, dropout), *_hidden(4096, dropout))
        self.classifier = nn.Linear(4096, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.hidden(self.features(x).flatten(1)))


def alexnet(classes: int = 1000, input_shape: tuple[int, ...] = (3, 224, 224), dropout: float = 0.0) -> AlexNet:
    """AlexNet on ImageNet: 61,110,184 parameters at 1000 classes."""
    return AlexNet(classes, input_shape, dropout)


def _block(convolution: nn.Conv2d, pool: bool) -> list[nn.Module]:
    pooling = [MaxPool(kernel_size=3, stride=2)] if pool else []
    return [convolution, *pooling, nn.ReLU(inplace=True), nn.BatchNorm2d(convolution.out_channels)]


def _hidden(inputs: int, dropout: float) -> list[nn.Module]:
    units: list[nn.Module] = [nn.Linear(inputs, 4096, bias=False), nn.BatchNorm1d(4096), nn.ReLU(inplace=True)]
    return [*units, nn.Dropout(dropout)] if dropout else units


def _side_after_features(side: int) -> int:
    side = (side + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    if side < 1:
        raise ValueError("input_shape: AlexNet needs images of at least 63 × 63")
    return side
