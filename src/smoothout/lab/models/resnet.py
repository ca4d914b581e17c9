"""Residual networks of basic blocks: ResNet-(6n+2) for CIFAR, and ResNet18 for ImageNet."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from smoothout.lab.models.norm_relu import norm_relu
from smoothout.lab.models.pooling import MaxPool


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut, which is a 1 × 1 convolution with BatchNorm where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = norm_relu(self.bn1, self.conv1(x))
        return norm_relu(self.bn2, self.conv2(inner), self.shortcut(x))


class Stem(nn.Sequential):
    """A convolution, BatchNorm, ReLU (which is not listed), and what else is given."""

    def forward(self, input: Tensor) -> Tensor:
        convolution, norm, *others = self
        x = norm_relu(cast(nn.BatchNorm2d, norm), convolution(input))
        for layer in others:
            x = layer(x)
        return x


class ResNet(nn.Module):
    """A stem, stages of basic blocks (each but the first halves the image), average pooling, one linear layer.

    Initialisation: convolutions N(0, √(2/(k²·outputs))); BatchNorm 1 and 0 and the linear layer as PyTorch's default.

    Args:
        stem: from the image to `widths[0]` channels.
        widths: channels of each stage.
        blocks: how many blocks a stage has.
    """

    def __init__(self, stem: nn.Module, widths: Sequence[int], blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = stem
        stages: list[nn.Module] = []
        before = widths[0]
        for number, width in enumerate(widths):
            first = BasicBlock(before, width, stride=1 if number == 0 else 2)
            stages.append(nn.Sequential(first, *(BasicBlock(width, width, stride=1) for _ in range(blocks - 1))))
            before = width
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0, math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels)))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.stages(self.stem(x))).flatten(1))


class Walk(ABC):
    """A ResNet's forward pass where its layers are not called, but done in another way."""

    def __init__(self, model: ResNet) -> None:
        self._model = model

    def __call__(self, images: Tensor) -> Tensor:
        convolution, norm, *others = cast(Stem, self._model.stem)
        x = self._layer(cast(nn.Conv2d, convolution), cast(nn.BatchNorm2d, norm), images)
        for layer in others:
            x = layer(x)
        for stage in self._model.stages:
            for block in cast(nn.Sequential, stage):
                x = self._block(cast(BasicBlock, block), x)
        return self._last(self._model.classifier, self._model.pool(x).flatten(1))

    def _block(self, block: BasicBlock, x: Tensor) -> Tensor:
        return self._second_half(block, self._layer(block.conv1, block.bn1, x), x)

    def _second_half(self, block: BasicBlock, inner: Tensor, shortcut: Tensor) -> Tensor:
        if isinstance(block.shortcut, nn.Sequential):
            convolution, norm = block.shortcut
            shortcut = self._layer(cast(nn.Conv2d, convolution), cast(nn.BatchNorm2d, norm), shortcut, relu=False)
        return self._layer(block.conv2, block.bn2, inner, shortcut)

    @abstractmethod
    def _layer(
        self, layer: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None, relu: bool = True
    ) -> Tensor:
        """A convolution, its BatchNorm, what is added, and the ReLU."""

    @abstractmethod
    def _last(self, layer: nn.Linear, x: Tensor) -> Tensor: ...


def cifar_resnet(depth: int, classes: int = 10, input_shape: tuple[int, ...] = (3, 32, 32)) -> ResNet:
    """ResNet of depth 6n + 2 on small images: 3 × 3 stem, three stages of n blocks of 16, 32 and 64 channels.

    ResNet44 has 661,338 parameters at 10 classes and 667,188 at 100.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"depth={depth}: a CIFAR ResNet has a depth of 6n + 2, such as 20, 32, 44, 56 or 110")
    stem = Stem(nn.Conv2d(input_shape[0], 16, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(16))
    return ResNet(stem, (16, 32, 64), blocks, classes)


def resnet18(classes: int = 1000, input_shape: tuple[int, ...] = (3, 224, 224)) -> ResNet:
    """The standard ResNet18: 7 × 7 stem, four stages of two blocks; 11,689,512 parameters at 1000 classes.

    Its convolutions take the same initialisation as the CIFAR networks: it is the standard one ("fan out").
    """
    stem = Stem(
        nn.Conv2d(input_shape[0], 64, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        MaxPool(kernel_size=3, stride=2, padding=1),
    )
    return ResNet(stem, (64, 128, 256, 512), 2, classes)
