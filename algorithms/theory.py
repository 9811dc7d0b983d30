"""Step sizes of CDMA's theorems, with the constants supplied by the user (AAAI 2023, Theorems 1-3).

Here L_Phi = (1 + kappa / 2) L_f and kappa = L_f / mu.
"""

from __future__ import annotations

from pydantic import Field

from fedfleet.algorithms.options import Options


class CdmaTheory(Options):
    """Constants of Assumptions 1-4 and of the run."""

    smoothness: float = Field(gt=0)
    """L_f, Lipschitz constant of the gradients."""
    pl: float = Field(gt=0)
    """mu, the Polyak-Lojasiewicz constant in y."""
    sigma_1: float = Field(gt=0)
    """Bound on the dissimilarity of the clients' x-gradients."""
    sigma_2: float = Field(gt=0)
    """Bound on the dissimilarity of the clients' y-gradients."""
    local_1: float = Field(default=0.0, ge=0)
    """G_1, bound on the local variance of x-gradients (CDMA-NC)."""
    local_2: float = Field(default=0.0, ge=0)
    """G_2, bound on the local variance of y-gradients (CDMA-NC)."""
    gap: float = Field(gt=0)
    """L_0 (for CDMA-ADA its hatted form): the initial optimality gap."""
    responses: int = Field(ge=1)
    """S, the least number of answers in any round."""
    rounds: int = Field(ge=1)
    """T, the number of rounds."""

    def at(self, variant: str, local_steps: int, t: int) -> tuple[dict[str, float], float]:
        """Return ``({"x": eta_t, "y": gamma_t}, alpha_t)`` for variant "nc", "one" or "ada" with K local steps in round t."""
        match variant:
            case "nc":
                return self._nc(local_steps), 1.0
            case "one":
                return self._one(local_steps), 1.0
            case _:
                return self._ada(local_steps, t)

    @property
    def _kappa(self) -> float:
        return self.smoothness / self.pl

    @property
    def _both(self) -> float:
        return (1 + self._kappa / 2) * self.smoothness + self.smoothness  # L_Phi + L_f

    def _nc(self, k: int) -> dict[str, float]:
        lf, gap, s, rounds = self.smoothness, self.gap, self.responses, self.rounds
        s1, s2, g1, g2 = self.sigma_1, self.sigma_2, self.local_1, self.local_2
        gamma = min(
            (20 * gap * s / (lf * rounds * k**2 * s2**2)) ** 0.5,
            (30 * gap / (lf**2 * (s2**2 + g2**2) * rounds * k**3)) ** (1 / 3),
            1 / (87 * lf * k),
        )
        eta = min(
            (20 * gap * s / (7 * self._both * rounds * k**2 * s1**2)) ** 0.5,
            (3 * gap / (lf**2 * (s1**2 + g1**2) * rounds * k**3)) ** (1 / 3),
            gamma / (21 * self._kappa**2),
        )
        return {"x": eta, "y": gamma}

    def _one(self, k: int) -> dict[str, float]:
        lf, gap, s, rounds = self.smoothness, self.gap, self.responses, self.rounds
        gamma = min(1 / (87 * lf * k), (4 * gap * s / (3 * lf * rounds * k**2 * self.sigma_2**2)) ** 0.5)
        eta = min(
            gamma / (21 * self._kappa**2), (40 * gap * s / (21 * self._both * rounds * k**2 * self.sigma_1**2)) ** 0.5
        )
        return {"x": eta, "y": gamma}

    def _ada(self, k: int, t: int) -> tuple[dict[str, float], float]:
        lf, gap, s = self.smoothness, self.gap, self.responses
        spread = self.sigma_1**2 / self._kappa**2 + self.sigma_2**2
        decaying = (s * gap) ** (1 / 3) / (lf ** (2 / 3) * k * (t + 1) ** (1 / 3) * spread ** (1 / 3))
        gamma = min(1 / (2 * lf), 5.78e-4 / (lf * k), decaying)
        return {"x": gamma / (12 * self._kappa**2), "y": gamma}, 2e5 * lf**2 * k**2 * gamma**2
