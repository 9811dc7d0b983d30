"""Domains with labels and without: who takes part, that no label of a target reaches client code, how roles are measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedfleet
from fedfleet.commands.plan import describe
from fedfleet.simulator.author import Algorithm, BatchPlan, LocalWork, Mean, Message, Phase, Stage, Store, View
from fedfleet.simulator.errors import ConfigError

BASE: dict[str, Any] = {
    "rounds": 2,
    "population": {
        "dataset": {"name": "digits", "classes": [1, 4, 8], "label_domains": True},
        "clients": 9,
        "partition": {"kind": "by_domain"},
    },
    "domains": {"kind": "given", "target": 4},
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "lr": 0.05},
    "cohort": {"invite": 6},
    "executor": {"kind": "local"},
    "evaluation": {"every": 2},
}

SPIED = {**BASE, "algorithm": "fedavg", "cohort": {"invite": 9}}


def prepared(**changes: Any) -> fedfleet.Experiment:
    return fedfleet.Experiment(fedfleet.load(BASE, changes))


def spy(role: str | None = None, size: int = 9, inner_batches: BatchPlan | None = None) -> tuple[Algorithm, list[Any]]:
    """An algorithm whose clients send all that they can read of their data."""
    plan = inner_batches or BatchPlan(size=7, steps=60)

    def begin(shared, own, inbox, key):
        return {"most": torch.full((), -5), "read": torch.zeros(2), "rows": torch.zeros(())}

    def step(ops, shared, carry, batch, at, key):
        real = batch.weight > 0
        target = batch.data["target"] & real
        y = torch.where(target, batch.y, -5).amax()
        counts = torch.stack([target.sum(), (~batch.data["target"] & real).sum()]).float()
        return {
            "most": torch.maximum(carry["most"], y),
            "read": carry["read"] + counts,
            "rows": carry["rows"] + real.sum(),
        }

    def finish(shared, own, inbox, carry):
        return Message(send={"seen": carry, "z": shared["z"]}), own

    work = LocalWork(begin=begin, stages=(Stage(step=step, batches=plan),), finish=finish)
    phase = Phase(name="look", work=work, reduce={"seen": Store(), "z": Mean()})
    seen: list[Any] = []

    def round_(z, rnd):
        found = rnd.map_reduce(phase, shared=Message(send={"z": z}), cohort=rnd.invite(size, role=role))
        seen.append((found.received, torch.cat([b["most"] for b in found["seen"].blocks]), found))
        return z, {}

    made = Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)}, roles=True)
    return made, seen


def run(spying: tuple[Algorithm, list[Any]], tmp_path, **changes: Any):
    algorithm, seen = spying
    config = fedfleet.load(SPIED, {"rounds": 1, "checkpoint.best": None, **changes})
    experiment = fedfleet.Experiment(config, algorithm=algorithm)
    experiment.run(tmp_path / "run")
    return experiment, seen[-1]


def test_no_label_of_a_target_reaches_client_code(tmp_path):
    x, (received, most, _) = run(spy(), tmp_path)
    is_target = x.population.domains(received) == 1
    assert is_target.any()
    assert (most[is_target] == -1).all()
    assert (most[~is_target] == -5).all()  # no row of theirs is of a target


def test_nor_by_the_population_itself():
    x = prepared(**{"algorithm.name": "fedavg"})
    held = x.population.local_data(torch.arange(x.population.size))
    assert "target" not in held.data  # sources alone take part
    everybody = fedfleet.Experiment(fedfleet.load(SPIED), algorithm=spy()[0]).population
    found = everybody.local_data(torch.arange(9))
    rows = found.rows[found.domain == 1].flatten().unique()
    assert (found.data["y"][rows] == -1).all()
    assert found.data["target"][rows].all()
    assert everybody.labels(torch.arange(9)) is None


@pytest.mark.parametrize("role", ["source", "target"])
def test_invitations_by_role(role, tmp_path):
    x, (received, _, _) = run(spy(role, 3), tmp_path, **{"cohort.invite": 3})
    assert len(received) == 3
    assert ((x.population.domains(received) == 1) == (role == "target")).all()
    told = x.problem.sources if role == "source" else x.problem.targets
    assert set(received.tolist()) <= set(told.tolist())


def test_an_algorithm_that_knows_no_roles_learns_from_sources_alone():
    x, everybody = prepared(), prepared(**{"domains.target": []})
    assert (x.problem.clients, everybody.problem.clients) == (6, 9)
    assert not (x.population.domains(torch.arange(6)) == 1).any()
    total = int(
        everybody.problem.num_examples(torch.arange(9))[everybody.population.domains(torch.arange(9)) != 1].sum()
    )
    assert int(x.problem.num_examples(torch.arange(6)).sum()) == total
    assert x.config.population.clients == 9  # as they are dealt
    told = dict(describe(x))
    assert "6 of 9" in " ".join(told.values())


def test_clients_that_hold_both_kinds_keep_what_is_labelled():
    given = {"population.partition": {"kind": "iid"}, "cohort.invite": 9}
    x, everybody = prepared(**given), prepared(**given, **{"domains.target": []})
    assert x.problem.clients == 9
    all_of, one = (p.population.local_data(torch.arange(9)) for p in (everybody, x))
    dealt = torch.cat([rows[:n] for rows, n in zip(all_of.rows, all_of.counts, strict=True)])
    assert int(one.counts.sum()) == int((all_of.data["y"][dealt] != 1).sum())
    both = fedfleet.Experiment(fedfleet.load(SPIED, given), algorithm=spy()[0])
    assert torch.equal(both.problem.sources, torch.arange(9))
    assert torch.equal(both.problem.targets, torch.arange(9))
    held = both.population.local_data(torch.arange(9))
    for rows, labelled, count in zip(held.rows, held.labelled, held.counts, strict=True):
        hidden = held.data["target"][rows[:count]]
        assert not hidden[:labelled].any()
        assert hidden[labelled:].all()


@pytest.mark.parametrize("inner", ["serial", "batched"])
def test_stratified_batches_hold_both_in_proportion(inner, tmp_path):
    plan = BatchPlan(size=10, steps=5, stratified=True)
    given = {"population.partition": {"kind": "iid"}, "executor.inner": inner}
    x, (received, _, found) = run(spy(None, 9, plan), tmp_path, **given)
    held = x.population.local_data(received)
    labelled = (10 * held.labelled).div(held.counts, rounding_mode="floor")
    read = torch.cat([b["read"] for b in found["seen"].blocks])
    assert read[:, 1].tolist() == (5 * labelled).tolist()
    assert read[:, 0].tolist() == (5 * (10 - labelled)).tolist()


def test_metrics_of_sources_and_targets(tmp_path):
    x = prepared()
    done = x.run(tmp_path / "run")
    final, domains = done.summary["final"], done.table("domains").query("round == 1")
    assert final["eval/target_accuracy"] == pytest.approx(domains["accuracy"].iloc[1])
    sizes = domains["examples"].iloc[[0, 2]]
    want = (domains["accuracy"].iloc[[0, 2]] * sizes).sum() / sizes.sum()
    assert final["eval/source_accuracy"] == pytest.approx(want)
    assert list(done.summary["initial"]) == list(final) == x.metric_names()
    assert "eval/target_loss" in final


def test_a_run_can_stop_by_a_role(tmp_path):
    done = prepared(rounds=20, until="eval/source_accuracy=0.05", **{"evaluation.every": 1}).run(tmp_path / "run")
    assert len(done.rounds) < 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"domains.target": 3}, "domains.target=3: unknown; choose of 1, 4, 8"),
        ({"domains.target": "84"}, "did you mean '8'"),
        ({"domains.target": [1, 4, 8]}, "no domain is left as a source"),
        ({"domains.target": [8, 8]}, "give each domain once"),
        (
            {"population.dataset.label_domains": False, "population.partition": "iid"},
            "has no domains: choose one that has",
        ),
        ({"cohort.invite": 7}, "cohort.invite=7: only 6 clients have labels"),
        ({"algorithm": {"name": "afl", "dual.lr": 0.1}}, "domains.target=4: afl learns on domains with labels"),
        ({"domains": {"kind": "label", "target": 4}}, "domains.target"),
    ],
)
def test_roles_that_cannot_be(change, says):
    with pytest.raises(ConfigError, match=says):
        prepared(**change)


def test_an_algorithm_of_roles_needs_targets():
    with pytest.raises(ConfigError, match="it learns from domains without labels, and no domain is a target"):
        fedfleet.Experiment(fedfleet.load(SPIED, {"domains.target": []}), algorithm=spy()[0])
    with pytest.raises(ConfigError, match=r"clients of domains\.target have no labels to be evaluated by"):
        fedfleet.Experiment(fedfleet.load(SPIED, {"evaluation.per_client": True}), algorithm=spy()[0])
    with pytest.raises(ConfigError, match="draws clients by their role, uniformly"):
        fedfleet.Experiment(fedfleet.load(SPIED, {"selection": "examples"}), algorithm=spy()[0])


def test_clients_evaluated_on_their_own_data_are_sources_alone(tmp_path):
    done = prepared(**{"evaluation.per_client": True}).run(tmp_path / "run")
    assert len(done.table("clients").query("round == 1")) == 6
