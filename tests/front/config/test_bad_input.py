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

QUICK = {
    "rounds": 2,
    "population": {"dataset": "digits", "clients": 30, "partition": {"kind": "label_sorted"}},
    "task": {"name": "auc", "model": "mlp", "hidden": [8]},
    "algorithm": {"name": "cdma_ada", "steps": 2, "batch_size": 5},
    "cohort": {"invite": 8, "respond": "siwer"},
    "executor": {"kind": "ray"},
}


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
        (["population.dataset=fashion-mnist"], ["population.dataset.name='fashion-mnist'", "fashion_mnist"]),
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
        (["algorithm.alpha=5.0"], ["alpha above 1 stays at 1 without decay"]),
        (["cohort.late=keep"], ["cohort.late='keep'", "'gradient' is of use in its own round alone"]),
        (["seed.deep=1"], ["seed=", "integer"]),
        (["rounds"], ["rounds", "key=value"]),
        (["until=soon"], ["until='soon'", "eval/auc=0.95"]),
        (["until=accuracy=0.9"], ["until='accuracy=0.9'", "write eval/accuracy=0.9"]),
        (["until=eval/acc=0.9"], ["until", "eval/acc", "eval/auc"]),
        (["warm_start=nowhere.safetensors"], ["warm_start", "nowhere.safetensors"]),
        (["algorithm.steps=2", "algorithm.epochs=1"], ["steps or epochs, not both"]),
        (["compare={A: {algorithm.name: cdma_one}, B: {algorithm.lrr: 1}}"], ["B", "algorithm.lrr"]),
        (["compare={A: {}, B: {cohort.invite: 99}}"], ["run 'B': cohort.invite=99"]),
        (["compare={A b: {}, A-b: {}}"], ["'A b' and 'A-b'", "folder 'A-b'"]),
        (["compare={A: {seeds: [1, 2]}}"], ["compare.A.seeds=[1, 2]", "at the top"]),
        (["compare={}"], ["compare={}", "at least 1"]),
        (["compare=[A]"], ["compare=['A']", "mapping"]),
        (["vary={rounds: [1, x]}"], ["run 'rounds=x': rounds='x'"]),
        (["vary={cohort.invite: [8, 99]}"], ["run 'invite=99': cohort.invite=99"]),
        (["vary.rounds=[1, 1]"], ["'rounds=1' and 'rounds=1'"]),
        (["vary={seed: [1, 2]}"], ["vary.seed=[1, 2]"]),
        (["seeds=[]"], ["seeds=[]"]),
        (["seeds=[1, 1]"], ["seeds=[1, 1]", "each seed once"]),
        (["seed=18446744073709551616"], ["seed=18446744073709551616", "2^63"]),
        (["rounds='3'"], ["rounds='3'", "integer"]),
        (["rounds=true"], ["rounds=True", "integer"]),
        (["rounds=2020-01-01"], ["rounds=", "date"]),
        (["rounds={"], ["rounds={", "quote it"]),
        (["..=1"], ["'..=1'", "dotted.key=value"]),
        (["population=null"], ["population=None", "mapping"]),
        (["task=[auc]"], ["task=['auc']", "give a name"]),
        (["algorithm.name={}"], ["algorithm.name={}", "choose one of"]),
        (["algorithm.lr=.nan"], ["algorithm.lr=nan", "finite"]),
        (["max_seconds=.inf"], ["max_seconds=inf", "finite"]),
        (["algorithm.steps=1000000000000000"], ["algorithm.steps=1000000000000000", "memory", "lower it"]),
        (["task.hidden=[1000000000000]"], ["task.name='auc'", "floats", "smaller"]),
        (["task.hidden=[0]"], ["task.hidden.0=0", "greater than or equal to 1"]),
        (["task.positive_class=10"], ["task.positive_class=10", "classes 0 to 9"]),
        (["task.model=resnet"], ["task.model='resnet'", "lenet_relu"]),
        (["cohort.respond=4", "cohort.min_responses=5"], ["cohort.min_responses=5", "may go on after 4"]),
        (["cohort.respond=siwer", "cohort.invite=8", "cohort.min_responses=6"], ["cohort.min_responses=6", "after 5"]),
        (["cohort.over_select=1e3", "cohort.respond=all"], ["cohort.over_select=1000", "population.clients="]),
        (["cohort.over_select=2", "cohort.respond=siwer"], ["over_select", "respond: all"]),
        (["executor.capture=fast"], ["executor.capture", "compiled"]),
        (["executor.capture=compiled", "executor.inner=serial"], ["executor.capture=compiled", "set it to true"]),
        (
            ["executor.capture=compiled", "executor.kind=ray", "faults.client_timeout_s=9"],
            ["executor.capture=compiled", "client_timeout_s=9"],
        ),
        (["cohort.partial_work=true"], ["partial_work", "deadline_s"]),
        (["algorithm=scaffold", "task=classification", "cohort.late=keep"], ["cohort.late='keep'", "state"]),
        (["algorithm=fedbuff", "task=classification", "cohort.invite=7"], ["cohort.invite=7", "asynchronous"]),
        (["selection=oorts"], ["selection.kind='oorts'", "'oort'"]),
        (["cohort.response_low=0.9", "cohort.response_high=0.6"], ["cohort.response_low=0.9", "lower it"]),
        (["population.partition=by_domain"], ["population.partition='by_domain'", "no domains"]),
        (["population.partition={kind: dirichlet, min_size: 99}"], ["min_size is 99", "48"]),
        (["population.partition={kind: dirichlet, alpha: 1e-4, min_size: 0}"], ["no examples", "min_size"]),
        (["availability={kind: bernoulli, rate: 0}"], ["availability.rate=0", "greater than 0"]),
        (["availability.rate=0.5"], ["availability.rate=0.5", "unknown key", "availability.kind=bernoulli, "]),
        (["executor.cpus_per_actor=1000"], ["executor.cpus_per_actor=1000", "CPUs"]),
        (["executor.gpus_per_actor=1000"], ["executor.gpus_per_actor=1000", "GPUs"]),
        (["executor.gpus_per_actor=1.5"], ["executor.gpus_per_actor=1.5", "whole"]),
        (["executor.address=127.0.0.1:1"], ["executor.address='127.0.0.1:1'", "ray start --head"]),
        (["executor.address=ray://127.0.0.1:10001"], ["ray://127.0.0.1:10001", "ray job submit"]),
        (["executor.address=nonsense"], ["executor.address='nonsense'", "host:port"]),
        (["until=eval/auc=nan"], ["until='eval/auc=nan'", "a number"]),
    ],
)
def test_one_line_exit_two_nothing_written(command, no_ray, tmp_path, config, overrides, says):
    out = tmp_path / "out"
    status, _, error = command("run", config, *overrides, "--out", str(out))
    assert status == 2, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    for text in says:
        assert text in error
    assert not out.exists()


def test_ray_is_not_even_imported_for_bad_input(tmp_path, config):
    code = f"""
import sys
from fedfleet.commands import cli
sys.argv = ["fedfleet", "run", {config!r}, "cohort.invite=31", "--out", {str(tmp_path / "out")!r}]
try:
    cli.main()
except SystemExit as e:
    print(e.code, "ray" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["2", "False"]


def test_a_run_folder_is_never_written_over(command, tmp_path, config):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    status, _, error = command("run", config, "--out", str(out))
    assert status == 2
    assert str(out) in error
    assert sorted(p.name for p in out.iterdir()) == ["precious.txt"]


def test_missing_and_broken_files(command, tmp_path, config):
    status, _, error = command("run", str(tmp_path / "none.yaml"))
    assert status == 2
    assert "none.yaml" in error
    broken = tmp_path / "broken.yaml"
    broken.write_text("rounds: [1")
    status, _, error = command("run", str(broken))
    assert status == 2
    assert "broken.yaml" in error
    assert error.count("\n") == 1


def test_truncated_data(command, tmp_path, config):
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(
            gzip.compress(b"\x00\x00\x08\x03" + b"\x00\x00\x00\x09" * 3 + b"short")
        )
    where = ["population.dataset=fashion_mnist", f"population.data_dir={tmp_path / 'data'}"]
    status, _, error = command("run", config, *where, "--out", tmp_path / "out")
    assert status == 2
    assert "train-images-idx3-ubyte.gz" in error
    assert error.count("\n") == 1
    assert not Path(tmp_path / "out").exists()


LAUGHS = "".join(
    f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]\n" for before, key in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (f"a: &a x\n{LAUGHS}label: *j", "more than 100,000 values, each alias written out"),
        (f"vary:\n  seed: &a [1]\n{LAUGHS}", "more than 100,000 values"),
        ("x: &a {y: *a}", "more than 100,000 values"),
        ("label: !!bool maybe", "a value that its tag does not fit ('maybe')"),
        ("label: !!timestamp x", "a value that its tag does not fit"),
        ("x: " + "[" * 10_000, "nested more than 64 deep"),
        ("rounds: 2\0", "not valid YAML"),
        ('population: {data_dir: "a\\0b"}', "population.data_dir='a\\x00b': text with the character NUL"),
        ('warm_start: "\\0"', "warm_start='\\x00': text with the character NUL"),
    ],
)
def test_yaml_that_is_too_much(command, tmp_path, content, says):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    status, _, error = command("plan", path)
    assert (status, error.count("\n")) == (2, 1)
    assert says in error
    status, _, error = command("paper", path)
    assert (status, error.count("\n")) == (2, 1)


def test_aliases_are_fine(tmp_path):
    (tmp_path / "c.yaml").write_text("compare:\n  A: &a {rounds: 3}\n  B: {<<: *a, algorithm.lr: 1}\n  C: *a\n")
    compare = load(tmp_path / "c.yaml").compare
    assert compare == {"A": {"rounds": 3}, "B": {"rounds": 3, "algorithm.lr": 1}, "C": {"rounds": 3}}


@pytest.mark.parametrize(
    "arguments", [["run", "{config}", "--out", "a\0b"], ["convert", "a\0b", "c"], ["report", "a\0b"]]
)
def test_paths_with_the_character_nul(command, no_ray, config, arguments):
    status, _, error = command(*(a.format(config=config) for a in arguments))
    assert (status, error.count("\n")) == (2, 1)
    assert "text with the character NUL" in error
    with pytest.raises(ConfigError, match="the character NUL"):
        check_free(Path("a\0b"))


def test_a_message_is_one_line_whatever_a_name_holds(command, tmp_path):
    status, _, error = command("plan", tmp_path / "a\nb\x1b.yaml")
    assert (status, error.count("\n")) == (2, 1)
    assert "a?b?.yaml: no such configuration file" in error


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "fedfleet.simulator.executors.ray", None)  # importing it fails


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--until", "soon"], "until='soon'"),
        (["--max-seconds", "soon"], "--max-seconds"),
        (["--max-seconds", "-1"], "max_seconds=-1.0"),
        (["--jobs", "0"], "--jobs"),
        (["--fast"], "--fast"),
    ],
)
def test_wrong_options(command, no_ray, tmp_path, config, arguments, says):
    status, _, error = command("run", config, *arguments, "--out", str(tmp_path / "out"))
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("error: ")
    assert says in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["run"], ["list"], ["list", "clients"], ["rum"], ["report", "nowhere"], []])
def test_wrong_commands(command, arguments):
    status, _, error = command(*arguments)
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("error: ")


@pytest.mark.parametrize("content", [b"", b"junk" * 100, "misfit", "cut"])
def test_files_to_start_from(command, no_ray, tmp_path, config, content):
    path = tmp_path / "model.safetensors"
    if isinstance(content, str):
        save_file({"x.net.1.weight": torch.zeros(3, 3)}, path)
        content = path.read_bytes()[: None if content == "misfit" else -8]
    path.write_bytes(content)
    status, _, error = command("run", config, "--warm-start", str(path), "--out", str(tmp_path / "out"))
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: warm_start={path}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("overrides", [[], ["seeds=[0, 1]"]])
@pytest.mark.parametrize("out", ["file", "file/below", "x" * 300])
def test_folders_that_cannot_be_made(command, no_ray, tmp_path, config, overrides, out):
    (tmp_path / "file").write_text("mine")
    status, _, error = command("run", config, *overrides, "--out", str(tmp_path / out))
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("error: --out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "file"]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"- 1\n- 2",
        b"a: [1\nb: }",
        b"\trounds: 3",
        b"x: &a {y: *a}",
        b"? [a]\n: 2",
        b"1: 2",
        b"null: 3",
    ],
)
def test_configurations_that_cannot_be_read(command, tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    status, _, error = command("plan", str(path))
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("error: ")


def test_fractions_of_a_cpu_are_fine(command, config):
    four = ["executor.actors=4", f"executor.cpus_per_actor={resolve.cpus() / 4}"]
    assert command("plan", config, *four)[::2] == (0, "")


def test_actors_share_gpus_as_ray_does(monkeypatch):
    """A share of a GPU is on one GPU: of 0.6 each takes one."""
    monkeypatch.setattr(resolve, "gpus", lambda: 2)
    monkeypatch.setattr(resolve, "cpus", lambda: 8)
    resolve.check_early(load({"executor": {"actors": 2, "gpus_per_actor": 0.6}}))
    resolve.check_early(load({"executor": {"actors": 4, "gpus_per_actor": 0.5}}))
    for executor in ({"actors": 3, "gpus_per_actor": 0.6}, {"actors": 2, "gpus_per_actor": 2}):
        with pytest.raises(ConfigError, match=r"executor\.actors"):
            resolve.check_early(load({"executor": executor}))
    assert resolve.actors(load({"executor.gpus_per_actor": 0.3})) == 6
    assert resolve.actors(load({})) == 8


def test_an_experiment_is_one_run():
    for many in ({"seeds": [1, 2]}, {"compare": {"a": {}}}, {"vary": {"rounds": [1]}}):
        with pytest.raises(ConfigError, match=f"^{next(iter(many))}=.*call fedfleet.run_all, use `fedfleet run`"):
            Experiment(load(QUICK, many))
