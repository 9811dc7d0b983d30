"""Step sizes of CDMA's theorems, with the constants supplied by the user (AAAI 2023, Theorems 1-3).

Here L_Phi = (1 + kappa / 2) L_f and kappa = L_f / mu.
"""

from __future__ import annotations

import torch
from pydantic import Field, model_validator

from fedfleet.algorithms.options import CohortOptions, LocalOptions, Options
from fedfleet.simulator.author import ConfigError, Problem

LOOKED_AT = 1_000_000  # clients whose numbers of examples are looked at


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
    local_1: float | None = Field(default=None, ge=0)
    """G_1, bound on the local variance of x-gradients; CDMA-NC needs it."""
    local_2: float | None = Field(default=None, ge=0)
    """G_2, bound on the local variance of y-gradients; CDMA-NC needs it."""
    gap: float = Field(gt=0)
    """L_0 (for CDMA-ADA its hatted form): the initial optimality gap."""
    responses: int = Field(ge=1)
    """S, the least number of answers in any round."""
    rounds: int = Field(ge=1)
    """T, the number of rounds."""

    @model_validator(mode="after")
    def _conditioned(self) -> CdmaTheory:
        if self.pl > self.smoothness:
            raise ValueError(
                f"pl={self.pl:g} is above smoothness={self.smoothness:g}, and mu is never above L_f: lower pl"
            )
        return self

    def check(self, variant: str, cohort: CohortOptions) -> None:
        """Refuse constants under which the variant's theorem says nothing. Raises ConfigError."""
        at = "algorithm.theory."
        if variant == "nc":
            for name in ("local_1", "local_2"):
                if getattr(self, name) is None:
                    raise ConfigError(f"{at}{name}: missing: Theorem 1 needs Assumption 4: give it")
        if self.responses > cohort.fewest:
            raise ConfigError(
                f"{at}responses={self.responses}: a phase may go on after {cohort.fewest} answers, and S is the least of any "
                f"round: lower it, or raise cohort.size"
            )
        if variant == "ada" and self.responses < (least := self._spread / (self.smoothness * self.gap)):
            raise ConfigError(
                f"{at}responses={self.responses}: Theorem 3 needs (sigma_1^2 / kappa^2 + sigma_2^2) / (smoothness * gap) = "
                f"{least:g} at least: raise it and cohort.size"
            )

    def check_steps(self, variant: str, options: LocalOptions, problem: Problem) -> None:
        """Refuse local steps of which the variant's theorem does not speak. Raises ConfigError."""
        count = problem.num_examples
        if count is None:
            return
        result = {
            -(-n // options.batch_size) for n in count(torch.arange(min(problem.clients, LOOKED_AT))).unique().tolist()
        }
        if options.steps is None and len(result) > 1:
            raise ConfigError(
                f"algorithm.epochs={options.epochs or 1}: the theorems take as many local steps at every client, and an epoch has "
                f"{min(result)} to {max(result)} here: give algorithm.steps, or leave algorithm.theory out"
            )
        if variant == "nc" and options.steps is not None and (odd := sorted(e for e in result if options.steps % e)):
            raise ConfigError(
                f"algorithm.steps={options.steps}: Theorem 1 needs a multiple of a client's epoch, which has {odd[0]} steps of "
                f"algorithm.batch_size={options.batch_size}: change one of them, or leave algorithm.theory out"
            )

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

    @property
    def _spread(self) -> float:
        return self.sigma_1**2 / self._kappa**2 + self.sigma_2**2

    def _nc(self, k: int) -> dict[str, float]:
        lf, gap, s, rounds = self.smoothness, self.gap, self.responses, self.rounds
        s1, s2, g1, g2 = self.sigma_1, self.sigma_2, self.local_1 or 0.0, self.local_2 or 0.0
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
        decaying = (s * gap) ** (1 / 3) / (lf ** (2 / 3) * k * (t + 1) ** (1 / 3) * self._spread ** (1 / 3))
        gamma = min(1 / (2 * lf), 5.78e-4 / (lf * k), decaying)
        return {"x": gamma / (12 * self._kappa**2), "y": gamma}, 2e5 * lf**2 * k**2 * gamma**2
