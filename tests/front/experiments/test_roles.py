"""Domains with labels and without: who takes part, that no label of a target reaches client code, how roles are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fedfleet
from fedfleet.assembly.weights import load_model
from fedfleet.commands.plan import describe
from fedfleet.datasets.digits import load
from fedfleet.experiments import sweep
from fedfleet.files.summary import summary_of
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    BatchPlan,
    CollectUploads,
    LocalLoop,
    LocalWork,
    Mean,
    Message,
    Phase,
    View,
)
from fedfleet.simulator.driver.round import EngineRound
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.population import gather
from tests.front.experiments.resuming import THREE
from tests.refusals import all_say, refused, tells

BASE: dict[str, Any] = {
    "rounds": 2,
    "population": THREE,
    "domains": {"kind": "given", "target": 4}, "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "lr": 0.05}, "cohort": {"size": 6}, "executor": {"kind": "local"},
    "evaluation": {"every": 2},
}  # fmt: skip

SPIED = {**BASE, "algorithm": "fedavg", "cohort": {"size": 9}}


def prepared(**changes: Any) -> fedfleet.Experiment:
    return fedfleet.Experiment(fedfleet.load(BASE, changes))


def spy(role: str | None = None, size: int = 9, inner_batches: BatchPlan | None = None) -> Algorithm:
    """An algorithm whose clients send all that they can read of their data."""
    plan = inner_batches or BatchPlan(size=7, steps=60)

    def client_init(shared, client_state, client_input, key):
        return {"most": torch.full((), -5), "read": torch.zeros(2), "rows": torch.zeros(())}

    def step(ops, shared, carry, batch, at, key):
        real = batch.weight > 0
        target = batch.data["target"] & real
        y = torch.where(target, batch.y, -5).amax()
        counts = torch.stack([target.sum(), (~batch.data["target"] & real).sum()]).float()
        return {
            "most": torch.maximum(carry["most"], y), "read": carry["read"] + counts, "rows": carry["rows"] + real.sum(),
        }  # fmt: skip

    def client_final(shared, client_state, client_input, carry):
        return Message(send={"seen": carry, "z": shared["z"]}), client_state

    work = LocalWork(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)
    phase = Phase(name="look", work=work, reduce={"seen": CollectUploads(), "z": Mean()})

    def round_(z, rnd):
        rnd.map_reduce(phase, shared=Message(send={"z": z}), cohort=rnd.invite(size, role=role))
        return z, {}

    return Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)}, roles=True)


def run(spying: Algorithm, tmp_path, **changes: Any):
    config = fedfleet.load(SPIED, {"rounds": 1, "checkpoint.best": None, **changes})
    experiment = fedfleet.Experiment(config, algorithm=spying)
    asked, seen = EngineRound.map_reduce, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineRound, "map_reduce", lambda *a, **given: seen.append(asked(*a, **given)) or seen[-1])
        experiment.run(tmp_path / "run")
    found = seen[-1]
    return experiment, (found.received, torch.cat([b["most"] for b in found["seen"].blocks]), found)


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
    everybody = fedfleet.Experiment(fedfleet.load(SPIED), algorithm=spy()).population
    found = everybody.local_data(torch.arange(9))
    rows = found.rows[found.domain == 1].flatten().unique()
    assert (found.data["y"][rows] == -1).all()
    assert found.data["target"][rows].all()
    assert everybody.labels(torch.arange(9)) is None


@pytest.mark.parametrize("role", ["source", "target"])
def test_invitations_by_role(role, tmp_path):
    x, (received, _, _) = run(spy(role, 3), tmp_path, **{"cohort.size": 3})
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
    given = {"population.partition": {"kind": "iid"}, "cohort.size": 9}
    x, everybody = prepared(**given), prepared(**given, **{"domains.target": []})
    assert x.problem.clients == 9
    all_of, one = (p.population.local_data(torch.arange(9)) for p in (everybody, x))
    dealt = torch.cat([rows[:n] for rows, n in zip(all_of.rows, all_of.counts, strict=True)])
    assert int(one.counts.sum()) == int((all_of.data["y"][dealt] != 1).sum())
    both = fedfleet.Experiment(fedfleet.load(SPIED, given), algorithm=spy())
    assert all(map(torch.equal, (both.problem.sources, both.problem.targets), (torch.arange(9), torch.arange(9))))
    held = both.population.local_data(torch.arange(9))
    for rows, labelled, count in zip(held.rows, held.labelled, held.counts, strict=True):
        hidden = held.data["target"][rows[:count]]
        assert not hidden[:labelled].any()
        assert hidden[labelled:].all()


@pytest.mark.parametrize("inner", ["serial", "batched"])
def test_stratified_batches_hold_both_in_proportion(inner, tmp_path):
    plan = BatchPlan(size=10, steps=5, stratified="proportional")
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


def test_models_are_selected_by_held_out_examples_without_their_labels(tmp_path):
    asked = {"evaluation": {"every": 1, "validation": 0.25}, "rounds": 4}
    x, whole = prepared(**asked, **{"checkpoint.best": "eval/validation_target_density"}), prepared()
    done = x.run(tmp_path / "run")
    held = x.evaluation["validation"]
    assert int(held["target"].sum()) == round(0.25 * int((load(Path()).train.y == 4).sum()))
    assert int(x.problem.num_examples(torch.arange(6)).sum()) < int(whole.problem.num_examples(torch.arange(6)).sum())
    inside = x.population.data["x"].flatten(1)
    assert not (held["x"].flatten(1)[:, None] == inside[None]).all(-1).any() or len(inside) == 0
    final = done.summary["final"]
    for name in ("entropy", "information", "density"):
        assert f"eval/validation_target_{name}" in final
    model = load_model(done.folder / "model.safetensors", x.z)
    outputs = x.task.functions["predict"](
        model, Batch(gather(held, torch.arange(len(held["y"]))), torch.ones(len(held["y"])))
    )
    p = outputs[held["target"]].softmax(1)
    assert final["eval/validation_target_entropy"] == pytest.approx(float(-(p * p.log()).sum(1).mean()), rel=1e-4)
    right = (outputs.argmax(1) == held["y"])[~held["target"]].double().mean()
    assert final["eval/validation_source_accuracy"] == pytest.approx(float(right))
    assert list(final) == x.metric_names()
    measure = "eval/validation_target_density"
    most = max(done.rounds[measure].max(), done.summary["initial"][measure])
    assert done.summary["best"][measure] == pytest.approx(most)


def test_a_run_can_stop_by_a_role(tmp_path):
    done = prepared(rounds=20, until="eval/source_accuracy=0.05", **{"evaluation.every": 1}).run(tmp_path / "run")
    assert len(done.rounds) < 20


def test_roles_that_cannot_be(subtests):
    rows = [
        ({"domains.target": 3}, "^domains.target=3: unknown; choose of 1, 4, 8"),
        ({"domains.target": "84"}, "did you mean '8'"),
        ({"domains.target": [1, 4, 8]}, "no domain is left as a source"),
        ({"domains.target": [8, 8]}, "give each domain once"),
        ({"population.dataset.label_domains": False, "population.partition": "iid"},
         "has no domains: choose one that has"),
        ({"cohort.size": 7}, "cohort.size=7: only 6 clients have labels"),
        ({"algorithm": {"name": "afl", "dual.lr": 0.1}}, "domains.target=4: afl learns on domains with labels"),
        ({"domains": {"kind": "label", "target": 4}}, "domains.target"),
    ]  # fmt: skip
    all_say(subtests, lambda change: prepared(**change), rows)


def test_an_algorithm_of_roles_needs_targets():
    none = fedfleet.load(SPIED, {"domains.target": []})
    tells(lambda: fedfleet.Experiment(none, algorithm=spy()), "no domain is a target")
    with pytest.raises(ConfigError, match=r"clients of domains\.target have no labels to be evaluated by"):
        fedfleet.Experiment(fedfleet.load(SPIED, {"evaluation.per_client": True}), algorithm=spy())
    with pytest.raises(ConfigError, match="drawn uniformly"):
        fedfleet.Experiment(fedfleet.load(SPIED, {"selection": "examples"}), algorithm=spy())


def test_clients_evaluated_on_their_own_data_are_sources_alone(tmp_path):
    done = prepared(**{"evaluation.per_client": True}).run(tmp_path / "run")
    assert len(done.table("clients").query("round == 1")) == 6


def test_every_domain_is_left_out_in_turn():
    config = fedfleet.load(BASE, {"vary": {"domains.target": ["each"]}, "seeds": [0, 1]})
    plan = sweep.planned(config)
    assert [t.point["domains.target"] for t in plan] == ["1", "1", "4", "4", "8", "8"]
    assert [t.config.domains.target for t in plan] == ["1", "1", "4", "4", "8", "8"]
    bare = {"population.dataset.label_domains": False, "population.partition": "iid"}
    config = fedfleet.load(BASE, {"vary": {"domains.target": ["each"]}, **bare})
    refused(lambda: sweep.planned(config), "vary.domains.target=[each]: the data set 'digits' has no domains by name")


TABLE = """
title: Digits
source: a paper, Table 1
config: digits.yaml
across: {key: domains.target, metric: target_loss, columns: {ones: 1, eights: 8}}
mean_of: [ones, eights]
worst_of: [ones, eights]
baseline: plain
digits: 3
paper: {slow: {ones: 1.5, mean: 2.5, worst: 3.5}}
"""


@pytest.mark.slow
def test_a_table_whose_columns_are_runs(tmp_path, command):
    given = {**BASE, "compare": {"plain": {}, "slow": {"algorithm.lr": 0.001}}}
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(given))
    (tmp_path / "table.yaml").write_text(TABLE)
    asked = ["paper", tmp_path / "table.yaml", "--seeds", 2, "--jobs", 1, "--out", tmp_path / "out"]
    status, out, _ = command(*asked)
    assert status == 0
    lines = out.splitlines()
    assert lines[2] == "| trained on | | ones | eights | worst | mean | worst of the means |"
    found = json.loads((tmp_path / "out" / "table.json").read_text())
    ran = [p.parent for p in sorted((tmp_path / "out").rglob("summary.json"))]
    assert len(ran) == 8
    each = {
        (yaml.safe_load((r / "config.yaml").read_text())["domains"]["target"], r): summary_of(r)["final"] for r in ran
    }
    for row in ("plain", "slow"):
        losses = [[v["eval/target_loss"] for (t, r), v in each.items() if t == k and row in str(r)] for k in (1, 8)]
        assert [found[row]["ones"], found[row]["eights"]] == losses
        assert found[row]["mean"] == pytest.approx([sum(pair) / 2 for pair in zip(*losses, strict=True)])
        assert found[row]["worst"] == pytest.approx([max(pair) for pair in zip(*losses, strict=True)])
    assert "| | paper | 1.500 |  |  | 2.500 | 3.500 |" in lines


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
def test_domains_dealt_by_share(share):
    given = {"population": {"clients": 4, "partition": {"kind": "domain_share", "share": share, "sides": [1, 3]}}}
    given["cohort.size"] = 4
    x = fedfleet.Experiment(fedfleet.load(SPIED, given), algorithm=spy(size=4))
    held = x.population.local_data(torch.arange(4))
    labelled, unlabelled = held.labelled, held.counts - held.labelled
    assert float(labelled[0] / labelled.sum()) == pytest.approx(share, abs=0.01)
    assert float(unlabelled[1:].sum() / unlabelled.sum()) == pytest.approx(share, abs=0.01)
    assert x.problem.sources.tolist() == ([0] if share == 1 else [0, 1, 2, 3])
    refused(lambda: prepared(**given, **{"domains.target": []}), "population.partition='domain_share'")
    tells(lambda: prepared(**given, **{"population.partition.share": 1.5}), "population.partition.share=1.5")


real_digits = pytest.mark.data("digits/mnist_5k.csv.gz")
ADAPTS: dict[str, Any] = {
    "population": {"dataset": {"name": "domains_digits", "per_domain": 60}, "clients": 5, "partition": "by_domain"},
    "domains": {"target": "mnistm"},
    "task": {"name": "two_heads", "hidden": [8]},
    "evaluation": {"every": 1},
}
KD3A = {"algorithm": {"name": "kd3a", "batch_size": 30}, "cohort": {"size": 4}}
FEDKA = {
    "algorithm": {"name": "fedka", "steps": 2, "pairs": 4, "every": 2, "votes": 2, "batch_size": 8},
    "cohort": {"size": 4},
    "task": {"name": "domain_adaptation", "hidden": [8]},
    "domains": {"target": "mnistm", "share_target": True},
}
FADA = {
    "algorithm": {"name": "fada", "steps": 2, "batch_size": 8, "clusters": 3},
    "cohort": {"size": 4},
    "task": {"name": "domain_adaptation", "hidden": [8]},
}
M3SDA = {
    "algorithm": {"name": "m3sda", "batch_size": 20, "steps": 2, "lr": 0.01},
    "cohort": {"size": 1},
    "population": {**ADAPTS["population"], "clients": 1, "partition": "iid"},
}


@real_digits
@pytest.mark.parametrize("given", [KD3A, FEDKA, FADA, M3SDA], ids=["kd3a", "fedka", "fada", "m3sda"])
def test_facts_company_runs_from_a_configuration(given, tmp_path):
    """Rounds of a run are those that gates and weights rise over, and the target is measured."""
    config = fedfleet.load({**ADAPTS, **given, "rounds": 2})
    if "rounds" in type(config.algorithm).model_fields:
        assert config.algorithm.rounds == 2
    fedfleet.run(config, out=tmp_path / "run")
    assert 0 <= summary_of(tmp_path / "run")["final"]["eval/target_accuracy"] <= 1


@real_digits
def test_examples_say_their_domain_where_batches_are_made_by_it():
    """On one client that holds all: four sources of 60 images, and the target last; elsewhere nothing is told."""
    held = fedfleet.Experiment(fedfleet.load({**ADAPTS, **M3SDA, "rounds": 1})).population
    assert held.by_domain.tolist() == [[60] * 5]
    local = held.local_data(torch.tensor([0]))
    target = local.data["target"][local.rows[0]]
    assert target.tolist() == [False] * 240 + [True] * 60
    assert torch.equal(local.data["domain"][local.rows[0]][:, -1], target)
    other = fedfleet.Experiment(fedfleet.load({**ADAPTS, **KD3A, "rounds": 1})).population
    assert "domain" not in other.data


@real_digits
def test_sources_hold_the_targets_examples_where_these_are_shared():
    shared = fedfleet.Experiment(fedfleet.load({**ADAPTS, **FEDKA, "rounds": 1}))
    assert sorted(shared.population.num_examples(torch.arange(5)).tolist()) == [60, 120, 120, 120, 120]
    assert len(shared.problem.sources) == 4
    assert len(shared.problem.targets) == 5


@real_digits
def test_what_fits_no_domains_is_refused(subtests):
    digits = {"population.dataset": {"name": "digits"}, "population.partition": "iid"}
    for given, changes, key in (
        (M3SDA, {"algorithm.batch_size": 4}, "algorithm.batch_size=4: "),
        (FEDKA, {"domains.share_target": False}, "domains.share_target=false: "),
        (KD3A, {"algorithm.rounds": 5}, "algorithm.rounds=5: "),
        (KD3A, {"algorithm": "fedavg", "domains.share_target": True}, "domains.share_target=true: "),
        (M3SDA, {**digits, "domains.target": ()}, "algorithm.name='m3sda'"),
        (KD3A, {"domains.share_target": True, "domains.target": ()}, "domains"),
        (FADA, {"task": {"name": "two_heads", "hidden": [8]}}, "algorithm.name='fada'"),
        (FADA, {"domains.target": ()}, "algorithm.name='fada'"),
        (FADA, {"algorithm.targets": 2}, "algorithm.targets=2: "),
    ):
        with subtests.test(key):
            refused(lambda g=given, c=changes: fedfleet.Experiment(fedfleet.load({**ADAPTS, **g, "rounds": 2}, c)), key)
