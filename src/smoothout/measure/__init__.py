"""Measuring the flatness of any PyTorch model, in three lines, with closed forms behind every number.

    loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    result = measure.sharpness(model, loss_fn, batches)
    print(result.value, result.status)

Every measurement takes `loss_fn(model, batch)`, a scalar mean loss, and batches that can be gone through several times;
it leaves the model as it was, and returns a frozen result with `.to_json()` and `.plot()`.
"""

from smoothout.measure._curvature import Curvature, curvature
from smoothout.measure._interpolate import Interpolation, interpolate
from smoothout.measure._landscape import Landscape, landscape
from smoothout.measure._sensitivity import Sensitivity, sensitivity
from smoothout.measure._sharpness import Sharpness, sharpness
from smoothout.measure.loss_at import FunctionLossAt, LossAt, model_loss_at
from smoothout.measure.strength import SuggestedStrength, suggest_strength

__all__ = [
    "sharpness",
    "sensitivity",
    "interpolate",
    "landscape",
    "curvature",
    "suggest_strength",
    "Sharpness",
    "Sensitivity",
    "Interpolation",
    "Landscape",
    "Curvature",
    "SuggestedStrength",
    "LossAt",
    "FunctionLossAt",
    "model_loss_at",
]
