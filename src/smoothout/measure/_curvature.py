"""Curvature: the Hessian's leading eigenvalues and its trace, through Hessian-vector products alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smoothout.checks import positive_number, seed_number, whole_number
from smoothout.measure.loss_at import LossAt, LossFunction, model_loss_at
from smoothout.measure.result import Progress, Result, no_progress
from smoothout.select import Predicate

Operator = Callable[[Tensor], Tensor]
ROUNDING = 2.0**-23  # products come from a model that computes in fp32


@dataclass(frozen=True)
class Curvature(Result):
    """The top of the Hessian's spectrum and its trace.

    Args:
        eigenvalues: the largest, algebraically, in falling order.
        trace: Hutchinson's estimate.
        trace_error: half of its 95 % confidence interval.
        converged: whether every eigenvalue's residual ‖Hv − λv‖ is below the tolerance.
        residuals: of each eigenvalue: a bound on its error, as far as products are exact; the rounding of the model's
            arithmetic comes on top: about 1e-7 of the largest eigenvalue in fp32, far more in half precision.
        products: Hessian-vector products used, each a forward and two backward passes over all batches.
    """

    eigenvalues: tuple[float, ...]
    trace: float
    trace_error: float
    converged: bool
    residuals: tuple[float, ...] = ()
    products: int = 0

    def plot(self, **options: Any) -> Any:
        """Eigenvalues with their residuals, and the trace with its error bar, on matplotlib axes."""
        from smoothout.measure import plots

        return plots.plot_curvature({"": self}, **options)


def curvature(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    top: int = 1,
    probes: int = 30,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    seed: int = 0,
    select: Predicate | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Curvature:
    """The `top` largest eigenvalues of ∇²C(w) by Lanczos, and tr ∇²C(w) by Hutchinson's estimator.

    Args:
        model, loss_fn, batches, select, train_mode: see `measure.loss_at`. By default over every trainable parameter.
        top: how many eigenvalues. Of equal ones Lanczos may see fewer than there are.
        probes: random ±1 vectors for the trace.
        max_iterations: of Lanczos; it keeps all its vectors, 8·n bytes each.
        tolerance: on an eigenvalue's residual, relative to the largest eigenvalue in absolute value.
        seed: of the first vector and the probes. The generator is private.
        progress: called with (products done, the most that there may be).

    Returns:
        A `Curvature`.

    Examples:
        >>> result = measure.curvature(model, loss_fn, [batch], top=5)
        >>> print(result.eigenvalues, result.trace, "±", result.trace_error)
    """
    with model_loss_at(model, loss_fn, batches, select=select, train_mode=train_mode) as at:
        at.warn_of_shared_memory()
        at.base_loss()
        return curvature_at(
            at, top=top, probes=probes, max_iterations=max_iterations, tolerance=tolerance, seed=seed, progress=progress
        )


def curvature_at(
    at: LossAt,
    *,
    top: int = 1,
    probes: int = 30,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Curvature:
    """The curvature of any `LossAt`."""
    n = len(at.start)
    top, probes = whole_number("top", top), whole_number("probes", probes, 2)
    if top > n:
        raise ValueError(f"top={top}: the Hessian has {n} eigenvalues, one for each parameter")
    max_iterations, seed = whole_number("max_iterations", max_iterations, top), seed_number(seed)
    tolerance = positive_number("tolerance", tolerance, "1e-5")
    total, products = probes + min(n, max_iterations), 0

    def hessian(v: Tensor) -> Tensor:
        nonlocal products
        product = at.hessian_vector_product(at.start, v)
        products += 1
        (progress or no_progress)(products, total)
        if not torch.isfinite(product).all():
            raise ValueError("a Hessian-vector product is not finite: the loss has no second derivative at this point")
        return product

    generator = torch.Generator("cpu").manual_seed(seed)
    eigenvalues, residuals, converged = lanczos(hessian, at.start, top, max_iterations, tolerance, generator)
    trace, trace_error = hutchinson(hessian, at.start, probes, generator)
    (progress or no_progress)(total, total)
    return Curvature(tuple(eigenvalues), trace, trace_error, converged, tuple(residuals), products)


def lanczos(
    operator: Operator, like: Tensor, top: int, max_iterations: int, tolerance: float, generator: torch.Generator
) -> tuple[list[float], list[float], bool]:
    """The largest eigenvalues of a symmetric operator, with full reorthogonalisation.

    Returns:
        Ritz values in falling order, their residuals, and whether all residuals are small.
    """
    basis: list[Tensor] = [_random_unit_vector(like, [], generator)]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for step in range(1, min(len(like), max_iterations) + 1):
        product = operator(basis[-1])
        diagonal.append(float(basis[-1] @ product))
        remainder = _orthogonal_part(product, basis)
        β = float(torch.linalg.vector_norm(remainder))
        values, residuals, largest = _ritz(diagonal, off_diagonal, β)
        small = all(r <= tolerance * largest for r in residuals[:top])
        if step == len(like) or (small and step >= top):
            return values[:top], residuals[:top], True
        if β <= 1e-12 * largest:
            # An invariant subspace, of fewer dimensions than eigenvalues are asked for: go on beside it.
            β, remainder = 0.0, _random_unit_vector(like, basis, generator)
        off_diagonal.append(β)
        basis.append(remainder / torch.linalg.vector_norm(remainder))
    return values[:top], residuals[:top], False


def _ritz(diagonal: list[float], off_diagonal: list[float], β: float) -> tuple[list[float], list[float], float]:
    """Eigenvalues of the tridiagonal matrix in falling order, their residuals β·|last component|, the largest |λ|."""
    t = torch.diag(torch.tensor(diagonal, dtype=torch.float64, device="cpu"))
    if off_diagonal:
        off = torch.tensor(off_diagonal, dtype=torch.float64, device="cpu")
        t += torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(t)
    residuals = (β * vectors[-1].abs()).flip(0)
    return values.flip(0).tolist(), residuals.tolist(), float(values.abs().max())


def _orthogonal_part(vector: Tensor, basis: list[Tensor]) -> Tensor:
    """Gram-Schmidt, twice: once loses orthogonality to rounding."""
    for _ in range(2):
        for b in basis:
            vector = vector - (b @ vector) * b
    return vector


def _random_unit_vector(like: Tensor, basis: list[Tensor], generator: torch.Generator) -> Tensor:
    vector = torch.randn(len(like), dtype=torch.float64, generator=generator, device="cpu").to(like.device)
    vector = _orthogonal_part(vector, basis)
    return vector / torch.linalg.vector_norm(vector)


def hutchinson(operator: Operator, like: Tensor, probes: int, generator: torch.Generator) -> tuple[float, float]:
    """tr H = E[vᵀHv] over random signs v: the mean, and half of its 95 % confidence interval (Student's t)."""
    from scipy.stats import t

    samples = []
    for _ in range(probes):
        v = torch.randint(0, 2, (len(like),), generator=generator, device="cpu").to(like).mul_(2).sub_(1)
        samples.append(float(v @ operator(v)))
    values = torch.tensor(samples, dtype=torch.float64, device="cpu")
    error = float(t.ppf(0.975, probes - 1)) * float(values.std()) / math.sqrt(probes)
    return float(values.mean()), error + ROUNDING * float(values.abs().mean())
