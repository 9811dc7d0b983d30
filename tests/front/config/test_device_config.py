"""Configured devices: told what phases really send and compute, tables of them, deadlines nobody can meet, what a plan says."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import pytest
import torch
from cases import CASES, INVITE, MODEL, NEEDS
from torch import Tensor

from fedfleet.assembly import algorithm as assembled
from fedfleet.commands.plan import describe
from fedfleet.config import timing
from fedfleet.config.device_table import read_table
from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.driver.simulate import RoundRecord, simulate
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.devices import Devices, Load, Times
from fedfleet.simulator.fleet.hardware import Hardware, HeterogeneousDevices
from fedfleet.simulator.fleet.responses import Outcome
from tests.refusals import all_refused, refused

BASE = {
    "population": {"dataset": "digits", "clients": 30, "partition": "label_sorted"},
    "task": {"name": "classification", "model": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "steps": 3, "batch_size": 7},
    "cohort": {"size": 6},
    "executor": {"kind": "local", "inner": "serial", "block_size": 4},
}
FLOATS = 64 * 8 + 8 + 8 * 10 + 10
ALONE = {"share": 1, "gflops": 0.002, "down_mbps": 0.5, "up_mbps": 0.1}
FIXED = {"kind": "tiers", "tiers": [ALONE]}
ONE = {"kind": "tiers", "tiers": [{**ALONE, "latency_s": 0.25}]}
BOTH = [
    {"share": 3, "gflops": 4, "down_mbps": 40, "up_mbps": 8, "latency_s": 0.05},
    {"share": 1, "gflops": 1, "down_mbps": 8, "up_mbps": 2},
]


def make(**overrides: Any) -> Experiment:
    return Experiment(load(BASE, overrides))


def named(algorithm: str, **overrides: Any) -> Experiment:
    task, options = CASES[algorithm]
    net = {"model": MODEL[algorithm]} if algorithm in MODEL else {"model": "mlp", "hidden": [8]}
    model = {"name": task, **net}
    given = {"task": model, "algorithm": {"name": algorithm, **options}}
    there = NEEDS.get(algorithm, {}) | {"cohort.size": INVITE.get(algorithm, 6)}
    return Experiment(load({**BASE, **given}, there | overrides))


@dataclass
class Spy:
    """Devices that remember what they were asked."""

    devices: Devices
    loads: list[Load] = field(default_factory=list)

    def times(self, key: Key, clients: Tensor, load: Load) -> Times:
        self.loads.append(load)
        return self.devices.times(key, clients, load)


def rounds(x: Experiment, count: int, **models: Any) -> list[RoundRecord]:
    conditions = replace(x.conditions(), federation=replace(x.federation, **models))
    executor = x.executor()
    executor.start(x.setup())
    try:
        return list(simulate(x.algorithm, x.z, x.problem, conditions, executor, count))
    finally:
        executor.close()


@pytest.mark.parametrize("algorithm", ["scaffold", "cdma_ada", "drfa", "fedpac", "fact", "stablefdg"])
def test_devices_are_told_what_phases_really_send(algorithm):
    x = named(algorithm, devices="lognormal")
    spy = Spy(x.federation.devices)
    phases = [p for r in rounds(x, 3, devices=spy) for p in r.phases]
    assert len(phases) == len(spy.loads) > 0
    for phase, asked in zip(phases, spy.loads, strict=True):
        online = phase.counts["invited"] - phase.counts["unavailable"]
        assert asked.bytes_down * online == phase.counts["bytes_down"]
        assert asked.bytes_up * phase.counts["completed"] == phase.counts["bytes_up"]
        assert int(asked.steps.sum()) == phase.counts["client_steps"]
        assert asked.flop > 0


@pytest.mark.parametrize(
    ("algorithm", "gradients"),  # an example of a phase, on average over its steps
    [
        ("fedavg", {"train": 1}),
        ("fedprox", {"train": 1}),
        ("scaffold", {"train": 1}),
        ("parallel_sgda", {"gradient": 1}),
        ("cdma_nc", {"update": 1}),
        ("cdma_ada", {"gradient": 2, "update": 4 / 3}),  # of 3 steps, the first takes no gradient, the others two
    ],
)
def test_operations_are_those_of_the_layers_and_gradients(algorithm, gradients):
    x = named(algorithm, devices="lognormal")
    each = 6 * T.count(x.z)  # products of the layers, and every other float (biases, ...) once
    assert x.costs.flop == {name: pytest.approx(each * g) for name, g in gradients.items()}


def test_operations_may_be_given_and_are_tried_out_where_something_depends_on_them(monkeypatch):
    x = make(devices={"kind": "lognormal", "flop_per_example": 123.0})
    assert x.costs.flop == {"train": 123.0}
    assert x.costs.bytes_up == {"train": 4 * FLOATS}
    assert make(devices="lognormal").costs.flop == {"train": 6.0 * FLOATS}
    assert make(devices="lognormal", **{"executor.inner": "factored"}).costs == make(devices="lognormal").costs
    monkeypatch.setattr(assembled, "probe", lambda *_, **__: pytest.fail("not needed"))
    make()
    make(**{"cohort.deadline_s": 0.1})
    with pytest.raises(pytest.fail.Exception, match="not needed"):
        make(devices="lognormal")


def test_a_resolved_configuration_means_the_same_devices():
    x = make(devices={"kind": "tiers", "tiers": BOTH}, **{"executor.inner": "auto", "executor.block_size": "auto"})
    again = Experiment(load(x.config.model_dump(mode="json")))
    assert again.costs == x.costs
    assert [r.virtual_s for r in rounds(again, 2)] == [r.virtual_s for r in rounds(x, 2)]


def test_a_round_takes_what_the_formula_says():
    x = make(devices=ONE)
    (record,) = rounds(x, 1)
    message = 4 * FLOATS
    expected = 0.5 + 8 * (message + 8) / 5e5 + 8 * message / 1e5 + 6 * FLOATS * 21 / 2e6
    assert record.virtual_s == pytest.approx(expected, rel=1e-12)
    line = dict(describe(x))["round, median device"]
    assert line == f"{expected:.3g} s: download 0.0392 s, compute 0.0384 s, upload 0.195 s, latency 0.5 s"
    assert "round, median device" not in dict(describe(make()))


def test_a_deadline_that_too_few_can_meet_is_refused():
    tiers = [{**BOTH[0], "share": 0.999}, {**BOTH[0], "share": 0.001, "latency_s": 0.001}]
    given = {"devices": {"kind": "tiers", "tiers": tiers}, "seed": 0, "population.clients": 100}
    make(**given, **{"cohort.deadline_s": 0.15})
    few = {"cohort.deadline_s": 0.01, "cohort.min_responses": 3}
    said = refused(lambda: make(**given, **few), "cohort.deadline_s=0.01: the cohort.min_responses=3 fastest clients")
    assert re.search(r"need 0.\d+ s for", said)


def test_a_plan_of_an_asynchronous_server_says_how_often_it_steps():
    sync = dict(describe(make(devices=ONE)))["round, median device"]
    answer = float(sync.split(" s:")[0])
    for concurrency, at_work in ((4, 4), (1000, make().problem.clients)):
        fedbuff = {"name": "fedbuff", "steps": 3, "batch_size": 7, "buffer": 6, "concurrency": concurrency}
        x = make(devices=ONE, algorithm=fedbuff, cohort={})
        lines = dict(describe(x))
        assert "round, median device" not in lines
        found = lines["server step, median device"]
        every = float(found.split(" s:")[0])
        assert f"s: 6 answers of {at_work} clients at work, an answer in {answer:.3g} s: download " in found
        assert every == pytest.approx(answer * 6 / at_work, rel=0.01)
    rest = rounds(x, 30)[1:]
    assert sum(r.virtual_s - r.started_s for r in rest) / len(rest) == pytest.approx(every, rel=0.3)


@dataclass
class Phases:
    """Everybody is online but those named for a phase, which is known by its key."""

    away: dict[int, Tensor] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        if int(key) not in self.keys:
            self.keys.append(int(key))
        return ~torch.isin(clients, self.away.get(int(key), torch.tensor([], dtype=torch.int64)))


@pytest.mark.parametrize("algorithm", ["scaffold", "cdma_one"])
def test_clients_that_fail_leave_no_trace_in_model_or_state(algorithm):
    x = named(algorithm, **{"population.clients": 10})  # invited often, so that a trace in their state would show
    watch = Phases()
    first = rounds(x, 5, availability=watch, hazard=0.7)
    phases = [p for r in first for p in r.phases]
    failed = {k: p.clients[p.responses.outcome == Outcome.FAILED] for k, p in zip(watch.keys, phases, strict=True)}
    assert 5 < sum(map(len, failed.values())) < sum(len(p.clients) for p in phases) - 5
    for p in phases:
        assert p.counts["failed"] + p.counts["completed"] == p.counts["invited"]
        assert p.counts["bytes_up"] % p.counts["completed"] == 0
    second = rounds(x, 5, availability=Phases(away=failed))
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, T.leaves(a.state), T.leaves(b.state)))
        assert [p.counts["floats_up"] for p in a.phases] == [p.counts["floats_up"] for p in b.phases]
    assert sum(p.counts["failed"] for r in second for p in r.phases) == 0


TABLE = {"gflops": [1.0, 2.0, 3.0], "down_mbps": [10, 20, 30], "up_mbps": [1.0, 2.0, 3.0]}
MANY = {"population.clients": 300, "algorithm.batch_size": 2}


def write(path: Any, **columns: Any) -> str:
    pd.DataFrame({**TABLE, **columns}).drop(columns=[k for k, v in columns.items() if v is None]).to_parquet(path)
    return str(path)


def devices(x: Experiment) -> Hardware:
    assert isinstance(x.federation.devices, HeterogeneousDevices)
    return x.federation.devices.fleet.of(torch.arange(x.population.size))


def test_clients_wrap_onto_the_rows_of_a_table(tmp_path):
    path = write(tmp_path / "t.parquet", latency_s=[0.0, 0.1, 0.2], client=["a", "b", "c"])
    found = devices(make(devices={"kind": "table", "path": path}, **MANY))
    counts = found.gflops.long().bincount()[1:]
    assert counts.min() > 70
    assert torch.equal(found.down_mbps, 10 * found.gflops)
    torch.testing.assert_close(found.latency_s, (found.gflops - 1) / 10)
    other = devices(make(devices={"kind": "table", "path": path}, seed=1, **MANY))
    assert not torch.equal(found.gflops, other.gflops)


def test_clients_may_have_rows_of_their_own(tmp_path):
    direct = {"kind": "table", "map": "direct", "path": write(tmp_path / "a.parquet")}
    small = {"population.clients": 3, "cohort.size": 3}
    assert devices(make(devices=direct, **small)).gflops.tolist() == [1, 2, 3]
    direct["path"] = write(tmp_path / "b.parquet", client=[2, 0, 1])
    found = devices(make(devices=direct, **small))
    assert found.gflops.tolist() == [2, 3, 1]
    assert found.latency_s.tolist() == [0, 0, 0]


FAULTS = [
    ({"up_mbps": None}, None, ": column 'up_mbps' is missing"),
    ({"gflops": [1.0, 0.0, 3.0]}, None, ", row 1: gflops is 0.0"),
    ({"down_mbps": [10, 20, -30]}, None, ", row 2: down_mbps is -30"),
    ({"up_mbps": [1.0, None, 3.0]}, None, ", row 1: up_mbps is null"),
    ({"up_mbps": [1.0, float("inf"), 3.0]}, None, ", row 1: up_mbps is inf"),
    ({"latency_s": [0.0, 0.0, -1.0]}, None, ", row 2: latency_s is -1.0"),
    ({"gflops": ["1", "2", "3"]}, None, ": column 'gflops' is of type large_string"),
    ({"client": [0, 1, 3]}, 3, ", row 2: client 3 is unknown"),
    ({"client": [0, -1, 2]}, 3, ", row 1: client -1 is unknown"),
    ({"client": [0, 1, 0]}, 3, ", row 2: client 0 has a row already"),
    ({"client": [0, 1, 3]}, 4, ": no row for client 2"),
    ({}, 5, ": no row for client 3"),
    ({}, 2, ", row 2: client 2 is unknown"),
    ({"client": ["a", "b", "c"]}, 3, ": column 'client' is of type large_string"),
]


def test_faults_of_a_table_are_named_by_file_and_row(subtests, tmp_path):
    path = str(tmp_path / "t.parquet")
    for columns, clients, key in FAULTS:
        with subtests.test(f"{columns} {clients}"):
            write(path, **columns)
            refused(lambda clients=clients: read_table(path, clients), f"devices.path={path!r}{key}")


def test_tables_that_are_none(subtests, tmp_path):
    (tmp_path / "junk").write_bytes(b"junk" * 100)
    pd.DataFrame({k: [] for k in TABLE}, dtype=float).to_parquet(tmp_path / "empty")
    paths = [str(tmp_path / name) for name in ("absent", "junk", "empty")]
    rows = [(path, f"devices.path={path!r}: ") for path in paths]
    all_refused(subtests, lambda path: make(devices={"kind": "table", "path": path}), rows)


MESSAGES = 8 * (4 * FLOATS + 8) / 5e5 + 8 * 4 * FLOATS / 1e5
STEP = 6 * FLOATS * 7 / 2e6


@pytest.mark.parametrize(("given", "deadline_s", "needed", "what"), [
    ({}, 0.1, MESSAGES + 3 * STEP, "phase 'train'"),
    ({"cohort.partial_work": True}, 0.1, MESSAGES + STEP, "a local step in phase 'train'"),
    ({"devices": {"kind": "homogeneous", "sigma": 0, "median_s": 2.0}}, 1.999, 2.0, "phase 'train'"),
    ({"devices": {"kind": "tiers", "tiers": [*BOTH, *FIXED["tiers"]]}}, 0.01, None, "phase 'train'"),
])  # fmt: skip
def test_a_deadline_that_no_client_can_meet_is_refused(given, deadline_s, needed, what):
    text = refused(
        lambda: make(**{"devices": FIXED, **given, "cohort.deadline_s": deadline_s}),
        f"cohort.deadline_s={deadline_s:g}",
    )
    assert text.endswith(f" s for {what}: raise it")
    enough = float(text.split("needs ")[1].split(" s")[0])
    assert needed is None or needed <= enough <= 1.01 * needed
    make(**{"devices": FIXED, **given, "cohort.deadline_s": enough})  # what it says is enough


def test_of_many_clients_the_best_device_counts(monkeypatch):
    monkeypatch.setattr(timing, "ALL_UP_TO", 10)
    with pytest.raises(ConfigError, match=r"cohort.deadline_s=0.01: the fastest client needs 0.235 s"):
        make(devices=FIXED, **{"cohort.deadline_s": 0.01})  # the messages alone
    make(devices=FIXED, **{"cohort.deadline_s": 0.235})
    make(devices="lognormal", **{"cohort.deadline_s": 1e-6})  # there may always be a faster one
    make(devices={"kind": "homogeneous", "sigma": 0}, **{"cohort.deadline_s": 1e-6})
    monkeypatch.undo()
    for given in ({"kind": "homogeneous"}, {**FIXED, "jitter": 0.1}):  # times that vary may meet any deadline
        make(devices=given, **{"cohort.deadline_s": 1e-6})


def test_options_that_cannot_be(subtests):
    rows = [
        ({"kind": "lognormal", "gflops": 0}, "devices.gflops=0"),
        ({"kind": "lognormal", "up_sigma": -1}, "devices.up_sigma=-1"),
        ({"kind": "tiers"}, "devices.tiers: missing"),
        ({"kind": "tiers", "tiers": []}, "devices.tiers=[]"),
        ({"kind": "tiers", "tiers": [{**BOTH[0], "share": 0}]}, "devices.tiers.0.share=0"),
        ({"kind": "tiers", "tiers": [BOTH[0], {"share": 1, "gflops": 1}]}, "devices.tiers.1.down_mbps: missing"),
        ({"kind": "table"}, "devices.path: missing"),
        ({"kind": "table", "path": "x", "map": "modulo"}, "devices.map='modulo'"),
        ({"kind": "lognormall"}, "devices.kind='lognormall': unknown; did you mean 'lognormal'?"),
    ]
    all_refused(subtests, lambda given: make(devices=given), rows)
