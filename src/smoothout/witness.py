"""Whether somebody wrote to weights past autograd, such as by `p.data -= …`, which moves no version counter."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

ALL_OF = 64  # numbers; of more the first and the last


class Witness:
    """Remembers some numbers of every weight in a CPU's memory. On a GPU to look would be to wait for it."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._views: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        self._whose: dict[torch.dtype, list[int]] = defaultdict(list)  # for each number the weight's
        self._seen: list[Tensor] = []
        for i, w in enumerate(weights):
            if w.device.type == "cpu":
                few = w.numel() <= ALL_OF and w.is_contiguous()
                views = [w.view(-1)] if few else [w[(end,) * w.ndim].view(1) for end in (0, -1)]
                self._views[w.dtype] += views
                self._whose[w.dtype] += [i] * sum(map(len, views))

    def look(self) -> None:
        self._seen = self._now()

    def changed(self) -> list[int]:
        """Which weights have changed since the last look; what is not a number never does."""
        found: set[int] = set()
        for whose, new, old in zip(self._whose.values(), self._now(), self._seen):
            if not torch.equal(new, old):
                found |= {whose[i] for i in ((new != old) & ~new.isnan()).nonzero().flatten().tolist()}
        return sorted(found)

    def _now(self) -> list[Tensor]:
        return [torch.cat(views) for views in self._views.values()]
