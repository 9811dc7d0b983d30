"""Populations of any size, from the configuration to the run folder: nothing costs more for more clients."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import fedfleet
from fedfleet.config.population import data_key, dealt, load_data, make_population
from fedfleet.datasets.examples import Examples
from fedfleet.datasets.synthetic import SyntheticPopulation
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.arithmetic import rng
from tests.parts import slow_but
from tests.refusals import tells

HUGE = 10**10
SMALL = {
    "rounds": 2, "population": {"dataset": {"name": "synthetic", "features": 5, "test_examples": 50}, "clients": HUGE},
    "task": {"model": "logistic"}, "cohort": {"size": 12}, "executor": {"kind": "local"},
    "evaluation": {"train_examples": 30},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Parquet file of 30 clients of 1 to 3 examples."""
    owners = np.repeat(np.arange(30), 1 + np.arange(30) % 3)
    x = rng.normal(rng.key(0), (len(owners), 4)).numpy()
    columns = {f"f{i}": x[:, i] for i in range(4)}
    pq.write_table(pa.table({"client": owners, "y": (x.sum(1) > 0).astype(int), **columns}), tmp_path / "in.parquet")
    return tmp_path


@pytest.mark.slow
def test_ten_thousand_million_clients(tmp_path):
    run = fedfleet.run(SMALL, out=tmp_path / "run")
    outcomes = run.table("outcomes")
    assert len(outcomes) == 24
    assert outcomes.client.max() > 2**32
    assert {"eval/accuracy", "eval/train_accuracy"} <= set(run.rounds)
    written = yaml.safe_load((run.folder / "config.yaml").read_text())["population"]
    assert (written["clients"], written["dataset"]["alpha"]) == (HUGE, 0.5)
    again = fedfleet.run(run.folder / "config.yaml", out=tmp_path / "again")
    assert (again.folder / "model.safetensors").read_bytes() == (run.folder / "model.safetensors").read_bytes()
    assert fedfleet.write_report([run.folder], run.folder).exists()


@pytest.mark.slow
def test_a_round_costs_the_same_for_more_clients(tmp_path):
    """The memory, which can be compared exactly where times cannot."""
    peaks = []
    for clients in (1000, 1000, 2**53):
        tracemalloc.start()
        fedfleet.run(SMALL, {"population.clients": clients}, out=tmp_path / f"run-{len(peaks)}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] == pytest.approx(peaks[1], rel=0.1)


def test_nothing_asks_for_every_client(tmp_path, monkeypatch):
    largest: list[int] = []
    counted = SyntheticPopulation.num_examples

    def num_examples(self: SyntheticPopulation, ids: torch.Tensor) -> torch.Tensor:
        largest.append(len(ids))
        return counted(self, ids)

    monkeypatch.setattr(SyntheticPopulation, "num_examples", num_examples)
    x = fedfleet.Experiment(fedfleet.load(SMALL, {"population.clients": 10_000}))
    x.run(tmp_path / "run")
    assert max(largest) <= 30
    assert x.problem.mean_examples == 50


def test_clients_of_parquet(folder, command, tmp_path):
    status, out, error = command("convert", folder / "in.parquet", folder / "clients", "--hold-out", 0.2)
    assert (status, error) == (0, "")
    assert out.startswith(f"{folder / 'clients'}: 24 clients, ")
    config = fedfleet.load(SMALL, {"population": {"dataset": {"name": "disk", "path": str(folder / "clients")}}})
    assert config.population.clients == HUGE
    tells(lambda: fedfleet.Experiment(config), f"population.clients={HUGE}: the population has 24")
    disk = {"population.dataset": {"name": "disk", "path": str(folder / "clients")}, "population.clients": None}
    run = fedfleet.run(SMALL, {**disk, "algorithm.batch_size": 2, "evaluation.per_client": True}, out=tmp_path / "run")
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["population"]["clients"] == 24
    assert len(run.table("clients")) == 24
    assert command("plan", run.folder / "config.yaml")[1].count("24 with 1 to 3 examples each") == 1


def test_clients_of_parquet_in_domains(folder, command, tmp_path):
    """Every algorithm is measured by domain, on held-out clients and on a test file."""
    rows = pq.read_table(folder / "in.parquet")
    sex = np.array(["f", "m"])[rows["client"].to_numpy() % 2]
    pq.write_table(rows.append_column("sex", pa.array(sex)), folder / "in.parquet")
    pq.write_table(rows.append_column("sex", pa.array(sex)).slice(1, 9), folder / "test.parquet")
    for name, options in {"held": [], "file": ["--test", folder / "test.parquet"]}.items():
        status, _, error = command("convert", folder / "in.parquet", folder / name, "--domain", "sex", *options)
        assert (status, error) == (0, "")
        disk = {"population.dataset": {"name": "disk", "path": str(folder / name)}, "population.clients": None}
        run = fedfleet.run(SMALL, {**disk, "algorithm.batch_size": 2}, out=tmp_path / f"run-{name}")
        found, data = run.table("domains"), load_data(fedfleet.load(SMALL, disk)).test
        assert run.summary["domains"] == ["f", "m"]
        assert found["examples"].tolist() == data.domain.bincount().tolist()
        assert run.summary["final"]["eval/accuracy_worst_domain"] == pytest.approx(found["accuracy"].min())
    assert found["examples"].tolist() == [int((sex[1:10] == k).sum()) for k in "fm"]


def test_words_of_parquet_reach_a_language_model(folder, command, tmp_path):
    rows = np.random.default_rng(0).integers(0, 20, (40, 6))
    frame = {"client": np.arange(40) % 8, "x": rows.tolist(), "y": np.zeros(40, dtype=np.int64)}
    pq.write_table(pa.table(frame), folder / "in.parquet")
    assert command("convert", folder / "in.parquet", folder / "words", "--classes", 20)[0] == 0
    disk = {"population.dataset": {"name": "disk", "path": str(folder / "words")}, "population.clients": None}
    local = {"algorithm.batch_size": 2, "cohort.size": 4}
    task = {"name": "language_model", "model": None, "hidden": 3, "layers": 1}
    words = fedfleet.run(SMALL, {**disk, **local, "task": task}, out=tmp_path / "run")
    assert 15 < words.summary["final"]["eval/perplexity"] < 25
    numbers = fedfleet.run(SMALL, {**disk, **local}, out=tmp_path / "numbers")
    assert np.isfinite(numbers.summary["final"]["eval/loss"])  # of a net, which reads them as numbers


@pytest.mark.ray
@pytest.mark.parametrize("kind", slow_but(["synthetic", "disk"], "disk"))
def test_actors_see_the_same_clients(folder, command, tmp_path, kind):
    overrides: dict[str, Any] = {"executor.block_size": 3, "algorithm.batch_size": 1}
    if kind == "disk":
        assert command("convert", folder / "in.parquet", folder / "clients")[0] == 0
        overrides |= {
            "population.dataset": {"name": "disk", "path": str(folder / "clients")},
            "population.clients": None,
        }
    models = []
    for executor in ("local", "ray"):
        where = {"executor.kind": executor, "executor.actors": 1}
        run = fedfleet.run(SMALL, {**overrides, **where}, out=tmp_path / executor)
        models.append((run.folder / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_bad_input(subtests, command, tmp_path):
    rows = [
        ("population.dataset=syntetic", "population.dataset.name='syntetic' … did you mean 'synthetic'?"),
        ("population.dataset.feature=3", "population.dataset.feature=3 … did you mean population.dataset.features?"),
        ("population.dataset.examples=[9, 3]", "examples is [9, 3] … least first"),
        ("population.dataset.alpha=-1", "population.dataset.alpha=-1"),
        ("population.clients=9007199254740993", "population.clients=9007199254740993 … 9007199254740992"),
        ("population.clients=1e10", "population.clients=10000000000.0 … integer"),
        ("population.partition=dirichlet", "population.partition='dirichlet' … 'synthetic' comes in clients"),
        ("population.clients=11", "cohort.size=12 … population.clients=11"),
        ("evaluation.per_client=true", "evaluation.per_client=True … 10,000,000,000 … 1,000,000"),
        ("algorithm.batch_size=51", "algorithm.batch_size=51 … largest client has 50"),
        ("population.dataset=disk", "population.dataset.path: missing"),
        ("population.dataset={name: disk, path: none}", "none: not a whole folder … fedfleet convert"),
        ("population.dataset={name: digits, features: 3}", "population.dataset.features=3"),
    ]  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    for override, says in rows:
        for verb, *more in (("plan",), ("run", "--out", tmp_path / "out")):
            with subtests.test(says, verb=verb):
                status, _, error = command(verb, path, override, *more)
                assert (status, error.count("\n"), error[:7]) == (2, 1, "error: "), error
                assert [part for part in says.split(" … ") if part not in error] == [], error
    assert list(tmp_path.iterdir()) == [path]


def test_bad_conversions(subtests, folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    rows = [
        ("none.parquet out", "none.parquet: there is no such file"), ("in.parquet in.parquet", "in.parquet: exists"),
        ("in.parquet out --hold-out 1.5", "--hold-out"), ("in.parquet out --classes 1", "column 'y', row"),
        ("in.parquet", "OUT"),
    ]  # fmt: skip
    for arguments, says in rows:
        with subtests.test(arguments):
            status, _, error = command("convert", *arguments.split())
            assert (status, error.count("\n"), error[:7]) == (2, 1, "error: "), error
            assert says in error
            assert [p.name for p in folder.iterdir()] == ["in.parquet"]


def test_trials_share_the_data_they_can():
    digits = fedfleet.load({"population.clients": 10})
    assert data_key(digits) == data_key(fedfleet.load({"population.clients": 20, "population.partition": "shards"}))
    assert data_key(digits) != data_key(fedfleet.load({"population.dataset": "mnist"}))
    synthetic = fedfleet.load(SMALL)
    assert data_key(synthetic) == data_key(fedfleet.load(SMALL, {"seed": 3}))
    for other in ({"population.clients": 5}, {"population.partition_seed": 1}, {"population.dataset.alpha": 1.0}):
        assert data_key(synthetic) != data_key(fedfleet.load(SMALL, other))


def test_every_seed_may_deal_its_clients_anew():
    def dealt(**given):
        config = fedfleet.load({"population.clients": 10, "population.partition": "dirichlet", **given})
        return make_population(config, load_data(config))

    one, same, other = (
        dealt(**{"seed": seed, "population.partition_seed": of}) for seed, of in ((1, "seed"), (0, 1), (2, "seed"))
    )
    assert torch.equal(one.indices, same.indices)
    assert torch.equal(one.offsets, same.offsets)
    assert not torch.equal(one.indices, other.indices)
    anew = fedfleet.load(SMALL, {"population.partition_seed": "seed", "seed": 3})
    assert data_key(anew) == data_key(fedfleet.load(SMALL, {"population.partition_seed": 3}))
    with pytest.raises(fedfleet.ConfigError, match=r"population\.partition_seed='seeds'"):
        fedfleet.load({"population.partition_seed": "seeds"})


def test_a_seed_by_which_nothing_is_drawn_is_refused():
    given = {"population": {"partition": "label_sorted", "partition_seed": "seed"}, "task": {"model": "logistic"}}
    config = fedfleet.load(given)
    with pytest.raises(fedfleet.ConfigError, match=r"population\.partition_seed='seed'"):
        dealt(config, load_data(config))
    for drawn in (
        {"population.partition.similarity": 0.1},
        {"population.held_out": 0.2, "evaluation.per_client": True},
    ):
        assert dealt(fedfleet.load(given, drawn), load_data(config))
    x, y = np.zeros((40, 3)), np.arange(40) % 2
    mine = fedfleet.data.from_arrays(x, y, client=np.arange(40) // 5)
    with pytest.raises(fedfleet.ConfigError, match="comes in clients, the same for every seed"):
        Experiment(fedfleet.load({**SMALL, "population": {"partition_seed": 1}}), data=mine)
    dealt_mine = {**SMALL, "population": {"partition_seed": 1, "clients": 5}, "cohort": {"size": 2}}
    assert Experiment(fedfleet.load(dealt_mine), data=fedfleet.data.from_arrays(x, y))


def test_synthetic_data_are_the_same_for_every_seed_of_the_run():
    one, other = (load_data(fedfleet.load(SMALL, {"seed": seed})) for seed in (0, 1))
    assert isinstance(one.test, Examples)
    assert torch.equal(one.test.x, other.test.x)
    assert not torch.equal(one.test.x, load_data(fedfleet.load(SMALL, {"population.partition_seed": 1})).test.x)
