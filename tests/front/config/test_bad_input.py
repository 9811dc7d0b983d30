"""Bad input: one line naming the key, the value and the mend, exit status 2, nothing written, Ray not started."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from fedfleet.config import resolve
from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.runfolder import check_free
from fedfleet.simulator.errors import ConfigError
from tests.front.commands.lines import all_told, line

QUICK = {
    "rounds": 2, "population": {"dataset": "digits", "clients": 30, "partition": {"kind": "label_sorted"}},
    "task": {"name": "auc", "model": "mlp", "hidden": [8]}, "executor": {"kind": "ray"},
    "algorithm": {"name": "cdma_ada", "steps": 2, "batch_size": 5}, "cohort": {"size": 8, "wait_for": "siwer"},
}  # fmt: skip


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(QUICK))
    return str(path)


KEYS = [
    "rounds=-1", "algorithm.lr=0", "cohort.size=31", "cohort.wait_for=9", "cohort.wait_for=most", "rounds='3'", "rounds=true",
    "algorithm.batch_size=1000", "population.clients=100000", "executor.actors=1000", "executor.actors=0", "rounds=2020-01-01",
    "executor.kind=spark", "cohort.late=keep", "until=soon", "until=accuracy=0.9", "until=eval/auc=nan", "until=eval/acc=0.9",
    "warm_start=nowhere.safetensors", "compare={}", "compare=[A]", "vary={rounds: [1, x]}", "vary.rounds=[1, 1]",
    "vary={seed: [1, 2]}", "seeds=[]", "seeds=[1, 1]", "seed=18446744073709551616", "population=null", "task=[auc]",
    "algorithm.name={}", "algorithm.lr=.nan", "max_seconds=.inf", "algorithm.steps=1000000000000000", "task.positive_class=10",
    "task.model=lenet", "task.model=resnet", "task.hidden=[1000000000000]", "task.hidden=[0]", "task.name=classification",
    "executor.capture=fast", "cohort.partial_work=true", "population.partition=by_domain", "executor.cpus_per_actor=1000",
    "executor.gpus_per_actor=1000", "executor.gpus_per_actor=1.5", "executor.address=127.0.0.1:1", "algorithm.alpha=5.0",
    "executor.tf32=true", "executor.deterministic=false", "executor.device=cuda",
    "executor={kind: local, address: '127.0.0.1:1'}",
    "executor.address=ray://127.0.0.1:10001", "executor.address=nonsense", "population.partition={kind: dirichlet, min_size: 99}",
    "population.partition={kind: dirichlet, alpha: 1e-4, min_size: 0}", "compare={A: {}, B: {cohort.size: 99}}",
    "compare={A b: {}, A-b: {}}", "compare={Prox: {}, prox: {}}", "population.dataset={name: image_folder, path: nowhere}",
    "compare={A: {seeds: [1, 2]}}", "rounds={", "..=1",
]  # fmt: skip
"""Overrides whose key the line begins with, but for those in ``BEGINS``."""
BEGINS = {
    "executor={kind: local, address: '127.0.0.1:1'}": "executor.address='127.0.0.1:1': with executor.kind=local",
    "population.clients=100000": "population.partition='label_sorted', population.clients=100000",
    "vary={rounds: [1, x]}": "run 'rounds=x': rounds='x'",
    "vary.rounds=[1, 1]": "compare or vary: 'rounds=1' and 'rounds=1'",
    "task.hidden=[1000000000000]": "task.name='auc': 4 copies of its model of 75,000,000,000,013 floats",
    "task.name=classification": "algorithm.name='cdma_ada'",
    "cohort.partial_work=true": "cohort={'size': 8, 'wait_for': 'siwer', 'partial_work': True}: partial_work needs deadline_s",
    "algorithm.alpha=5.0": "algorithm: alpha above 1",
    "compare={A: {}, B: {cohort.size: 99}}": "run 'B': cohort.size=99",
    "rounds={": "'rounds={'",
    "..=1": "'..=1'",
}
SEVERAL = [
    ("executor.actors=1000 executor.cpus_per_actor=0.5", "executor.actors=1000"),
    ("cohort.wait_for=4 cohort.min_responses=5", "cohort.min_responses=5"),
    ("cohort.wait_for=siwer cohort.size=8 cohort.min_responses=6", "cohort.min_responses=6"),
    ("cohort.over_select=1e3 cohort.wait_for=all", "cohort.over_select=1000"),
    ("cohort.over_select=2 cohort.wait_for=siwer", "cohort={'size': 8, 'wait_for': 'siwer', 'over_select': 2}: "),
    ("cohort.response_low=0.9 cohort.response_high=0.6", "cohort.response_low=0.9"),
    ("executor.capture=compiled executor.inner=serial", "executor.capture=compiled"),
    ("executor.capture=compiled executor.kind=ray faults.client_timeout_s=9", "executor.capture=compiled"),
    ("algorithm=scaffold task=classification cohort.late=keep", "cohort.late='keep'"),
    ("algorithm=fedbuff task=classification cohort.size=7", "cohort.size=7"),
    ("availability.rate=0.5", "availability.rate=0.5: unknown key"),
    ("rounds", "'rounds'"),
]


def test_one_line_exit_two_nothing_written(subtests, command, no_ray, tmp_path, config):
    out = tmp_path / "out"
    rows = [([given], BEGINS.get(given, given.partition("=")[0])) for given in KEYS]
    all_told(
        subtests,
        lambda given: command("run", config, *given, "--out", out),
        rows + [(given.split(), key) for given, key in SEVERAL],
    )
    assert not out.exists()


@pytest.mark.slow
def test_ray_is_not_even_imported_for_bad_input(tmp_path, config):
    words = ["fedfleet", "run", config, "cohort.size=31", "--out", str(tmp_path / "out")]
    code = f"import sys\nfrom fedfleet.commands import cli\nsys.argv = {words}\n"
    code += "try:\n    cli.main()\nexcept SystemExit as e:\n    print(e.code, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["2", "False"]


def test_truncated_data(command, tmp_path, config):
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    broken = gzip.compress(b"\x00\x00\x08\x03" + b"\x00\x00\x00\x09" * 3 + b"short")
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(broken)
    where = ["population.dataset=fashion_mnist", f"population.data_dir={tmp_path / 'data'}"]
    assert "train-images-idx3-ubyte.gz" in line(command("run", config, *where, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


LAUGHS = "".join(
    f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]\n" for before, key in zip("abcdefghi", "bcdefghij", strict=True)
)
TOO_MUCH = [
    (f"a: &a x\n{LAUGHS}label: *j", "more than 100,000 values, each alias written out"),
    (f"vary:\n  seed: &a [1]\n{LAUGHS}", "more than 100,000 values"), ("x: &a {y: *a}", "more than 100,000 values"),
    ("label: !!bool maybe", "the tag '!!bool' in line 1 does not fit its value"),
    ("x: " + "[" * 100, "nested more than 64 deep"), ("x: " + "[" * 10_000, "exceeded maximum nesting depth"),
    ("rounds: 2\0", "not valid YAML"),
    ('population: {data_dir: "a\\0b"}', "population.data_dir='a\\x00b': text with the character NUL"),
    *((content, "") for content in (b"\xff\xfe\x00", b"- 1\n- 2", b"a: [1\nb: }", b"\trounds: 3", b"? [a]\n: 2", b"1: 2")),
]  # fmt: skip


def test_yaml_that_is_too_much_or_cannot_be_read(subtests, command, tmp_path):
    path = tmp_path / "bad.yaml"
    for content, says in TOO_MUCH:
        with subtests.test(str(content)[:40]):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            assert says in line(command("plan", path))
            line(command("paper", path))


def test_aliases_are_fine(tmp_path):
    (tmp_path / "c.yaml").write_text("compare:\n  A: &a {rounds: 3}\n  B: {<<: *a, algorithm.lr: 1}\n  C: *a\n")
    compare = load(tmp_path / "c.yaml").compare
    assert compare == {"A": {"rounds": 3}, "B": {"rounds": 3, "algorithm.lr": 1}, "C": {"rounds": 3}}


def test_paths_with_the_character_nul(command, no_ray, config):
    for arguments in (["run", config, "--out", "a\0b"], ["convert", "a\0b", "c"], ["report", "a\0b"]):
        assert "text with the character NUL" in line(command(*arguments))
    with pytest.raises(ConfigError, match="the character NUL"):
        check_free(Path("a\0b"))
    assert "a?b?.yaml: no such configuration file" in line(command("plan", "a\nb\x1b.yaml"))


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "fedfleet.simulator.executors.ray", None)  # importing it fails


OPTIONS = [
    ("--until soon", "until='soon'"), ("--max-seconds soon", "Invalid value for '--max-seconds'"),
    ("--max-seconds -1", "max_seconds=-1.0"), ("--jobs 0", "Invalid value for '--jobs'"),
    ("--fast", "No such option: --fast"),
]  # fmt: skip


def test_wrong_options_and_commands(subtests, command, no_ray, tmp_path, config):
    out = tmp_path / "out"
    all_told(subtests, lambda given: command("run", config, *given.split(), "--out", out), OPTIONS)
    assert not out.exists()
    for given in ("run", "list", "list clients", "rum", "report nowhere", ""):
        with subtests.test(given):
            line(command(*given.split()))


@pytest.mark.parametrize("content", [b"", b"junk" * 100, "misfit", "cut"])
def test_files_to_start_from(command, no_ray, tmp_path, config, content):
    path = tmp_path / "model.safetensors"
    if isinstance(content, str):
        save_file({"x.net.1.weight": torch.zeros(3, 3)}, path)
        content = path.read_bytes()[: None if content == "misfit" else -8]
    path.write_bytes(content)
    out = tmp_path / "out"
    line(command("run", config, "--warm-start", path, "--out", out), f"warm_start={path}: ")
    assert not out.exists()


def test_folders_that_cannot_be_made_or_are_there(subtests, command, no_ray, tmp_path, config):
    (tmp_path / "file").write_text("mine")
    for overrides, out in (
        ([], "file"),
        (["seeds=[0, 1]"], "file/below"),
        ([], "x" * 300),
        (["seeds=[0, 1]"], "x" * 300),
    ):
        with subtests.test(f"{overrides} {out}"):
            line(command("run", config, *overrides, "--out", tmp_path / out), str(tmp_path / out))
            assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "file"]
    (tmp_path / "out").mkdir()
    (tmp_path / "file").rename(tmp_path / "out" / "precious.txt")
    assert str(tmp_path / "out") in line(command("run", config, "--out", tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["precious.txt"]


def test_actors_share_cpus_and_gpus_as_ray_does(monkeypatch, command, config):
    """A share of a GPU is on one GPU: of 0.6 each takes one."""
    four = ["executor.actors=4", f"executor.cpus_per_actor={resolve.cpus() / 4}"]
    assert command("plan", config, *four)[::2] == (0, "")
    monkeypatch.setattr(resolve, "gpus", lambda: 2)
    monkeypatch.setattr(resolve, "cpus", lambda: 8)
    resolve.check_early(load({"executor": {"actors": 2, "gpus_per_actor": 0.6}}))
    resolve.check_early(load({"executor": {"actors": 4, "gpus_per_actor": 0.5}}))
    for executor in ({"actors": 3, "gpus_per_actor": 0.6}, {"actors": 2, "gpus_per_actor": 2}):
        with pytest.raises(ConfigError, match=r"executor\.actors"):
            resolve.check_early(load({"executor": executor}))
    for executor in ({"kind": "ray", "device": "cuda"}, {"device": "cpu", "gpus_per_actor": 1}):
        for where in ({}, {"address": "auto"}):
            with pytest.raises(ConfigError, match=r"executor\.(device=cuda|gpus_per_actor=1):"):
                resolve.check_early(load({"executor": {**executor, **where}}))
    resolve.check_early(load({"executor": {"device": "cuda", "tf32": True, "deterministic": False}}))
    assert resolve.actors(load({"executor.gpus_per_actor": 0.3})) == 6
    assert resolve.actors(load({})) == 8


def test_an_experiment_is_one_run():
    for many in ({"seeds": [1, 2]}, {"compare": {"a": {}}}, {"vary": {"rounds": [1]}}):
        with pytest.raises(ConfigError, match=f"^{next(iter(many))}=.*call fedfleet.run_all, use `fedfleet run`"):
            Experiment(load(QUICK, many))
