"""SmoothOut with Accelerate: one call after `prepare`."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from smoothout.checks import DEEPSPEED, check_model
from smoothout.integrations.arguments import Arguments, check_arguments, missing
from smoothout.select import Predicate
from smoothout.smooth import SmoothOut

try:
    from accelerate import Accelerator, DistributedType
except ImportError as absent:
    raise missing("Accelerate", "accelerate") from absent


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    strength: float = 0.0375,
    *,
    draw: Literal["step", "forward"] = "step",
    **arguments: Unpack[Arguments],
) -> SmoothOut:
    """SmoothOut in an Accelerate loop; with `scale="filter"` AdaSmoothOut. Not a line of the loop changes.

    Inside `accelerator.accumulate(model)` all micro-batches of one update share one θ. `accelerator.save_state()` saves
    the position in the noise and `load_state()` goes on there.

    Args:
        accelerator: whose checkpoints hold the position.
        model, optimizer: as `accelerator.prepare` returned them.
        strength: a, the size of the noise.
        draw: `"step"`: the same θ for every micro-batch of an update; `"forward"`: a new one for each.
        arguments: those of `SmoothOut`: noise, scale, schedule, select, seed, denoise, shared_noise.

    Returns:
        The SmoothOut, attached. `smooth.attach(optimizer)` gives its handle, with `.restore()` and `.remove()`.

    Examples:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> smooth = attach(accelerator, model, optimizer, strength=0.15, scale="filter")
    """
    check_arguments(strength, draw, arguments)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(DEEPSPEED)
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise ValueError("Megatron-LM has an optimizer and a loop of its own, which SmoothOut cannot follow: use FSDP2")
    check_model(model)
    # By parameters: models are listed before DDP and torch.compile wrap them, and unwrap_model() changes compiled ones.
    if not any(set(model.parameters()) == set(prepared.parameters()) for prepared in accelerator._models):
        raise ValueError("this model is not one that accelerator.prepare() returned: prepare first, then attach")
    if not any(optimizer is one for one in accelerator._optimizers):
        raise ValueError("this optimizer is not one that accelerator.prepare() returned: prepare first, then attach")
    if arguments.get("select") is not None:
        arguments["select"] = _without_prefix(arguments["select"], model)
    smooth = SmoothOut(model, strength, **arguments)
    smooth.attach(optimizer, draw=draw)
    accelerator.register_for_checkpointing(smooth)
    return smooth


def _without_prefix(select: Predicate, model: nn.Module) -> Predicate:
    """The user's predicate sees the model's own names, in one process and in several, compiled or not."""
    in_ddp = isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)

    def by_own_name(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
        name = name.replace("_orig_mod.", "")
        return select(name.removeprefix("module.") if in_ddp else name, parameter, module)

    return by_own_name
