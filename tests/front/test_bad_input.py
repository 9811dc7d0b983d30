"""Bad input: one line naming the key, the value and the mend, exit status 2, nothing written, Ray not started."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedfleet import cli

QUICK = {
    "rounds": 2,
    "population": {"dataset": "digits", "clients": 30, "partition": {"kind": "label_sorted"}},
    "task": {"name": "auc", "model": "mlp", "hidden": [8]},
    "algorithm": {"name": "cdma_ada", "steps": 2, "batch_size": 5},
    "cohort": {"invite": 8, "respond": "siwer"},
    "executor": {"kind": "ray"},
}


def run(capsys, monkeypatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["fedfleet", *arguments])
    with pytest.raises(SystemExit) as e:
        cli.main()
    return int(e.value.code or 0), capsys.readouterr().err


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(QUICK))
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.lrr=0.1"], ["algorithm.lrr=0.1", "did you mean algorithm.lr?"]),
        (["cohrt.invite=3"], ["cohrt", "did you mean cohort"]),
        (["rounds=many"], ["rounds='many'", "integer"]),
        (["rounds=-1"], ["rounds=-1", "greater than or equal to 0"]),
        (["algorithm.lr=0"], ["algorithm.lr=0", "greater than 0"]),
        (["algorithm.name=cdma_adda"], ["algorithm.name='cdma_adda'", "did you mean 'cdma_ada'?"]),
        (["task.name=acu"], ["task.name='acu'", "did you mean 'auc'?"]),
        (["population.dataset=fashion-mnist"], ["population.dataset='fashion-mnist'", "fashion_mnist"]),
        (["population.partition=dirichlett"], ["population.partition.kind='dirichlett'", "'dirichlet'"]),
        (["cohort.invite=31"], ["cohort.invite=31", "population.clients=30"]),
        (["cohort.respond=9"], ["cohort.respond=9", "cohort.invite=8"]),
        (["cohort.respond=most"], ["cohort.respond='most'", "siwer"]),
        (["algorithm.batch_size=1000"], ["algorithm.batch_size=1000", "the largest client has 48 examples"]),
        (["population.clients=100000"], ["population.clients=100000", "1442"]),
        (["executor.actors=1000"], ["executor.actors=1000", "CPUs"]),
        (["executor.actors=1000", "executor.cpus_per_actor=0.5"], ["executor.actors=1000", "500"]),
        (["executor.actors=0"], ["executor.actors=0"]),
        (["executor.kind=spark"], ["executor.kind='spark'", "'ray'"]),
        (["task.name=classification"], ["algorithm.name='cdma_ada'", "task.name='classification'", "dual"]),
        (["task.model=lenet"], ["lenet", "16x16"]),
        (["seed.deep=1"], ["seed=", "integer"]),
        (["rounds"], ["rounds", "key=value"]),
        (["until=soon"], ["until='soon'", "eval/auc=0.95"]),
        (["until=eval/acc=0.9"], ["until", "eval/acc", "eval/auc"]),
        (["warm_start=nowhere.safetensors"], ["warm_start", "nowhere.safetensors"]),
        (["algorithm.steps=2", "algorithm.epochs=1"], ["steps or epochs, not both"]),
        (["compare={A: {algorithm.name: cdma_one}, B: {algorithm.lrr: 1}}"], ["B", "algorithm.lrr"]),
    ],
)
def test_one_line_exit_two_nothing_written(capsys, monkeypatch, tmp_path, config, overrides, says):
    out = tmp_path / "out"
    status, error = run(capsys, monkeypatch, "run", config, *overrides, "--out", str(out))
    assert status == 2, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    for text in says:
        assert text in error
    assert not out.exists()


def test_ray_is_not_even_imported_for_bad_input(tmp_path, config):
    code = f"""
import sys
from fedfleet import cli
sys.argv = ["fedfleet", "run", {config!r}, "cohort.invite=31", "--out", {str(tmp_path / "out")!r}]
try:
    cli.main()
except SystemExit as e:
    print(e.code, "ray" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["2", "False"]


def test_a_run_folder_is_never_written_over(capsys, monkeypatch, tmp_path, config):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    status, error = run(capsys, monkeypatch, "run", config, "--out", str(out))
    assert status == 2
    assert str(out) in error
    assert sorted(p.name for p in out.iterdir()) == ["precious.txt"]


def test_missing_and_broken_files(capsys, monkeypatch, tmp_path, config):
    status, error = run(capsys, monkeypatch, "run", str(tmp_path / "none.yaml"))
    assert status == 2
    assert "none.yaml" in error
    broken = tmp_path / "broken.yaml"
    broken.write_text("rounds: [1")
    status, error = run(capsys, monkeypatch, "run", str(broken))
    assert status == 2
    assert "broken.yaml" in error
    assert error.count("\n") == 1


def test_truncated_data(capsys, monkeypatch, tmp_path, config):
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(
            gzip.compress(b"\x00\x00\x08\x03" + b"\x00\x00\x00\x09" * 3 + b"short")
        )
    status, error = run(
        *(
            capsys,
            monkeypatch,
            "run",
            config,
            "population.dataset=fashion_mnist",
            f"population.data_dir={tmp_path / 'data'}",
        ),
        *("--out", str(tmp_path / "out")),
    )
    assert status == 2
    assert "train-images-idx3-ubyte.gz" in error
    assert error.count("\n") == 1
    assert not Path(tmp_path / "out").exists()
