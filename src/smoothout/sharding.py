"""What the method must know of distributed training: which part of a tensor is here, and who else holds the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smoothout.filters import FilterLayout


@dataclass(frozen=True)
class Shard:
    """This rank's part of a parameter: the local tensor and where it starts in the whole."""

    local: Tensor
    start: tuple[int, ...]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own distributed one."""
    # Looked up, not imported: torch.distributed.tensor costs half a second that single-process users need not pay.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(parameter: Any) -> Shard:
    """The part of a parameter that this rank holds; all of it if it is not sharded."""
    if not is_dtensor(parameter):
        return Shard(parameter.detach(), (0,) * parameter.ndim)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(placement).__name__ == "_StridedShard" for placement in parameter.placements):
        raise ValueError(
            f"a parameter with placements {parameter.placements} is sharded twice along one dimension (FSDP2 over "
            "tensor parallelism): SmoothOut does not support that; shard the two along different dimensions"
        )
    _, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter._local_tensor
    return Shard(local.detach(), tuple(start) if local.numel() else (0,) * parameter.ndim)


def whole(parameter: Any) -> Tensor:
    """The unsharded values of a parameter (gathers those of a DTensor: every rank must call it)."""
    return parameter.full_tensor() if is_dtensor(parameter) else parameter.detach()


def groups_that_share_filters(parameter: Any, layout: FilterLayout) -> tuple[Any, ...]:
    """Process groups over which the squared norm of a filter adds up: those that cut a dimension inside a filter."""
    if layout.axis == "element" or not is_dtensor(parameter):
        return ()
    placements = enumerate(parameter.placements)
    return tuple(
        parameter.device_mesh.get_group(mesh_dim)
        for mesh_dim, placement in placements
        if placement.is_shard() and placement.dim != layout.axis
    )


def rank() -> int:
    """This process's among all, 0 where there is no process group (yet)."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


def replicas(model: nn.Module, parameters: Iterable[Any], shared_noise: bool) -> list[int]:
    """For each parameter the number that makes data-parallel replicas draw different noise; 0 if all draw the same.

    A plain tensor is replicated over all ranks (DDP), or, beside tensor-parallel layers, one tensor for their group. A
    DTensor is one logical tensor and has one θ, but the replica groups of hybrid sharding (a mesh that replicates along
    its first dimension and shards along another) each have their own.
    """
    of_plain = min((int(mesh.mesh.min()) for mesh in _tensor_parallel_meshes(model)), default=rank())
    return [0 if shared_noise else _replica(p) if is_dtensor(p) else of_plain for p in parameters]


def _tensor_parallel_meshes(model: nn.Module) -> list[Any]:
    """Of the groups that share the work of a layer: weights that are cut, and not by FSDP2, which gathers them."""
    gathered = {id(p) for module in sharded_modules(model) for p in module.parameters()}
    parameters: Iterable[Any] = model.parameters()
    cut = (p for p in parameters if is_dtensor(p) and id(p) not in gathered)
    return [p.device_mesh for p in cut if any(placement.is_shard() for placement in p.placements)]


def _replica(parameter: Any) -> int:
    first, *others = parameter.placements
    if first.is_replicate() and any(placement.is_shard() for placement in others):
        return parameter.device_mesh.get_local_rank(0)
    return 0


def like(parameter: Any, local: Tensor) -> Tensor:
    """A local tensor, wrapped as the parameter is."""
    if not is_dtensor(parameter):
        return local
    return type(parameter.data).from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 manages."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [m for m in model.modules() if isinstance(m, module.FSDPModule)]


def reshard(modules: Iterable[Any]) -> None:
    """Drop all-gathered copies of the weights, so that the next pass gathers what is in the shards now.

    `module.reshard()` leaves those alone that are kept from forward to backward, as the root's are by default, also
    where an exception ended the forward.
    """
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in (each for each in groups if each is not None):
            if group._all_gather_result is not None:
                group.wait_for_unshard()  # one that was asked for ahead has the old values
            group._to_sharded()
