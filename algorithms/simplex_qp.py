"""Convex quadratics on the simplex: min a' P a, a >= 0, sum a = 1."""

from __future__ import annotations

import torch
from torch import Tensor

from fedfleet.simulator.author import imported

PASSES = 1000
"""Of the active set, so many times n: where P is singular, SciPy's 3 n may not be enough, and it gives up."""


def least_quadratic(p: Tensor) -> Tensor:
    """Return a (n,) for a positive semidefinite P (n, n) float64.

    Of all a = s b with b on the simplex, a' P a + (sum a - 1)^2 is least in s at q / (1 + q) with q = b' P b, which grows with q:
    so that b is best where a is the solution of that problem, one of non-negative least squares.
    """
    nnls = imported("scipy.optimize").nnls  # here, for it takes its time

    values, vectors = torch.linalg.eigh(p / p.diagonal().mean().clamp(min=torch.finfo(p.dtype).tiny))
    root = vectors * values.clamp(min=0).sqrt()  # P = root root'
    system = torch.cat([root.T, torch.ones(1, len(p), dtype=p.dtype)])
    result, _ = nnls(system.numpy(), [0.0] * len(p) + [1.0], maxiter=PASSES * len(p))
    a = torch.from_numpy(result)
    return a / a.sum()
