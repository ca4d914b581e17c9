"""All ghost batches of an update in one pass of a network that has as many sets of weights.

Where lanes make many small launches side by side, every layer here is one launch for all ghosts. It is for the ResNets
of this package; `why_not_stacked` says where it cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smoothout.lab.models.ghost_conv import ghost_conv, ghost_conv_and_around, is_plain, kernels, why_no_kernels
from smoothout.lab.models.norm_relu import has_hooks
from smoothout.lab.models.pooling import MaxPool
from smoothout.lab.models.resnet import BasicBlock, ResNet, Stem, Walk
from smoothout.lab.models.stacked_norm import stacked_norm
from smoothout.lab.train.lanes import Flat, Weights, by_dtype, running_norms, running_statistics

if TYPE_CHECKING:
    from smoothout.perturb import Perturbation

Statistics = tuple[Tensor, Tensor]  # means and unbiased variances, ghosts × channels


def why_not_stacked(model: nn.Module, draws: int | None, ghosts: int, sizes: Sequence[int]) -> str:
    """In words, why not all ghosts of a batch can be seen in one pass; empty if they can.

    Args:
        draws: of noise a step; None: one a ghost.
        ghosts: of a full batch.
        sizes: of this batch's ghosts.
    """
    if ghosts < 2 or (draws is not None and draws != 1):
        return "there is one ghost, or every ghost is seen several times"
    if len(sizes) != ghosts or len(set(sizes)) > 1:
        return "ghosts have several sizes"
    return why_no_stack(model)


def why_no_stack(model: nn.Module) -> str:
    """In words, why this network's layers cannot be done by the kernels for several sets of weights."""
    if type(model) is not ResNet or type(model.stem) is not Stem:
        return "it is not a ResNet of this package"
    containers = (ResNet, Stem, BasicBlock, nn.Sequential, nn.Identity, nn.AdaptiveAvgPool2d, MaxPool)
    for module in model.modules():
        if has_hooks(module):
            return "a layer has hooks"
        if type(module) not in containers and not _is_known(module):
            return f"it has a layer {module}"
    return _why_not_on_cuda(model)


def _is_known(module: nn.Module) -> bool:
    if type(module) is nn.BatchNorm2d:
        return module.affine and module.track_running_stats
    return is_plain(module) or (type(module) is nn.Linear and module.bias is not None)


def _why_not_on_cuda(model: nn.Module) -> str:
    """One ghost after another would be slow."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d) and m.weight.is_cuda]
    reasons = [reason for weight in weights if (reason := why_no_kernels(weight[None]))]
    if reasons:
        return f"it has {reasons[0]}"
    return "Triton does not work here" if weights and kernels(weights[0].device) is None else ""


class StackedResNet(Walk):
    """A forward pass of all ghosts' images, with other tensors in the place of the parameters.

    Args:
        leaves: by the id of a parameter, one for each ghost: ghosts × its shape.
        statistics: by the id of a BatchNorm, where its batch statistics are left.
    """

    def __init__(self, model: ResNet, leaves: Mapping[int, Tensor], statistics: Mapping[int, Statistics]) -> None:
        super().__init__(model)
        self._of, self._statistics = leaves, statistics

    def _block(self, block: BasicBlock, x: Tensor) -> Tensor:
        """The gradients of the two ways into a block are added by the kernel that makes the second."""
        inner, shortcut = ghost_conv_and_around(x, *self._geometry(block.conv1))
        return self._second_half(block, self._norm(block.bn1, inner), shortcut)

    def _layer(
        self, layer: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None, relu: bool = True
    ) -> Tensor:
        weight, *rest = self._geometry(layer)
        return self._norm(norm, ghost_conv(x.to(weight.dtype), weight, *rest), residual, relu)

    def _geometry(self, layer: nn.Conv2d) -> tuple[Tensor, int, int]:
        """A convolution's weights of all ghosts, its stride and padding."""
        return self._of[id(layer.weight)], layer.stride[0], cast(int, layer.padding[0])

    def _norm(self, norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
        weight, bias = self._of[id(norm.weight)], self._of[id(norm.bias)]
        return stacked_norm(x, weight, bias, self._statistics[id(norm)], norm.eps, residual, relu)

    def _last(self, layer: nn.Linear, x: Tensor) -> Tensor:
        weight, bias = self._of[id(layer.weight)], self._of[id(layer.bias)]
        by_ghost = x.to(weight.dtype).unflatten(0, (len(weight), -1))
        # The weight comes first, so that its gradient has its strides.
        return torch.baddbmm(bias[:, :, None], weight, by_ghost.mT).mT.flatten(0, 1)


class StackedLane:
    """What lanes do with the passes of an update, some or all of them in one pass; ghosts are all of one size.

    Args:
        draws: number and sign of every ghost's, of all of the update.
        mine: which of them are seen here.
        gradients: fp32 memory, of each ghost of the update a row like a lane's.
        statistics: the same for BatchNorm's statistics, which are weighed as if ghosts had come one after another.
    """

    def __init__(
        self,
        weights: Weights,
        trained: Sequence[Tensor],
        draws: Sequence[tuple[int, float]],
        mine: slice,
        gradients: Tensor,
        statistics: Tensor,
        momentum: float,
    ) -> None:
        later = torch.arange(len(draws) - 1, -1, -1, device=gradients.device)[mine, None]  # ghosts after each
        self._parts = momentum * (1 - momentum) ** later
        self._share = len(draws[mine]) / len(draws)
        draws, gradients, self._statistics = draws[mine], gradients[mine], statistics[mine]
        self._draws = list(draws) if len(set(draws)) > 1 else list(draws[:1])
        leaves, self.drawn = weights.for_ghosts(len(draws), len(self._draws))
        self._network = StackedResNet(cast(ResNet, weights.model), leaves, _places(weights.model, self._statistics))
        self._leaves = [leaves[id(p)] for p in trained]
        self._groups = by_dtype(self._leaves)
        self._gradients = [Flat(trained, torch.float32, row).views for row in gradients]
        self.seen = torch.zeros(2, device=gradients.device)  # loss, right answers

    def draw(self, perturbation: Perturbation, left_in: Sequence[Tensor] | None = None) -> None:
        """Noisy weights of every ghost.

        Args:
            left_in: the weights that were drawn around, where noise stays in them: a ghost sees that of all before it.
        """
        for (number, sign), drawn in zip(self._draws, self.drawn):
            if left_in is None:
                perturbation.draw_into(drawn.destinations, number, sign)
            else:
                perturbation.draw_into(list(left_in), number, sign)
                torch._foreach_copy_(drawn.destinations, list(left_in))
            drawn.finish()

    def go(self, images: Tensor, labels: Tensor, precision: AbstractContextManager[object]) -> None:
        """The pass."""
        with precision:
            outputs = self._network(images)
        loss = F.cross_entropy(outputs.float(), labels) * self._share
        # One kernel copies many of them, if strides agree with those of the views.
        gradients = [gradient.unbind() for gradient in torch.autograd.grad(loss, self._leaves)]
        for numbers in self._groups:
            into = [views[i] for views in self._gradients for i in numbers]
            torch._foreach_copy_(into, [gradients[i][ghost] for ghost in range(len(self._gradients)) for i in numbers])
        with torch.no_grad():
            correct = (outputs.argmax(1) == labels).sum()
            self.seen.copy_(torch.stack([loss.detach(), correct.to(loss.dtype)]))
            self._statistics.mul_(self._parts)


def _places(model: nn.Module, statistics: Tensor) -> dict[int, Statistics]:
    """For every BatchNorm its columns of the statistics, a row a ghost."""
    norms = running_norms(model)
    first = Flat(running_statistics(norms), torch.float32, statistics[0]).views
    columns = [
        # `.data`: views share a version counter, and autograd would take one layer's statistics for another's.
        torch.as_strided(statistics, (len(statistics), *view.shape), (statistics.stride(0), 1), view.storage_offset())
        .data
        for view in first
    ]  # fmt: skip
    return {id(norm): (columns[2 * i], columns[2 * i + 1]) for i, norm in enumerate(norms)}
