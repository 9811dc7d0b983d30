"""Clients' privacy spending, against outcomes.parquet: aborted attempts and late answers spend nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

import fedfleet
from tests.parts import slow_but

Z, DELTA, INVITE = 1.3, 1e-3, 8
BASE: dict[str, Any] = {
    "rounds": 8, "population": {"clients": 24}, "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 1, "batch_size": 5, "weight": "uniform"},
    "availability": {"kind": "bernoulli", "rate": 0.75}, "devices": "lognormal",
    "cohort": {"size": INVITE, "attempts": 60},
    "privacy": {"clip_norm": 0.5, "delta": DELTA, "noise_multiplier": Z},
    "executor": {"kind": "local", "inner": "serial"}, "evaluation": {"every": 1},
}  # fmt: skip
MASKED = {"rounding": "toward_zero", "dropout": {"masked": 0.1, "unmasking": 0.15}}
CASES: dict[str, dict[str, Any]] = {
    "too few": {"cohort.min_responses": 7},
    "drawn each for itself": {"selection": "poisson", "cohort.min_responses": 7},
    "in turn": {"selection": "round_robin", "cohort.min_responses": 7},
    "late": {"cohort.wait_for": 5},
    "late, and too few": {"cohort.wait_for": 6, "cohort.min_responses": 6, "availability.rate": 0.6},
    "too late, and too few": {"cohort.deadline_s": 0.043, "cohort.min_responses": 5},
    "noise of clients": {"privacy.noise": "clients", "cohort.wait_for": 7, "cohort.min_responses": 6, "availability.rate": 0.7},
    "masked": {"secure_aggregation": MASKED, "cohort.min_responses": 2},
}  # fmt: skip


def worth(spent: float) -> float:
    """Epsilon of Gaussian noise of Z over the root of that, by the closed form of Balle & Wang 2018."""
    mu = math.sqrt(spent) / Z
    normal = lambda x: math.erfc(-x / math.sqrt(2)) / 2  # noqa: E731
    low, high = 0.0, 100.0
    for _ in range(60):
        e = (low + high) / 2
        above = normal(mu / 2 - e / mu) - math.exp(e) * normal(-mu / 2 - e / mu) > DELTA
        low, high = (e, high) if above else (low, e)
    return high


def counted(outcomes: Any, each: Any, until: int) -> Any:
    """What each client has spent by the end of a round, each time it was heard in a round as much as ``each`` says."""
    there = outcomes[outcomes["round"] <= until]
    return there["round"].map(each).groupby(there.client).sum()


@pytest.mark.parametrize("case", slow_but(CASES, "in turn", "late, and too few", "masked"))
def test_a_client_spends_when_it_is_heard_in_an_attempt_that_counts(tmp_path, case):
    found = fedfleet.run(BASE, CASES[case], out=tmp_path / "run")
    outcomes: Any = found.table("outcomes")
    told = found.summary["privacy"]
    last = outcomes.attempt == outcomes.groupby("round").attempt.transform("max")
    heard = outcomes[last & (outcomes.outcome == "completed")]
    assert not heard.duplicated(["round", "client"]).any()
    size = heard.groupby("round").size()
    each = INVITE / size if CASES[case].get("privacy.noise") == "clients" else size * 0.0 + 1.0
    spent = [counted(heard, each, t).max() for t in range(8)]
    assert (told["accounting"], told["sampling_rate"], told["exchanges"]) == ("participation", None, 8)
    assert told["clients_heard"] == heard.client.nunique()
    assert told["spent_most"] == pytest.approx(spent[-1], rel=1e-12)
    assert found.rounds["eval/epsilon_spent"].tolist() == pytest.approx([worth(s) for s in spent], rel=1e-6)
    assert told["epsilon"] == found.rounds["eval/epsilon_spent"].iloc[-1]
    # What is not to count is there, and would change what is spent.
    if "min_responses" in str(CASES[case]):
        assert counted(outcomes[outcomes.outcome == "completed"], each, 8).max() > spent[-1]
    if "late" in case:
        assert (
            counted(outcomes[last & outcomes.outcome.isin(["completed", "late"])], each, 8).sum()
            > counted(heard, each, 8).sum()
        )


def test_void_attempts_bring_no_end_nearer(tmp_path):
    given = {"cohort.min_responses": 7, "rounds": 40, "privacy.epsilon": 5.0}
    found = fedfleet.run(BASE, given, out=tmp_path / "run")
    told, attempts = found.summary, found.table("outcomes").groupby(["round", "attempt"]).ngroups
    assert told["status"] == "stopped"
    assert len(found.rounds) == told["privacy"]["exchanges"] < attempts
    most = told["privacy"]["spent_most"]
    assert worth(most) <= 5 < worth(most + 1)


FEW = {"population.clients": 8, "cohort.size": 2, "availability.rate": 0.4, "rounds": 20}
IN_TURN = {
    "too few": {"cohort.min_responses": 7, "rounds": 40, "privacy.epsilon": 5.0},
    "nobody": {**FEW, "privacy.noise_multiplier": None, "privacy.epsilon": 3.0},
}


@pytest.mark.parametrize("case", IN_TURN)
def test_void_attempts_make_nobody_asked_in_turn_spend_more_than_is_promised(tmp_path, case):
    found = fedfleet.run(BASE, {"selection": "round_robin", **IN_TURN[case]}, out=tmp_path / "run")
    assert found.table("outcomes").attempt.max() > 0
    assert found.summary["privacy"]["epsilon"] <= found.summary["privacy"]["budget"]


@pytest.mark.slow
def test_noise_found_for_examples_lasts_though_attempts_are_void(tmp_path):
    hidden = {"privacy": None, "example_privacy": {"clip_norm": 1.0, "delta": 1e-5, "epsilon": 3}}
    found = fedfleet.run(BASE, {"selection": "round_robin", **FEW, **hidden}, out=tmp_path / "run")
    assert found.table("outcomes").attempt.max() > 0
    assert (found.summary["status"], len(found.rounds)) == ("finished", FEW["rounds"])
    assert found.summary["example_privacy"]["epsilon"] <= 3
