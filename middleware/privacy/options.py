"""Options of ``privacy`` and ``example_privacy``: differential privacy of clients, and of examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedfleet.middleware.facts import Break, Fact, Need
from fedfleet.simulator.registry import Options

HIDDEN = (Fact.UNLOOKED, Fact.LOSSES_HIDDEN, Fact.ALL_KEPT, Fact.FINITE, Fact.NO_STATISTICS)
"""Facts without which something besides the messages shows what clients have."""


class AdaptiveNorm(Options):
    """A norm that follows a quantile of the clients' norms (Andrew et al. 2021)."""

    quantile: float = Field(default=0.5, gt=0, lt=1)
    """Share of clients whose messages are to be within the norm, gamma."""
    lr: float = Field(default=0.2, gt=0)
    """Rate of the norm's logarithm, eta_C."""
    count_noise: float | None = Field(default=None, gt=0)
    """Standard deviation of the noise on the number of clients within the norm, sigma_b; cohort.size / 20 if not given."""


class Privacy(Options):
    """Differential privacy of whole clients (Gaussian noise on what their clipped messages come to)."""

    clip_norm: float = Field(gt=0)
    """Largest Euclidean norm of how far a client moves the model, S; where it is adaptive that of the beginning."""
    delta: float = Field(gt=0, lt=1)
    """Delta of (epsilon, delta): below 1 / clients."""
    noise_multiplier: float | None = Field(default=None, gt=0)
    """Standard deviation of the noise in the sum over the norm, z; found for ``epsilon`` if not given."""
    epsilon: float | None = Field(default=None, gt=0)
    """What all rounds may spend; with ``noise_multiplier`` the run ends before the round that could spend more."""
    accounting: Literal["auto", "poisson", "participation"] = "auto"
    """poisson: nobody is told who was asked, which counts (selection.kind: poisson); participation: what the client that was heard
    most has spent, as if all knew who was heard when. auto: the former where it holds."""
    noise: Literal["server", "clients"] = "server"
    """Who adds it: the server, or each client a part, where the server is to see the sum alone."""
    bands: int = Field(default=1, ge=1, le=1024)
    """Exchanges over which noise is correlated, so that it cancels in part; 1: independent."""
    divide_by: Literal["auto", "completed"] | Annotated[float, Field(gt=0)] = "auto"
    """Divisor of the sum. completed: the clients heard; or a number; auto: cohort.size under poisson, else completed."""
    adaptive: AdaptiveNorm | None = None
    """Let the norm follow a quantile; null: it stays."""

    @model_validator(mode="after")
    def _consistent(self) -> Privacy:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("how much noise? give epsilon, or noise_multiplier")
        if self.noise == "clients" and self.bands > 1:
            raise ValueError(
                "bands above 1 correlate the noise of rounds, which clients do not share: set noise: server"
            )
        if self.adaptive and self.noise == "clients":
            raise ValueError("adaptive counts clients within the norm with noise of the server's: set noise: server")
        if self.adaptive and self.bands > 1:
            raise ValueError(
                "adaptive divides each round's noise between two sums, and bands correlate it: leave one out"
            )
        return self


class ExamplePrivacy(Options):
    """Differential privacy of clients' single examples, from everybody but the client: DP-SGD on every client."""

    clip_norm: float = Field(gt=0)
    """Largest Euclidean norm of one example's gradient, all parts of the model together, C."""
    delta: float = Field(gt=0, lt=1)
    """Delta of (epsilon, delta): below 1 / examples of the client that has most."""
    noise_multiplier: float | None = Field(default=None, gt=0)
    """Standard deviation of the noise of a batch's summed gradients over the norm, sigma; found for ``epsilon`` if not given."""
    epsilon: float | None = Field(default=None, gt=0)
    """What any client may spend; with ``noise_multiplier`` the run ends before the round in which one could spend more."""
    batches: Literal["drawn", "shuffled"] = "drawn"
    """drawn: each example is in a batch for itself with probability algorithm.batch_size / examples, which counts; shuffled:
    batches are as without privacy, and what counts is how often each example comes."""

    @model_validator(mode="after")
    def _consistent(self) -> ExamplePrivacy:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("how much noise? give epsilon, or noise_multiplier")
        return self


def needs(clients: Privacy | None, examples: ExamplePrivacy | None) -> Iterator[Need]:
    """Yield what it takes to hide clients, and examples."""
    if clients is not None:
        sent = (
            Fact.COHORTS,
            Fact.ONE_MODEL,
            Fact.ALIKE,
            Fact.UNSCALED,
            Fact.COMPUTED,
            Fact.NORMS,
            Fact.OWN_ROUND,
            Fact.ONCE,
        )
        yield Need("privacy", (*sent, Fact.COUNTS_HIDDEN, *HIDDEN))
        if clients.noise == "clients":
            yield Need("privacy.noise='clients'", (Fact.UNTOUCHED, Fact.UNROUNDED))
        if clients.adaptive is not None:
            yield Need("privacy.adaptive", (Fact.EACH_SEEN,))
    if examples is not None:
        yield Need("example_privacy", (*HIDDEN, Fact.LABELLED, Fact.NOT_BY_LABELS))
        if examples.epsilon is not None:
            yield Need(f"example_privacy.epsilon={examples.epsilon:g}", (Fact.COHORTS,))


def breaks(clients: Privacy | None) -> Iterator[Break]:
    """Yield what it takes away to hide clients."""
    if clients is not None:
        yield Break(Fact.EXACT, "what clients send is clipped, and noise is added to its sum", "privacy")
