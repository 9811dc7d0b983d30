"""A run of several on a cluster is not made by a process that is unlike the one that asked for it."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray import cloudpickle

import fedfleet
from fedfleet.config.population import data_key, load_data
from fedfleet.datasets.convert import convert
from fedfleet.experiments import side_by_side
from fedfleet.simulator.executors import cluster
from fedfleet.simulator.executors.fingerprint import of_process

CONFIG = fedfleet.load({
    "rounds": 1, "population": {"dataset": "digits", "clients": 8}, "executor": {"kind": "local"}, "cohort": {"size": 2},
    "task": {"name": "classification", "model": "logistic"}, "algorithm": {"name": "fedavg", "steps": 1},
})  # fmt: skip


@pytest.fixture
def task(monkeypatch):
    """``_task`` in this process, in which no Ray is asked for anything."""
    monkeypatch.setattr(cluster, "share_tensors", lambda: None)
    monkeypatch.setattr(cluster.ray, "get", lambda x: x)
    monkeypatch.setattr(cluster.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    data = load_data(CONFIG)
    assert data_key(CONFIG)
    return lambda out, wanted: side_by_side._task(side_by_side.Job(None, CONFIG, out), [data], wanted)


def test_a_process_that_is_alike_makes_the_run(task, tmp_path: Path):
    assert task(tmp_path / "a", of_process()) is None
    assert task(tmp_path / "b", None) is None
    models = {(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"}
    assert len(models) == 1


def test_a_process_with_another_version_makes_none_and_says_why(task, tmp_path: Path):
    said = task(tmp_path / "run", {**of_process(), "torch": "1.0"})
    assert said.startswith("executor: node 10.0.0.7 is not like the driver's (torch: ")
    assert said.endswith("bits may differ: give both the same")
    assert not (tmp_path / "run").exists()


def test_a_process_whose_folder_of_clients_is_another_makes_none(task, tmp_path: Path):
    """As on a node that has another copy, or none; what was read by the process that asked is said by its digest."""
    table = pa.table(
        {"client": [i // 4 for i in range(40)], "y": [i % 2 for i in range(40)], "age": [i / 40 for i in range(40)]}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "clients")
    data = load_data(fedfleet.load({"population": {"dataset": {"name": "disk", "path": str(tmp_path / "clients")}}}))
    assert isinstance(data, fedfleet.FederatedDataset)
    wanted = of_process() | side_by_side._read(data)
    assert side_by_side.Fingerprint(wanted, [], allow=False).fault(side_by_side._place("10.0.0.7", data)) is None
    pq.write_table(table.slice(1), tmp_path / "other.parquet")
    shutil.rmtree(tmp_path / "clients")
    for there, says in ((True, "has other data than the driver"), (False, "it cannot read the clients' data")):
        if there:
            convert(tmp_path / "other.parquet", tmp_path / "clients")
        other = cloudpickle.loads(cloudpickle.dumps(data))  # as another process gets it: a path
        fault = side_by_side.Fingerprint(wanted, [], allow=False).fault(side_by_side._place("10.0.0.7", other))
        assert fault is not None
        assert "node 10.0.0.7" in fault
        assert says in fault
        shutil.rmtree(tmp_path / "clients", ignore_errors=True)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_runs_on_a_cluster_are_told_what_is_wanted(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(side_by_side, "of_process", lambda: {**of_process(), "torch": "1.0"})
    jobs = iter([side_by_side.Job("one", CONFIG, tmp_path / "run")])
    data = {data_key(CONFIG): load_data(CONFIG)}
    ((job, error),) = side_by_side.run_jobs(lambda: next(jobs, None), data, 2, address="auto")
    assert job.of == "one"
    assert "is not like the driver's (torch: " in error
