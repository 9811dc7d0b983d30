"""Variants of AFL: local steps, other estimators, clients that drop out, optimistic steps and best responses.

The paper's algorithm is `afl.py`. The optimistic and the strongly convex variant are reconstructions of what the paper's
appendix announces.

    optimistic      z - gamma (2 g_t - g_{t-1}), and so for lambda
    two_sequence    the same, with the points that were played beside; equal where nothing is projected
    best_response   lambda is the worst mixture for the losses of all domains at z
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms.domain_participation import DomainCorrection, Remembered, differing, nothing_sent
from fedfleet.algorithms.options import AlgorithmOptions
from fedfleet.simulator.author import ByDomainMean, LocalWork, Phase, Problem, Reduced, T, Tree


class VariantOptions(AlgorithmOptions):
    """Options of the variants of AFL."""

    steps: int = Field(default=1, ge=1)
    """Local steps: 1 is AFL; more give FedAvg with the weights lambda."""
    local_lr: float | None = Field(default=None, gt=0)
    """Step of the local steps; ``lr`` if not given."""
    estimator: Literal["horvitz_thompson", "ratio"] = "horvitz_thompson"
    """Estimate of all losses from some answers. horvitz_thompson: sums, unbiased where all are as likely to be heard, or with
    ``correction``. ratio: shares of those heard; less variance, biased in lambda too unless clients of a domain are heard alike."""
    correction: DomainCorrection = DomainCorrection()
    """Correction for clients that are heard less often than others, for the model and for lambda. Without it, lambda follows
    who is heard, too, and does not say which domains are hard."""
    method: Literal["plain", "optimistic", "two_sequence", "best_response"] = "plain"
    """optimistic: steps along twice the gradient minus the last one; two_sequence: the same with the points that were played
    beside, which is the same where nothing is projected; best_response: lambda is the worst mixture for the losses of all domains
    on all their examples, so every client is asked, and lr is 1 / (strong_convexity t) if that is given."""
    strong_convexity: float | None = Field(default=None, gt=0)
    """Constant alpha of the losses; best_response only."""

    @model_validator(mode="after")
    def _of_its_method(self) -> VariantOptions:
        if self.strong_convexity is not None and self.method != "best_response":
            raise ValueError("strong_convexity is for method: best_response")
        unused = {"estimator": "ratio", "method": "best_response"} if self.correction.remembers else {}
        for name, value in unused.items():
            if getattr(self, name) == value:
                raise ValueError(f"{name}={value}: correction: memory has no use for it: leave one of them out")
        return self


class Before(NamedTuple):
    """Memory of an optimistic step: the last gradients; of two_sequence, where the sequence behind the points is."""

    g: Tree
    g_mixture: Tensor


def extrapolated(last: Before | None, now: Before) -> Before:
    """Return twice the gradients minus the last ones; those of now where there are none."""
    if last is None:
        return now
    return Before(T.sub(T.scale(2.0, now.g), last.g), 2 * now.g_mixture - last.g_mixture)


def two_sequence(
    last: Before | None, point: Before, down: Callable[[Tree], Tree], up: Callable[[Tensor], Tensor]
) -> tuple[Before, Before]:
    """Return the sequence behind the points after a step, and the next point played.

    Args:
        last: the sequence so far; None in round 0, whose gradient is taken to be the one before it, too.
        point: the point that was played, (z, lambda).
        down, up: a step from a model, and from a mixture, along the gradients at ``point``.

    """
    behind = point if last is None else Before(down(last.g), up(last.g_mixture))
    return behind, Before(down(behind.g), up(behind.g_mixture))


def remembering(train: Phase, work: LocalWork) -> Phase:
    """Return the phase in which clients send how their gradient and loss differ from what they sent last."""
    by_domain = {"g": ByDomainMean(), "loss": ByDomainMean()}
    return replace(train, work=differing(work), reduce=by_domain, client_state=nothing_sent, dated=True)


def known_after(last: Remembered, losses: Tensor, reduced: Reduced, problem: Problem) -> tuple[Remembered, Tensor]:
    """Return the memory after an exchange, and its losses (p,), NaN for domains that nobody has ever answered for."""
    memory = last.after(reduced, problem)
    heard = losses.isfinite().index_fill(0, reduced["loss"].domain, True)
    return memory, memory.losses.where(heard, losses.new_full((), float("nan")))
