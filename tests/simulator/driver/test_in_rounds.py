"""Processes in rounds as the driver asks them: one answer a round, whatever the phase, the attempt, and who asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedfleet
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.devices import Homogeneous
from fedfleet.simulator.fleet.online import rates
from fedfleet.simulator.fleet.online.rounds import Independent, MarkovRounds
from fedfleet.simulator.fleet.responses import Federation, Outcome
from tests.algorithms.harness import build, digits, records

PROCESSES: dict[str, Any] = {
    "independent": Independent(rng.key(2), rates.uniform(rng.key(4), 0.1, 1.0)),
    "markov": MarkovRounds(rng.key(2), rates.constant(0.6), 0.2),
}  # fmt: skip
WORLDS = {task: digits(task, clients=24) for task in ("classification", "auc")}


def play(name: str, task: str, process: Any, rounds: int, **given: Any) -> list[Any]:
    more = {"buffer": 3, "concurrency": 8} if name == "fedbuff" else {}
    algorithm = build(name, WORLDS[task].task, CohortOptions(size=9), steps=2, batch_size=5, **more)
    federation = Federation(availability=process, devices=Homogeneous(1.0, 0.8))
    return list(records(algorithm, WORLDS[task], rounds, inner="batched", federation=federation, **given))


@pytest.mark.parametrize("name", PROCESSES)
def test_a_round_has_one_answer_in_all_phases_and_attempts(name):
    found = play("cdma_one", "auc", PROCESSES[name], 5, min_responses=5, attempts=60)
    assert any(p.attempt > 0 for r in found for p in r.phases)
    assert all(len({p.phase for p in r.phases}) == 2 for r in found)
    for record in found:
        for p in record.phases:
            online = p.responses.outcome != Outcome.UNAVAILABLE
            now = torch.zeros(len(p.clients), dtype=torch.float64)
            alone = [
                bool(PROCESSES[name].during(record.index).online(rng.key(0), c, now[:1])) for c in p.clients.split(1)
            ]
            assert online.tolist() == alone
            assert not (p.responses.outcome == Outcome.FAILED).any()  # who is online when invited is so when it answers


def test_a_round_of_an_asynchronous_server_is_a_step_and_a_client_is_online_until_it_answers():
    process = PROCESSES["independent"]
    found = play("fedbuff", "classification", process, 8, attempts=200)
    outcomes = [
        (r.index, int(c), int(f))
        for r in found
        for p in r.phases
        for c, f in zip(p.clients, p.responses.outcome, strict=True)
    ]
    assert {Outcome.UNAVAILABLE, Outcome.COMPLETED, Outcome.STALE} == {
        f for *_, f in outcomes
    }  # and nobody failed on the way
    for index, client, outcome in outcomes:
        if outcome != Outcome.STALE:  # which were invited in an earlier step
            who, now = torch.tensor([client]), torch.zeros(1, dtype=torch.float64)
            assert bool(process.during(index).online(rng.key(0), who, now)) == (outcome == Outcome.COMPLETED)


def test_a_run_goes_on_with_the_same_rounds(tmp_path):
    config = {
        "rounds": 6, "population": {"dataset": "digits", "clients": 20}, "task": {"model": "logistic"},
        "algorithm": {"name": "fedavg", "steps": 1, "batch_size": 4}, "executor": {"kind": "local"},
        "availability": {"kind": "markov_rounds", "rates": "fedawe", "off_to_on": 0.3}, "cohort": {"size": 20, "on_abort": "skip"},
    }  # fmt: skip
    whole = fedfleet.run(config, out=tmp_path / "whole").table("outcomes")
    again = fedfleet.resume(fedfleet.run(config, {"rounds": 2}, out=tmp_path / "part").folder, {"rounds": 6})
    assert again.table("outcomes").equals(whole)
    retried = fedfleet.run(config, {"cohort.on_abort": "retry", "cohort.attempts": 1}, out=tmp_path / "retried").table(
        "outcomes"
    )
    assert retried[["client", "outcome"]].equals(whole[["client", "outcome"]])
