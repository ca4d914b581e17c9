"""Ghost batch normalisation: a large batch is cut into chunks and each is normalised by its own statistics.

The authors' rule: a batch of B with ghosts of G is cut by `torch.chunk` into B // G chunks, and the number of chunks,
taken from the full batch, stays the same for the short last batch of an epoch. `torch.chunk` makes chunks of
⌈b / chunks⌉ and a smaller last one, so with G = 128 the chunks have 128 at B = 2048 (16 of them), 129 at B = 5000 (39,
the last of 98), 131 at B = 6000 (46, the last of 105), and 53 in the last 848 of 50,000 images at B = 2048. One image
has no statistics, so no chunk has less than two, where their rule would make such chunks of a very short last batch.

Running statistics are those that the chunks, sent one after the other through ordinary BatchNorm, would leave: with
momentum m and a chunk's mean or unbiased variance sⱼ, r ← (1 − m)·r + m·sⱼ for j = 1 … k, which is
r ← (1 − m)ᵏ·r + Σⱼ m·(1 − m)ᵏ⁻ʲ·sⱼ. So they move k times in a step, the last chunks weigh most, and a smaller last
chunk weighs as much as any other. With momentum None they are the plain average over all chunks seen.
"""

from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


def chunk_count(batch_size: int, ghost_size: int) -> int:
    """How many ghosts of about `ghost_size` a full batch is cut into; 1 where it is smaller than two of them."""
    return max(1, batch_size // ghost_size)


def chunk_sizes(images: int, chunks: int) -> list[int]:
    """The sizes that `torch.chunk` gives: equal ones, then a smaller last one; fewer than `chunks` if they run out."""
    if images < 1 or chunks < 1:
        raise ValueError(f"a batch of {images} cannot be cut into {chunks} chunks: both must be at least 1")
    size = -(-images // chunks)
    whole, rest = divmod(images, size)
    return [size] * whole + ([rest] if rest else [])


def ghost_sizes(images: int, chunks: int) -> list[int]:
    """Sizes of the ghosts of a batch: those of `chunk_sizes`, but none of a single image, which has no statistics.

    Where the chunks would be single images they are pairs, and a last single one joins the one before.
    """
    sizes = chunk_sizes(images, min(chunks, -(-images // 2)))
    if len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


class _GhostBatchNorm(_BatchNorm):
    """BatchNorm over chunks of the batch. In evaluation mode it is ordinary BatchNorm.

    Parameters, buffers and their names are BatchNorm's, so that a state dictionary fits both.

    Args:
        num_features: channels.
        chunks: into how many parts any batch is cut, see `chunk_count`.
        eps, momentum, affine, track_running_stats: as in BatchNorm; momentum counts per chunk.
    """

    def __init__(
        self,
        num_features: int,
        chunks: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.chunks = _checked(chunks)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunks={self.chunks}"

    def forward(self, input: Tensor) -> Tensor:
        by_batch_statistics = self.training or self.running_mean is None
        if not by_batch_statistics:
            return super().forward(input)
        self._check_input_dim(input)
        sizes = ghost_sizes(len(input), self.chunks)
        equal = sum(size == sizes[0] for size in sizes)
        head, means, variances = self._normalised(input[: equal * sizes[0]], equal)
        parts = [head]
        if equal < len(sizes):
            tail, mean, variance = self._normalised(input[equal * sizes[0] :], 1)
            parts.append(tail)
            means, variances = torch.cat([means, mean]), torch.cat([variances, variance])
        if self.training and self.track_running_stats:
            self._update_running_statistics(means, variances)
        return torch.cat(parts) if len(parts) > 1 else head

    def _normalised(self, x: Tensor, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
        """The images of `chunks` equal chunks, normalised, and the chunks' means and unbiased variances, chunks × C.

        One BatchNorm over chunks · C channels: chunk and channel together become the channel.
        """
        channels = x.shape[1]
        # The kernels want statistics of the parameters' type, which under autocast is not that of the images.
        own = next((each for each in (self.running_mean, self.weight) if each is not None), x)
        means = torch.zeros(chunks * channels, device=x.device, dtype=own.dtype)
        variances = torch.zeros_like(means)
        # Momentum 1 makes the kernel's "running" statistics those of this batch: no second pass over the data.
        y = F.batch_norm(
            _chunks_as_channels(x, chunks),
            means,
            variances,
            None if self.weight is None else self.weight.repeat(chunks),
            None if self.bias is None else self.bias.repeat(chunks),
            training=True,
            momentum=1.0,
            eps=self.eps,
        )
        return _channels_as_chunks(y, chunks), means.view(chunks, channels), variances.view(chunks, channels)

    @torch.no_grad()
    def _update_running_statistics(self, means: Tensor, variances: Tensor) -> None:
        chunks = len(means)
        running_mean, running_var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        seen = cast(Tensor, self.num_batches_tracked)
        seen.add_(chunks)
        # Weights are computed on the device: nothing here waits for it, and the step can be captured in a CUDA graph.
        if self.momentum is None:
            weights = (1 / seen.to(means.dtype)).expand(chunks)
            old = 1 - weights.sum()
        else:
            age = torch.arange(chunks - 1, -1, -1, device=means.device, dtype=means.dtype)
            weights = self.momentum * (1 - self.momentum) ** age
            old = (1 - self.momentum) ** chunks
        running_mean.mul_(old).add_((weights[:, None] * means).sum(0))
        running_var.mul_(old).add_((weights[:, None] * variances).sum(0))


class GhostBatchNorm1d(_GhostBatchNorm, nn.BatchNorm1d):
    """Ghost batch normalisation of N×C or N×C×L."""


class GhostBatchNorm2d(_GhostBatchNorm, nn.BatchNorm2d):
    """Ghost batch normalisation of N×C×H×W."""


_GHOSTS: dict[type[nn.Module], type[_GhostBatchNorm]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    GhostBatchNorm1d: GhostBatchNorm1d,
    GhostBatchNorm2d: GhostBatchNorm2d,
}


Model = TypeVar("Model", bound=nn.Module)


def with_ghost_norm(model: Model, *, chunks: int) -> Model:
    """Turn the BatchNorm layers of a model into ghost ones, in place, and give the model back.

    Parameters, buffers, hooks and the modules themselves stay the same objects, so an optimizer made before still
    holds. A model that is ghost already gets the new number of chunks.

    Args:
        chunks: into how many parts a batch is cut.
    """
    _checked(chunks)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    for name, layer in layers:
        if type(layer) not in _GHOSTS:
            kinds = "BatchNorm1d and BatchNorm2d"
            raise TypeError(
                f"with_ghost_norm: {name or 'the model'} is a {type(layer).__name__}; only {kinds} can turn"
            )
    for _, layer in layers:
        # Another class on the same object: nothing that refers to the layer, or hangs on it, is lost.
        layer.__class__ = _GHOSTS[type(layer)]
        cast(_GhostBatchNorm, layer).chunks = chunks
    return model


def _checked(chunks: int) -> int:
    if chunks < 1:
        raise ValueError(f"chunks={chunks}: at least 1 is needed")
    return chunks


def _chunks_as_channels(x: Tensor, chunks: int) -> Tensor:
    """(chunks·n)×C×… → n×(chunks·C)×…, in the memory format of x."""
    if chunks == 1:
        return x
    if _is_channels_last(x):
        by_pixel = x.permute(0, 2, 3, 1).unflatten(0, (chunks, -1)).permute(1, 2, 3, 0, 4)
        return by_pixel.flatten(3).permute(0, 3, 1, 2)
    return x.unflatten(0, (chunks, -1)).transpose(0, 1).flatten(1, 2)


def _channels_as_chunks(y: Tensor, chunks: int) -> Tensor:
    """The way back."""
    if chunks == 1:
        return y
    if _is_channels_last(y):
        by_pixel = y.permute(0, 2, 3, 1).unflatten(3, (chunks, -1)).permute(3, 0, 1, 2, 4)
        return by_pixel.flatten(0, 1).permute(0, 3, 1, 2)
    return y.unflatten(1, (chunks, -1)).transpose(0, 1).flatten(0, 1)


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
