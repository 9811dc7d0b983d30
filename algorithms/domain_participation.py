"""Corrections of AFL and DRFA for clients that are heard less often than others: in the step of the model and in that of lambda.

Neither follows from a paper. A rarely heard domain looks like one of small loss, so that uncorrected steps neglect the domain that
they are there to protect.

    symbol               here
    H, S, N              the clients heard, invited, all
    p_i                  Round.chances
    V_k                  Remembered.gradients = sum_{i in k} (n_i / m_k) v_i, float64, v_i the last gradient of client i, 0 before
    Lambda_k             Remembered.losses, of the last losses in the same way

    known_p  g_w = (N/S) sum_H lambda_k (n_i / m_k) g_i / p_i,   L_k = (N/S) sum_{H in k} (n_i / m_k) l_i / p_i
    memory   g_w = sum_k lambda_k V_k,                           L_k = Lambda_k

A client sends by how much its gradient and its loss differ from its last ones, and the server adds them up by domain: lambda moves,
so that their sum over domains would not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms.agnostic import of_problem
from fedfleet.algorithms.options import AlgorithmOptions, ByName, refuse_others
from fedfleet.algorithms.participation import Correction, inverse_chances, remembering
from fedfleet.simulator.author import Cohort, LocalWork, Message, Phase, Problem, Reduced, Round, T, Tree


class ChanceCorrection(ByName):
    """Correction for clients that are heard less often than others."""

    naming = "kind"
    kind: Literal["none", "known_p"] = "none"
    """none; known_p: divide what a client sends by the chance that it is online."""
    cap: float = Field(default=100.0, ge=1, le=1e9)
    """known_p: the largest 1/p_i. Clients online less often are counted by it."""

    @model_validator(mode="after")
    def _applies(self) -> ChanceCorrection:
        refuse_others(self, self.kind, {"cap"} if self.kind == "known_p" else set(), {"cap"})
        return self

    @property
    def remembers(self) -> bool:
        """Whether clients keep their last answers."""
        return self.kind not in ("none", "known_p")

    def weighing(self, rnd: Round) -> Weighing:
        """Return what weighs the cohorts of a round."""
        return Weighing(self, rnd)

    def asks(self, ratio: bool) -> Literal["relative", "absolute"] | None:
        """Return how the clients' chances have to be known, as ``Algorithm.chances``; for ratios up to a factor."""
        return None if self.kind != "known_p" else "relative" if ratio else "absolute"

    def answers(self, result: Reduced, cohort: Cohort) -> float:
        """Return the number of clients that what was heard stands for: those heard, or, corrected, those invited."""
        return float(len(cohort)) if self.kind == "known_p" else float(result.unit.sum())

    def changed(self, phase: Phase) -> Phase:
        """Return a phase whose answers it weighs."""
        return replace(phase, dated=True, reweighted=True) if self.kind == "known_p" else phase


class Weighing:
    """The cohorts of one round, weighed by their clients' chances.

    Attributes:
        metrics: "capped", the clients invited whose 1/p_i was cut; nothing where no chances are used.

    """

    def __init__(self, how: ChanceCorrection, rnd: Round):
        self._how, self._round = how, rnd
        self.metrics: dict[str, float] = {"capped": 0.0} if how.kind == "known_p" else {}

    def __call__(self, phase: Phase, cohort: Cohort, *, shared: Message, client_input: Tree = None) -> Cohort:
        """Return a cohort whose answers count as much as they have to."""
        if self._how.kind != "known_p":
            return cohort
        asked = {"shared": shared, "cohort": cohort, "client_input": client_input}
        weights, capped = inverse_chances(self._round, phase, self._how.cap, **asked)
        self.metrics["capped"] += capped
        return replace(cohort, weights=weights)


class DomainCorrection(ChanceCorrection):
    """The same, or with memory."""

    kind: Literal["none", "known_p", "memory"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """none; known_p: divide what a client sends by the chance that it is online; memory: use each client's last answer."""


def correction_of(options: AlgorithmOptions) -> Correction | ChanceCorrection | None:
    """Return the correction among an algorithm's options, whatever its kind; None where it takes none."""
    return next((value for _, value in options if isinstance(value, Correction | ChanceCorrection)), None)


class Remembered(NamedTuple):
    """What all clients last sent, by domain, float64: gradients, leaves (p, ...), and losses (p,)."""

    gradients: Tree
    losses: Tensor

    @staticmethod
    def nothing(z: Tree, domains: int) -> Remembered:
        """Return what is known before the first round."""
        zeros = T.map(lambda leaf: torch.zeros(domains, *leaf.shape, dtype=torch.float64), z)
        return Remembered(zeros, torch.zeros(domains, dtype=torch.float64))

    def after(self, result: Reduced, problem: Problem) -> Remembered:
        """Return what is known after clients have sent by how much they differ from before."""
        examples, g, loss = of_problem(problem).examples, result["g"], result["loss"]
        share = g.weight.double() / examples[g.domain]

        def added(known: Tensor, e: Tensor) -> Tensor:
            return known.index_add(0, g.domain, e.double() * T.column(share, e))

        return Remembered(T.map(added, self.gradients, g.value), added(self.losses, loss.value))

    def gradient(self, mixture: Tensor, like: Tree) -> Tree:
        """Return sum_k lambda_k V_k, in the type of a tree."""
        return T.map(lambda v, z: (v * T.column(mixture, v)).sum(0).to(z.dtype), self.gradients, like)


def nothing_sent(shared: Mapping[str, Any]) -> Tree:
    """Return what a client remembers before it has been heard."""
    zeros = T.zeros_like(shared["z"])
    return {"g": zeros, "loss": T.leaves(zeros)[0].new_zeros(())}


def differing(work: LocalWork) -> LocalWork:
    """Return work that sends "g" and "loss" as differences from what the client last sent, and remembers them."""

    def since(message: Message, shared: Mapping[str, Any], last: Tree) -> tuple[Message, Tree]:
        now = {"g": message.send["g"], "loss": message.send["loss"]}
        return replace(message, send=T.sub(now, last)), now

    return remembering(work, since)
