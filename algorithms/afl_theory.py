"""Step sizes of AFL's Theorem 2, with the constants supplied by the user (Mohri, Sivek & Suresh, ICML 2019).

    gamma_w      = 2 R_W / sqrt(T (sigma_w^2 + G_w^2))
    gamma_lambda = 2 R_Lambda / sqrt(T (sigma_lambda^2 + G_lambda^2))

R_W is the option radius, R_Lambda that of the set of mixtures. For losses in [0, M] and p domains, all of whose clients are asked,
G_lambda is at most M sqrt(p) and sigma_lambda M sqrt(p) / 2; with dual_gradient: single the latter is p M.
"""

from __future__ import annotations

import math

from pydantic import Field

from fedfleet.algorithms.options import Options


class AflTheory(Options):
    """Bounds on the gradients and on their noise, for convex losses."""

    rounds: int = Field(ge=1)
    """T, the rounds of the run."""
    gradient: float = Field(gt=0)
    """G_w, bound on the norm of a gradient in the model."""
    gradient_noise: float = Field(default=0.0, ge=0)
    """sigma_w, root of the bound on the variance of a round's estimate of it."""
    losses: float = Field(gt=0)
    """G_lambda, bound on the norm of the domains' losses."""
    losses_noise: float = Field(default=0.0, ge=0)
    """sigma_lambda, root of the bound on the variance of a round's estimate of them."""

    def steps(self, radius: float, mixtures_radius: float) -> tuple[float, float]:
        """Return (gamma_w, gamma_lambda) for the radii of the models and of the mixtures."""
        size_w, size = math.hypot(self.gradient_noise, self.gradient), math.hypot(self.losses_noise, self.losses)
        return 2 * radius / (size_w * math.sqrt(self.rounds)), 2 * mixtures_radius / (size * math.sqrt(self.rounds))
