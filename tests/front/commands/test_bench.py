"""``fedfleet bench``: the account adds up, timing changes nothing, a failing candidate is told. No time is asserted."""

import json
from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
import torch
import yaml
from rich.console import Console

from fedfleet import load
from fedfleet.commands import bench, rules
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors import timed
from fedfleet.simulator.executors.base import Host
from fedfleet.simulator.executors.inner import InnerExecutor
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.executors.timed import TimedExecutor
from tests.front.commands.lines import all_told

TINY = {
    "population": {"clients": 20}, "task": {"name": "auc", "model": "mlp", "hidden": [4]},
    "algorithm": {"name": "cdma_ada", "steps": 2, "batch_size": 5}, "cohort": {"size": 8, "wait_for": "siwer"},
    "availability": {"kind": "bernoulli", "rate": 0.9}, "executor": {"kind": "local", "block_size": 3},
    "evaluation": {"every": 2},
}  # fmt: skip


@pytest.fixture
def bench_command(command, tmp_path):
    """Run ``fedfleet bench`` on the tiny configuration."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    return partial(command, "bench", path)


def tiny(**overrides):
    return Experiment(load(TINY, overrides))


def final_model(x, executor, rounds=3):
    executor.start(x.setup())
    *_, last = simulate(x.algorithm, x.z, x.problem, x.conditions(), executor, rounds)
    return T.leaves(x.algorithm.views["global"].params(last.state))


def check_account(found):
    n, wall = found["rounds"], found["wall_seconds_per_round"]
    driver, workers = found["driver_seconds_per_round"], found["workers_seconds_per_round"]
    assert list(driver) == list(bench.DRIVER)
    assert min(driver.values()) >= 0
    assert sum(driver.values()) == pytest.approx(wall)
    assert driver["sampling"] > 0
    assert min(workers["phases"].values()) > 0
    spent = sum(workers["phases"].values()) + workers["evaluation"] + workers["idle"]
    assert spent == pytest.approx(found["workers"] * wall)
    assert found["idle_share"] == pytest.approx(workers["idle"] / (found["workers"] * wall))
    assert found["seconds_per_round"] > 0
    assert found["client_updates_per_s"] > 0
    blocks = sum(p["blocks_per_round"] * n for p in found["phases"].values())
    assert blocks == pytest.approx(round(n * found["blocks_per_round"]))


def test_the_account_adds_up():
    found = bench.measure(tiny(), rounds=4)
    assert (found["rounds"], found["evaluations"], found["workers"]) == (4, 2, 1)
    assert list(found["phases"]) == ["gradient", "update"]
    assert found["workers_seconds_per_round"]["evaluation"] > 0
    assert found["workers_seconds_per_round"]["idle"] > 0  # in one process the driver's work is not the workers'
    check_account(found)
    json.dumps(found)
    found = bench.measure(tiny(), seconds=0.0)  # of one round at least
    assert (found["rounds"], found["evaluations"]) == (1, 1)  # the warm-up's second round is evaluated beside it
    check_account(found)


def test_evaluation_of_every_client_is_a_phase_of_its_own_and_no_part_of_a_round():
    x = tiny(**{"evaluation.every": 1, "evaluation.per_client": True, "until": "eval/auc=2.0"})
    found = bench.measure(x, rounds=3)
    assert found["evaluations"] == 3
    assert found["phases"]["client_metrics"]["clients_per_round"] == 20
    own = found["phases"]["gradient"]["blocks_per_round"] + found["phases"]["update"]["blocks_per_round"]
    assert found["blocks_per_round"] == pytest.approx(own)
    spent = found["workers_seconds_per_round"]
    assert found["driver_seconds_per_round"]["evaluate"] >= spent["evaluation"] + spent["phases"]["client_metrics"]
    driver = found["driver_seconds_per_round"]
    assert driver["wait"] >= spent["phases"]["gradient"] + spent["phases"]["update"]


@pytest.mark.ray
@pytest.mark.slow
def test_with_workers_the_account_adds_up_and_candidates_take_turns(cluster, monkeypatch, capsys):
    from fedfleet.simulator.executors.ray import RayExecutor

    x = tiny(**{"executor.kind": "ray", "executor.actors": 1, "evaluation.every": 1})
    executor = RayExecutor(actors=1, cpus=1)
    executor.start(x.setup())
    monkeypatch.setattr(x, "executor", lambda: InnerExecutor(executor, "batched"))  # started, and closed later
    try:
        found = bench.measure(x, rounds=3)
        assert (found["workers"], found["evaluations"]) == (1, 3)
        assert found["driver_seconds_per_round"]["dispatch"] > 0
        check_account(found)
        bench.show(found, Console(width=200))
        assert "MB returned" in capsys.readouterr().out
        found = rules.take_turns(x, rounds=1)
        assert all(row["turns"] == 1 for row in found["candidates"])
    finally:
        executor.close()


class TwoNodes(InnerExecutor):
    """This process, as two nodes that have a worker and three."""

    @property
    def hosts(self):
        (mine,) = super().hosts
        return [mine._replace(address="10.0.0.1"), Host("10.0.0.2", 3, 2 * mine.tasks, mine.busy_s)]

    def start(self, setup, say=print):
        self._executor.start(setup, say)


def test_every_node_has_a_row(monkeypatch, capsys):
    x = tiny()
    monkeypatch.setattr(x, "executor", lambda: TwoNodes(LocalExecutor(), "batched"))
    found = bench.measure(x, rounds=4)
    one, two = found["nodes"]["10.0.0.1"], found["nodes"]["10.0.0.2"]
    assert (one["workers"], two["workers"], found["workers"]) == (1, 3, 4)
    assert two["tasks_per_round"] == 2 * one["tasks_per_round"] > 0
    assert 0 < one["busy_share"] <= 1
    assert two["busy_share"] == pytest.approx(one["busy_share"] / 3)
    bench.show(found, Console(width=200))
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "10.0.0." in line]
    assert [[cell.strip() for cell in row[1:4]] for row in rows] == [
        [address, f"{at['workers']}", f"{at['tasks_per_round']:,.4g}"] for address, at in found["nodes"].items()
    ]


def test_timing_changes_no_bit_of_the_model_and_another_inner_is_that_of_the_setup():
    x, executor = tiny(**{"executor.inner": "factored"}), LocalExecutor()
    executor.start(x.setup())
    pairs = [(final_model(x, LocalExecutor()), final_model(x, TimedExecutor(LocalExecutor())))]
    for inner in ("serial", "batched"):
        mine = final_model(tiny(**{"executor.inner": inner}), LocalExecutor())
        pairs.append((mine, final_model(x, InnerExecutor(executor, inner))))
    for one, other in pairs:
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other))


class Slow(LocalExecutor):
    """An executor on a clock of its own: 2 s to put, 3 s to dispatch; a result takes 1 s on the worker and 2 s to come back."""

    now = 0.0

    def map(self, job, shared, tasks, **given):
        self.now += 5
        self.put_s += 2
        return self._results(super().map(replace(job, job=self._working(job.job)), shared, tasks))

    def _working(self, job):
        def work(*given):
            self.now += 1
            return job(*given)

        return work

    def _results(self, results):
        for result in results:
            self.now += 2
            yield result


def test_what_is_timed_is_what_takes_time(monkeypatch):
    x, slow = tiny(**{"cohort.wait_for": "all", "availability": "always"}), Slow()
    monkeypatch.setattr(timed, "perf_counter", lambda: slow.now)
    executor = TimedExecutor(slow)
    final_model(x, executor, rounds=2)
    tally = executor.phases["update"]
    blocks = 2 * 4  # of two clients each, for blocks are even in number
    assert (tally.tasks, tally.clients) == (blocks, 2 * 8)
    assert (tally.put_s, tally.dispatch_s) == (2 * 2, 2 * 3)
    assert (tally.compute_s, tally.wait_s, tally.merge_s) == (blocks, 3 * blocks, 0)
    sent = T.num_bytes(x.z)
    assert tally.put_bytes >= 2 * sent
    assert tally.returned_bytes >= blocks * sent
    executor.reset()
    assert executor.phases == {}


def test_bench_shows_what_it_measured(bench_command, tmp_path):
    assert bench_command("seeds=[4, 5]", "--rounds", 1)[0] == 0  # the first is measured
    status, out, error = bench_command("--rounds", 2)
    assert status == 0
    for text in ("cdma_ada: auc on", *bench.DRIVER, "phase gradient", "phase update", "idle", "evaluations: 1"):
        assert text in out
    assert error.startswith("starting: cdma_ada: auc on")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_mistake_is_told_in_one_line(subtests, bench_command):
    rows = [
        (["cohort.size=21"], "cohort.size=21"),
        (["--rounds", "0"], "Invalid value for '--rounds'"),
        (["--seconds", "-1"], "Invalid value for '--seconds'"),
        (["compare={a: {}, b: {seed: 1}}"], "compare.b.seed"),
        (["compare={a: {}, b: {algorithm.lr: 0.5}}"], "compare="),
        (["vary.algorithm.lr=[0.5, 0.25]", "--rules"], "vary={'algorithm.lr': [0.5, 0.25]}: 2 different runs"),
    ]
    all_told(subtests, lambda given: bench_command(*given), rows)


def test_diverged_training_is_a_failure(bench_command):
    status, out, error = bench_command("algorithm.lr=1e39", "--rounds", 1)
    assert (status, out) == (1, "")
    assert error.splitlines()[-1].startswith("failed: round 0: client ")


@pytest.mark.slow
def test_rules_prints_keys_that_a_configuration_accepts(bench_command):
    found = json.loads(bench_command("--rules", "--rounds", 1, "--json")[1])
    told = StringIO()
    rules.show(found, Console(file=told, width=200))
    out = told.getvalue()
    (keys,) = [line.removeprefix("fastest: ").split() for line in out.splitlines() if line.startswith("fastest: ")]
    (section,) = [line.removeprefix("in YAML: ") for line in out.splitlines() if line.startswith("in YAML: ")]
    best = found["best"]
    for config in (load(TINY, keys), load(TINY, yaml.safe_load(section))):
        assert (config.executor.inner, config.executor.block_size) == (best["inner"], best["block_size"])
    rows = found["candidates"]
    assert [sum(row[mark] for row in rows) for mark in ("rule", "best", "configured")] == [1, 1, 1]
    assert {row["inner"] for row in rows} == {"serial", "batched", "factored"}
    assert {row["block_size"] for row in rows if row["inner"] == "serial"} == {2, 4, 8}
    assert found["rule"]["relative"] == 1
    assert all(row["seconds_per_round"] > 0 for row in rows if row["turns"])


def test_rules_ends_after_its_seconds_and_always_measures_the_rule():
    found = rules.take_turns(tiny(), seconds=0.0)
    assert [row["turns"] for row in found["candidates"] if row["rule"]] == [1]
    assert sum(row["turns"] for row in found["candidates"]) == 1
    assert found["best"]["rule"]


def own_loss(change):
    """An experiment whose clients' loss is changed."""
    config = load({**TINY, "task": "classification", "algorithm": "fedavg"})
    x = Experiment(config)
    given = x.task.objectives["train"]
    x.task.objectives["train"] = replace(given, loss=lambda *args: change(*given.loss(*args)))
    return Experiment(config, task=x.task)


def test_a_candidate_that_fails_is_told_and_the_others_go_on(capsys):
    def branch(loss, aux):  # which no vmap can
        return (loss, aux) if float(loss.detach()) > 0 else (2 * loss, aux)

    found = rules.take_turns(own_loss(branch), rounds=1)
    for row in found["candidates"]:
        assert (row["failed"] is None) == (row["inner"] == "serial") == bool(row["turns"])
        assert row["failed"] is None or "runs alone but not under vmap" in row["failed"]
        assert row["failed"] is None or "\n" not in row["failed"]
    assert found["best"]["inner"] == "serial"
    assert found["best"]["relative"] == 1  # to the fastest, as the rule's choice failed
    rules.show(found, Console(width=200))
    assert "runs alone but not under vmap" in capsys.readouterr().out


def test_when_all_candidates_fail_the_first_reason_is_given():
    def broken(loss, aux):
        raise ValueError("no such luck")

    with pytest.raises(FedfleetError, match=r"every candidate failed; .*: round 0: client .*ValueError: no such luck"):
        rules.take_turns(own_loss(broken), rounds=1)


def test_ratios_are_taken_within_a_turn():
    rule, other, short = (rules.Candidate(rules.How("serial", size)) for size in (1, 2, 4))
    rule.turns, other.turns, short.turns = [1.0, 4.0, 2.0], [0.5, 3.0, 1.0], [0.1]
    found = rules.compared([rule, other, short])
    assert [row["block_size"] for row in found["candidates"]] == [2, 1, 4]
    first = found["candidates"][0]
    assert [first[k] for k in ("relative", "least", "most", "seconds_per_round")] == [0.5, 0.5, 0.75, 1]
    assert found["best"]["block_size"] == 2  # one turn is not enough beside three
    other.failed = "training diverged"
    assert rules.compared([rule, other, short])["best"]["block_size"] == 1
    assert found["keys"] == ["executor.inner=serial", "executor.block_size=2"]


def test_in_a_mean_nothing_comes_back_for_each_client():
    """Blocks of one client and of four send as much: the sum."""
    returned = []
    for size in (1, 4):
        x = tiny(**{"cohort.wait_for": "all", "availability": "always", "executor.block_size": size})
        executor = TimedExecutor(LocalExecutor())
        final_model(x, executor, rounds=1)
        tally = executor.phases["update"]
        returned.append(tally.returned_bytes / tally.tasks)
    assert returned[0] == returned[1] >= T.num_bytes(x.z)
