"""Late answers: what is thrown away leaves no trace, what is kept counts later, and less."""

import pytest
import torch
from harness import Bowl, Fixed, World, build, digits, flat, play, records, rows, script

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.policies import Deadline, First, Siwer
from fedfleet.simulator.fleet.responses import Federation, Outcome

BOWL = World(Bowl(), rows(*[[(1.0, m)] for m in (1.0, 2.0, 3.0, 4.0, 5.0)]))
STEP = {"steps": 1, "batch_size": 1, "lr": 0.5}


def fedavg(invite):
    return build("fedavg", BOWL.task, CohortOptions(size=invite), **STEP, weight="uniform")


def moved(w, m):
    """One step of half the way to the client's minimum."""
    return w + 0.5 * (m - w)


def points(monkeypatch, cohorts, federation, **given):
    script(monkeypatch, cohorts)
    found = list(records(fedavg(2), BOWL, len(cohorts), federation=federation, **given))
    return [float(r.state.z["x"]["w"]) for r in found], [r.phases[-1] for r in found]


def test_a_late_answer_counts_in_the_next_round_with_its_discount(monkeypatch):
    # Client 3 takes 4 s where the others take 1: late in round 0, it comes in while round 2 waits for client 2, at 4 s.
    federation = Federation(devices=Fixed((1.0, 1.0, 2.0, 3.5, 9.0)), policy=First(1))
    cohorts = [[0, 3], [1, 4], [2, 4], [0, 4]]
    ws, phases = points(monkeypatch, cohorts, federation, stale_discount=0.5)
    w1 = moved(1.0, 1.0)
    w2 = moved(w1, 2.0)
    w3 = (moved(w2, 3.0) + 0.25 * moved(1.0, 4.0)) / 1.25  # started at the initial point, two rounds of delay
    assert ws[:3] == pytest.approx([w1, w2, w3])
    assert ws[3] == pytest.approx(moved(w3, 1.0))  # it counts once
    assert [p.counts["stale"] for p in phases] == [1, 1, 1, 1]
    assert [p.counts["merged_stale"] for p in phases] == [0, 0, 1, 0]
    assert [p.counts["floats_up"] for p in phases] == [1, 1, 2, 1]
    assert [Outcome(f) for f in phases[0].responses.outcome.tolist()] == [Outcome.COMPLETED, Outcome.STALE]


def test_late_answers_are_thrown_away_by_default(monkeypatch):
    federation = Federation(devices=Fixed((1.0, 1.0, 2.0, 3.5, 9.0)), policy=First(1))
    ws, phases = points(monkeypatch, [[0, 3], [1, 4], [2, 4]], federation)
    assert ws == pytest.approx([1.0, 1.5, 2.25])
    assert [Outcome(f) for f in phases[0].responses.outcome.tolist()] == [Outcome.COMPLETED, Outcome.LATE]
    assert sum(p.counts["stale"] + p.counts["merged_stale"] for p in phases) == 0


def test_late_answers_of_a_void_attempt_are_not_kept(monkeypatch):
    federation = Federation(devices=Fixed((1.0, 1.0, 2.0, 3.5, 9.0)), policy=Deadline(1.5))
    script(monkeypatch, [[0, 3], [2, 4], [0, 1], [0, 1], [0, 1]])
    found = list(records(fedavg(2), BOWL, 2, federation=federation, stale_discount=0.5, min_responses=2))
    assert [[p.counts["completed"] for p in r.phases] for r in found] == [[1, 0, 2], [2]]
    assert all(p.counts["stale"] == p.counts["merged_stale"] == 0 for r in found for p in r.phases)
    assert found[0].virtual_s == pytest.approx(1.5 + 1 + 1.5 + 1 + 1)  # with a second after each aborted attempt


class Counting(LocalExecutor):
    """Counts the clients that work."""

    clients = 0

    def map(self, job, shared, tasks, **given):
        tasks = list(tasks)
        self.clients += sum(len(t.clients) for t in tasks)
        return super().map(job, shared, tasks, **given)


@pytest.mark.parametrize("name", ["scaffold", "cdma_ada"])
def test_training_everybody_changes_nothing(name):
    world = digits("auc" if name == "cdma_ada" else "classification")
    algorithm = build(name, world.task, CohortOptions(size=6), steps=2, batch_size=5)
    few, all_of_them = Counting(), Counting()
    plain = play(algorithm, world, 4, federation=Federation(policy=Siwer()), executor=few)
    wasteful = play(algorithm, world, 4, federation=Federation(policy=Siwer()), executor=all_of_them, train_all=True)
    for a, b in zip(plain, wasteful, strict=True):
        assert torch.equal(flat(a), flat(b))
    phases = len(algorithm.phases)
    assert few.clients < all_of_them.clients == 4 * 6 * phases


def test_both_phases_of_cdma_keep_late_answers_of_their_own():
    world = digits("auc")
    algorithm = build("cdma_ada", world.task, CohortOptions(size=6), steps=2, batch_size=5)
    found = list(records(algorithm, world, 6, federation=Federation(policy=Siwer(0.3, 0.6)), stale_discount=0.5))
    merged = {
        name: sum(p.counts["merged_stale"] for r in found for p in r.phases if p.phase == name)
        for name in ("gradient", "update")
    }
    assert min(merged.values()) > 0
    kept = sum(p.counts["stale"] for r in found for p in r.phases)
    assert sum(merged.values()) <= kept
    assert all(torch.isfinite(flat(r.state.z)).all() for r in found)
