"""Blocks, and how many of them are a task: that changes no bit of what a run leaves behind."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedfleet
from fedfleet.assembly import executors
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.driver import sharding
from fedfleet.simulator.driver.sharding import blocks_a_task, bucket_sizes, parts_a_task, shared_out, sizes_of_blocks
from fedfleet.simulator.executors.base import Host
from fedfleet.simulator.executors.cluster import dumps, loads
from fedfleet.simulator.executors.local import LocalExecutor
from tests.parts import slow_but

AVERAGING = {"algorithm": {"name": "fedavg", "epochs": 1}}
LATE = {"late": "keep", "stale_discount": 0.5, "deadline_s": 12.0}
CASES = {
    "state": {"algorithm": {"name": "scaffold", "epochs": 1}},
    "two phases": {
        "task": {"name": "auc", "model": "logistic"},
        "algorithm": {"name": "cdma_ada", "steps": 2, "alpha": 0.5},
    },
    "domains": {"algorithm": {"name": "vrex", "epochs": 1}, "domains": {"kind": "client"}},
    "buffer": {"algorithm": {"name": "fedbuff", "steps": 2, "buffer": 9, "concurrency": 15}},
    "inboxes": {"algorithm": {"name": "afl"}, "domains": {"kind": "client"}},
    "stored": {"algorithm": {"name": "omg", "of": {"name": "fedavg", "epochs": 1}}},
    "attacked": {**AVERAGING, "attack": {"kind": "backdoor", "share": 0.4, "scale": 2.0}},
    "late": {**AVERAGING, "cohort": LATE},
    "partial work": {
        "algorithm": {"name": "fedavg", "epochs": 3},
        "cohort": {"partial_work": True, "deadline_s": 12.0},
    },
    "selection": {**AVERAGING, "selection": {"kind": "power_of_choice"}},
}


@given(clients=st.integers(0, 100), most=st.integers(1, 12))
def test_blocks_are_as_equal_as_can_be_and_several_are_even_in_number(clients, most):
    sizes = sizes_of_blocks(clients, most)
    assert sum(sizes) == clients
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    if most < clients:
        assert len(sizes) % 2 == 0 or len(sizes) == clients


@given(clients=st.integers(0, 1000), most=st.integers(1, 500))
def test_rooms_hold_any_block_and_waste_little_of_it_and_nothing_where_all_answer(clients, most):
    buckets = bucket_sizes(clients, most)
    assert max(buckets) <= most
    assert list(buckets) == sorted(set(buckets))
    assert sizes_of_blocks(clients, most)[0] in buckets
    assert len(buckets) <= sharding.BUCKETS + 1
    for block in range(1, most + 1):
        room = min(room for room in buckets if room >= block)
        assert room - block < max(1, -(-most // sharding.BUCKETS))


def test_a_block_is_filled_with_its_first_client():
    rows = torch.arange(5)
    task = BlockTask(
        "train", rows + 10, rows + 20, rng.key(0), limit=rows + 30, client_state={"a": rows + 40}, buckets=(2, 7, 9)
    )
    filled = task.filled()
    assert filled.clients.tolist() == [10, 11, 12, 13, 14, 10, 10]
    assert filled.copies.tolist() == [20, 21, 22, 23, 24, 20, 20]
    assert filled.limit is not None
    assert filled.limit.tolist() == [30, 31, 32, 33, 34, 30, 30]
    assert filled.client_state["a"].tolist() == [40, 41, 42, 43, 44, 40, 40]
    for buckets in ((), (2,), (5, 7)):  # none, none large enough, one that fits
        assert task._replace(buckets=buckets).filled().clients.tolist() == [10, 11, 12, 13, 14]


def test_every_worker_and_every_node_has_some_tasks():
    for blocks, workers, size, together in (
        (1000, 1, 1 << 30, 1),  # nobody else to do it
        (1000, 4, (1 << 20) - 1, 1),
        (31, 4, 1 << 20, 1),
        (32, 4, 1 << 20, 2),
        (63, 4, 1 << 20, 2),
        (64, 4, 1 << 20, 4),
        (31250, 512, 1 << 20, 8),
    ):
        assert blocks_a_task(blocks, workers, size) == together
        assert together == 1 or blocks / together >= sharding.TASKS * workers
    for parts, nodes, size, together in (
        (1000, 1, 1 << 30, 1),  # nobody else whose results it could add
        (1000, 2, (4 << 20) - 1, 1),
        (7, 2, 4 << 20, 1),
        (8, 2, 4 << 20, 2),
        (48, 4, 4 << 20, 4),
        (4096, 64, 4 << 20, 32),
    ):
        assert parts_a_task(parts, nodes, size) == together
        assert together == 1 or 2 * sharding.RESULTS * nodes > parts / together >= sharding.RESULTS * nodes


def test_tasks_are_shared_by_the_workers_of_nodes_that_have_some():
    phase = SimpleNamespace(reduce={})
    task = BlockTask("train", torch.arange(200), torch.zeros(200), rng.key(0))
    hosts = [Host("a", 2), Host("b", 2), Host("gone", 0)]
    tasks, sharding = shared_out(phase, task, [2] * 100, hosts, 4 << 20)  # pyright: ignore[reportArgumentType]
    assert sharding is not None
    assert sharding.blocks == 4  # 25 parts, four of which are a task
    assert [len(t.sizes) for t in tasks] == [16] * 6 + [4]
    parts = sharding.split(tasks[1])
    assert [p.sizes for p in parts] == [(2,) * 4] * 4
    assert torch.cat([p.clients for p in parts]).equal(torch.arange(32, 64))
    assert shared_out(phase, task, [2] * 100, hosts[:1], 4 << 20)[1] is None  # pyright: ignore[reportArgumentType]
    tasks, sharding = shared_out(phase, task, [2] * 100, (), 4 << 20)  # pyright: ignore[reportArgumentType]
    assert sharding is None
    assert [t.sizes for t in tasks] == [(2,)] * 100


def run(out, name, together, monkeypatch, parts=1):
    seen = []

    def counted(blocks, workers, size):
        seen.append((blocks, workers, size))
        return together

    monkeypatch.setattr(sharding, "blocks_a_task", counted)
    monkeypatch.setattr(sharding, "parts_a_task", lambda *given: parts)
    config = {
        "rounds": 4,
        "population": {"clients": 40, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 5}},
        "task": {"name": "classification", "model": "mlp", "hidden": [8]},
        "devices": {"kind": "homogeneous", "median_s": 10.0},
        "executor": {"kind": "local", "block_size": 2, "inner": "batched"},
        "faults": {"non_finite": "drop_client"},
        **CASES[name],
    }
    if name != "buffer":
        config["cohort"] = {"size": 21, "wait_for": "siwer", **config.get("cohort", {})}
    done = fedfleet.run(config, out=out)
    tables = {t: done.table(t).drop(columns="seconds", errors="ignore") for t in ("rounds", "phases", "outcomes")}
    return (out / "model.safetensors").read_bytes(), tables, seen


@pytest.mark.parametrize("name", slow_but(CASES, "state"))
def test_how_many_blocks_are_a_task_changes_no_bit(tmp_path, name, monkeypatch):
    model, tables, seen = run(tmp_path / "1", name, 1, monkeypatch)
    assert (max(blocks for blocks, _, _ in seen) > 4) == (name != "stored") if seen else name == "stored"
    for together in (2, 8):
        found, other, _ = run(tmp_path / str(together), name, together, monkeypatch)
        assert found == model
        for table, frame in tables.items():
            pd.testing.assert_frame_equal(other[table], frame, check_exact=True)


class Sharing(LocalExecutor):
    """Does what the nodes of a cluster do: each part of a task is done apart, and their results are joined."""

    def map(self, job, shared, tasks, *, sharding=None, **how):
        if sharding is None:
            yield from super().map(job, shared, tasks, **how)
            return
        for task in tasks:
            parts, sent = sharding.split(task), loads(dumps(sharding))
            results = loads(dumps(list(super().map(job, shared, parts, **how))))
            shares.append(len(parts))
            yield sent.join([sharding.bare(part) for part in parts], results)


shares: list[int] = []


@pytest.mark.parametrize("name", slow_but(CASES, "late"))
def test_that_workers_of_a_node_share_a_task_changes_no_bit(tmp_path, name, monkeypatch):
    model, tables, _ = run(tmp_path / "1", name, 1, monkeypatch)
    monkeypatch.setitem(executors.EXECUTORS, "local", executors.EXECUTORS["local"]._replace(build=Sharing))
    shares.clear()
    for together, parts in ((1, 4), (2, 2), (2, 16)):
        found, other, _ = run(tmp_path / f"{together}-{parts}", name, together, monkeypatch, parts)
        assert found == model
        for table, frame in tables.items():
            pd.testing.assert_frame_equal(other[table], frame, check_exact=True)
    assert (max(shares, default=0) > 2) == (name != "stored")


def test_what_tasks_are_cut_by_is_asked_of_the_executor_and_the_message(tmp_path, monkeypatch):
    class Several(LocalExecutor):
        def __init__(self, *given):
            super().__init__(*given)
            self.hosts = [Host("a", 5)]

    monkeypatch.setitem(executors.EXECUTORS, "local", executors.EXECUTORS["local"]._replace(build=Several))
    _, _, seen = run(tmp_path, "state", 1, monkeypatch)
    floats = (64 + 1) * 8 + (8 + 1) * 10
    assert {(workers, size) for _, workers, size in seen} == {
        (5, 2 * 4 * floats)
    }  # the model, and the server's control
