"""Parts named as ``module:name`` or by a package: they are what built-in ones are, to the byte, and told by their code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedfleet
from fedfleet.commands import study
from fedfleet.datasets.files import DataError
from fedfleet.experiments import campaign
from fedfleet.experiments.progress import Progress
from fedfleet.report.groups import grouped
from fedfleet.report.study_tables import MARK
from fedfleet.report.tables import read
from fedfleet.simulator import registry
from tests.front.experiments import own_parts
from tests.front.experiments.resuming import check_equal
from tests.refusals import all_say, tells

HERE = "tests.front.experiments.own_parts:"
CONFIG: dict[str, Any] = {
    "rounds": 4, "population": {"dataset": {"name": "digits"}, "clients": 12}, "task": {"model": "logistic"},
    "algorithm": {"name": "scaffold", "lr": 0.1, "batch_size": 4, "steps": 3}, "cohort": {"size": 6, "wait_for": 3},
    "executor": {"kind": "local", "block_size": 2}, "evaluation": {"every": 2}, "checkpoint": {"every_s": 0},
}  # fmt: skip
BUILT_IN: dict[str, Any] = {
    "availability": {"kind": "bernoulli", "rate": 0.7}, "selection": "uniform",
    "devices": {"kind": "homogeneous", "median_s": 2.0}, "transforms": {"up": ["fp16"], "down": ["fp16"]},
}  # fmt: skip


def own(here: str = HERE) -> dict[str, Any]:
    return {
        "availability": {"kind": f"{here}Coin", "arguments": {"rate": 0.7}},
        "selection": {"kind": f"{here}Even"},
        "devices": {"kind": f"{here}Homogeneous", "arguments": {"median_s": 2.0}},
        "transforms": {
            "up": [f"{here}half"],
            "down": [{"name": f"{here}half", "arguments": {"error_feedback": False}}],
        },
    }


ROWS = {"name": f"{HERE}digits", "arguments": {"rows": 300}}
STOP = {"callbacks": [{"name": f"{HERE}Stop", "arguments": {"rounds": 2}}]}


def model(run: fedfleet.Run) -> bytes:
    return (run.folder / "model.safetensors").read_bytes()


def experiment(*overrides: dict[str, Any]) -> fedfleet.Experiment:
    return fedfleet.Experiment(fedfleet.load(CONFIG, {k: v for each in overrides for k, v in each.items()}))


@pytest.fixture
def folder(tmp_path, beside):
    """A folder with a configuration and the parts beside it, under a name that no other test has; and one to run in."""
    found, name = beside, f"part_{''.join(c for c in tmp_path.name if c.isalnum())}"
    (found / f"{name}.py").write_text(Path(own_parts.__file__).read_text())
    data = {"name": f"{name}:digits", "arguments": {"rows": 300}}
    stop = [{"name": f"{name}:Stop", "arguments": {"rounds": 2}}]
    config = {**CONFIG, **own(f"{name}:"), "callbacks": stop, "population": {"dataset": data, "clients": 12}}
    (found / "run.yaml").write_text(yaml.safe_dump(config))
    yield found
    sys.modules.pop(name, None)


def changed(folder: Path, before: str, after: str) -> str:
    """Change the code of the parts, for what comes to look at it as another process would."""
    (path,) = folder.glob("part_*.py")
    text = path.read_text()
    assert text.count(before) == 1
    later = path.stat().st_mtime + 2  # Python takes a compiled module for this one's by size and whole seconds
    path.write_text(text.replace(before, after))
    os.utime(path, (later, later))
    sys.modules.pop(path.stem, None)
    return path.stem


CHANGES = {
    "availability.source": ('bernoulli(rng.fold(key, "online", clients), self.rate)\n', "bernoulli(key, self.rate)\n"),
    "selection.source": ("min(self.first,", "min(0 + self.first,"),
    "devices.source": ("torch.exp(0.5 *", "torch.exp(0.50001 *"),
    "transforms.up[0].source": ("Rounded(error_feedback)", "Rounded(bool(error_feedback))"),
    "population.dataset.source": ("load(data_dir)\n", "load(data_dir or None)\n"),
}
"""Of every section, what is changed of its code."""


@pytest.mark.parametrize("inner", ["serial", "batched"])
def test_own_parts_are_the_built_in_ones_to_the_byte(tmp_path, inner):
    runs = [
        fedfleet.run({**CONFIG, **parts}, {"executor.inner": inner}, out=tmp_path / name)
        for name, parts in (("own", own()), ("ours", BUILT_IN))
    ]
    assert model(runs[0]) == model(runs[1])
    for column in ("completed", "unavailable", "late", "virtual_s"):
        assert runs[0].rounds[column].tolist() == runs[1].rounds[column].tolist()
    assert runs[0].rounds["late"].sum() > 0 < runs[0].rounds["unavailable"].sum()


def test_arguments_count(tmp_path):
    one = fedfleet.run({**CONFIG, **own()}, out=tmp_path / "one")
    for i, (key, value) in enumerate(
        {"availability.arguments.rate": 0.5, "selection.arguments": {"first": 7}, "devices.arguments": {}}.items()
    ):
        other = fedfleet.run({**CONFIG, **own()}, {key: value, "rounds": 2}, out=tmp_path / str(i))
        column = "virtual_s" if key.startswith("devices") else "train_loss"
        assert other.rounds[column].tolist() != one.rounds[column].tolist()[:2]


@pytest.mark.slow
def test_they_go_on_to_the_bit_and_with_the_same_code_alone(folder, monkeypatch, tmp_path):
    whole = fedfleet.run(folder / "run.yaml", {"callbacks": None}, out=tmp_path / "whole")
    run = fedfleet.run(folder / "run.yaml", out=tmp_path / "run")
    (stem,) = (path.stem for path in folder.glob("part_*.py"))
    assert (run.summary["stopped"], run.summary["rounds"]) == ({"by": f"{stem}:Stop", "why": "enough seen"}, 2)
    written = yaml.safe_load((run.folder / "config.yaml").read_text())
    sections = [written[section] for section in ("availability", "selection", "devices")]
    listed = [*written["transforms"]["up"], *written["transforms"]["down"], *written["callbacks"]]
    for said in (*sections, *listed, data := written["population"]["dataset"]):
        assert len(said["source"]) == 64
        assert said["version"] is None
    assert len(data["sha256"]) == 64
    assert fedfleet.resume(run.folder).summary["rounds"] == 2  # it is at its end
    again = changed(folder, "self.rounds else", "self.rounds + 1 - 1 else")  # of a callback, the code may change
    longer = fedfleet.resume(run.folder, {"callbacks": [{"name": f"{again}:Stop", "arguments": {"rounds": 3}}]})
    assert (longer.summary["rounds"], longer.summary["stopped"]["by"]) == (3, f"{again}:Stop")
    longer = fedfleet.resume(run.folder, {"callbacks": []})
    assert longer.summary["status"] == "finished"
    check_equal(longer.folder, whole.folder)
    for key, (before, after) in CHANGES.items():
        changed(folder, before, after)
        with pytest.raises(fedfleet.ConfigError, match="is other by now") as e:
            fedfleet.resume(run.folder, {"rounds": 5})
        assert str(e.value).startswith(key)
        changed(folder, after, before)
    changed(folder, "torch.exp(0.5 *", "torch.exp(0.50001 *")
    other = fedfleet.run(folder / "run.yaml", {"callbacks": None}, out=tmp_path / "other")
    lines = grouped([read(r.folder) for r in (longer, whole, other)])
    assert sorted(map(len, lines.values())) == [1, 2]
    assert all("devices.source" in name for name in lines)


@pytest.mark.ray
def test_workers_are_sent_them(folder, tmp_path):
    local = fedfleet.run(folder / "run.yaml", out=tmp_path / "local")
    for actors in (1, 2):
        given = {"executor.kind": "ray", "executor.actors": actors, "executor.cpus_per_actor": 0.5}
        ray = fedfleet.run(folder / "run.yaml", given, out=tmp_path / str(actors))
        assert model(local) == model(ray)


@pytest.mark.slow
def test_several_runs_and_studies_and_plans(folder, tmp_path, command):
    changes = {"compare": {"a": {}, "b": {"availability": "always"}}, "seeds": [0, 1], "rounds": 3}
    config = fedfleet.load(folder / "run.yaml", changes)
    runs = campaign.run(config, tmp_path / "both", Progress.silent(), report=False)
    assert [run.summary["rounds"] for run in runs] == [2] * 4
    grid, none = ["availability.arguments.rate=0.5,0.9"], fedfleet.load(folder / "run.yaml", {"callbacks": None})
    ready = study.prepare(study.plan(fedfleet.load(folder / "run.yaml"), grid, 1, None), Progress.silent())
    for trial in ready.study.trials:
        campaign.prepare(trial, {}).run(study.folder(tmp_path / "study", trial))
    (tmp_path / "study" / MARK).touch()
    assert study.finished(ready, tmp_path / "study") == [True, True]  # a callback's stop is an end
    later = study.prepare(study.plan(none, grid, 1, None), Progress.silent())
    assert study.finished(later, tmp_path / "study") == [False, False]
    status, out, _ = command("plan", folder / "run.yaml", "availability.arguments.rate=0.5")
    assert status == 0
    assert "callbacks[0]: part_" in out
    assert "Coin," in out
    status, _, said = command("run", folder / "run.yaml", "availability.arguments.rate=1.5", "--out", tmp_path / "no")
    assert (status, said) == (2, "error: availability.arguments.rate=1.5: input should be less than or equal to 1\n")


def test_own_data_are_dealt_and_recorded(tmp_path):
    given = {**CONFIG, "population": {"dataset": ROWS, "clients": 12}, "callbacks": STOP["callbacks"]}
    run = fedfleet.run(given, out=tmp_path / "run")
    sha256 = yaml.safe_load((run.folder / "config.yaml").read_text())["population"]["dataset"]["sha256"]
    assert experiment(given).population.num_examples(own_parts.torch.arange(12)).sum() == 300
    with pytest.raises(DataError, match="now holds other data"):
        experiment(given, {"population.dataset.arguments.rows": 299, "population.dataset.sha256": sha256})


WRONG = [
    ({"availability": {"kind": f"{HERE}Coin", "arguments": {"rat": 1}}}, "^availability.arguments.rat=1: Coin"),
    ({"availability": {"kind": f"{HERE}Coin", "arguments": {"rate": "1"}}}, "rate='1': input should be a valid number"),
    ({"availability": {"kind": f"{HERE}Coin", "rate": 1}}, "^availability.rate=1: unknown key"),
    ({"availability": f"{HERE}Counting"}, "its 'online' changed"),
    ({"availability": f"{HERE}Global"}, "global generator"),
    ({"availability": f"{HERE}Together"}, "its 'online' says something else of a client"),
    ({"availability": f"{HERE}Numbers"}, "its 'online' returned float32 (12,) … bool (12,)"),
    ({"availability": f"{HERE}Turning"}, "its 'online' says something else of a client"),
    ({"availability": f"{HERE}Sure"}, "its 'chance' returned float64 (12,) … from 0 to 1"),
    ({"availability": f"{HERE}unlike"}, "two that are made of one seed"),
    ({"availability": f"{HERE}whole"}, "a Tensor without 'online'"),
    ({"selection": {"kind": f"{HERE}Even", "arguments": {"first": 0}}}, "^selection.arguments.first=0"),
    ({"selection": {"kind": f"{HERE}Even", "arguments": {"least": 13}}}, "Even: least is above first"),
    ({"selection": f"{HERE}Nobody"}, "each of 0 … 11"), ({"selection": f"{HERE}Twice"}, "named clients twice"),
    ({"selection": f"{HERE}Writing"}, "its 'invite' changed"),
    ({"devices": f"{HERE}Backwards"}, "finite and not below 0"), ({"devices": f"{HERE}Coin"}, "a Coin without 'times'"),
    ({"transforms.up": [f"{HERE}Coin"]}, f"^transforms.up[0].name='{HERE}Coin'"),
    ({"transforms.up": ["fp16", f"{HERE}half"]}, "transforms.up[1].name= … fp16 leaves no floats behind it"),
    ({"transforms.down": [{"name": f"{HERE}half", "arguments": {"error_feedback": True}}]}, "delta remembers"),
    ({"transforms.up": [{"name": f"{HERE}Drawn", "arguments": {"error_feedback": False}}]}, "torch's global generator"),
    *(({f"transforms.{way}": ["rotation"] * first + [{"name": f"{HERE}Wrong", "arguments": {"how": how}}]},
     f"transforms.{way}[{first}] … 'decode' of what its 'encode' returns makes {says}") for way in ("up", "down") for how,
     first,
     says in (*(("scalar", 1, "float32 () of a leaf"), ("whole", 0, "int64"), ("less", 0, "leaves")),
     *(("more", 0, "leaves … 'more'"), ("slots", 0, "slots [] of ["), ("nothing", 0, "slots NoneType")))),
    ({"callbacks": f"{HERE}Coin"}, f"^callbacks[0].name='{HERE}Coin'"),
    ({"callbacks": ["Stop"]}, "^callbacks[0].name='Stop'"),
    ({"callbacks": [{"name": f"{HERE}Stop", "rounds": 2}]}, "^callbacks[0].rounds=2: unknown key"),
    ({"population.dataset": f"{HERE}whole"}, "population=a Tensor: it has no 'summary'"),
    ({"selection": f"{HERE}Even", "privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}},
     "it may look at clients' losses"),
]  # fmt: skip


def test_what_will_not_do_is_refused(subtests):
    def call(given):
        base = {} if "privacy" not in given else {"algorithm": "fedavg", "algorithm.weight": "uniform"}
        experiment(base, given).try_out()

    all_say(subtests, call, WRONG, fedfleet.FedfleetError)


# Installed packages

METADATA = "Metadata-Version: 2.1\nName: {0}\nVersion: {1}\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package that names its parts."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    place = tmp_path / "lib" / "site-packages"

    def installed(package: str, version: str = "1.2", **groups: str) -> None:
        about = place / f"{package}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "top_level.txt").write_text(f"{package}\n")
        (about / "METADATA").write_text(METADATA.format(package, version))
        lines = "\n".join(f"[fedfleet.{group}]\n{line}\n" for group, line in groups.items())
        (about / "entry_points.txt").write_text(lines)
        (place / f"{package}.py").write_text(Path(own_parts.__file__).read_text())
        if str(place) not in sys.path:
            sys.path.append(str(place))
        registry._packaged.cache_clear()

    yield installed
    registry._packaged.cache_clear()
    for package in ("coins", "dice"):
        sys.modules.pop(package, None)


def test_an_installed_package_adds_names(install, tmp_path, command):
    more = {"algorithms": "heated = coins:heated", "callbacks": "stop = coins:Stop"}
    install("coins", availability="coin = coins:Coin", transforms="half = coins:half", **more)
    parts = {
        "availability": {"kind": "coin", "arguments": {"rate": 0.7}},
        "transforms": {"up": ["half"]},
        "callbacks": [{"name": "stop", "arguments": {"rounds": 2}}],
    }
    run = fedfleet.run({**CONFIG, **parts}, out=tmp_path / "run")
    assert run.summary["stopped"]["by"] == "stop"
    written = yaml.safe_load((run.folder / "config.yaml").read_text())
    for said in (written["availability"], written["transforms"]["up"][0], written["callbacks"][0]):
        assert (said["version"], len(said["source"])) == ("coins 1.2", 64)
    by_path = {**parts, "availability": {"kind": "coins:Coin", "arguments": {"rate": 0.7}}}
    same = fedfleet.run({**CONFIG, **by_path}, out=tmp_path / "same")
    assert model(run) == model(same)
    assert yaml.safe_load((same.folder / "config.yaml").read_text())["availability"]["version"] == "coins 1.2"
    status, out, _ = command("list", "availability")
    assert (status, out.splitlines()[-1].split()) == (0, ["coin", "coins:Coin", "of", "coins", "1.2"])
    assert command("list", "callbacks")[1].split() == ["stop", "coins:Stop", "of", "coins", "1.2"]
    status, out, _ = command("show", "availability", "coin")
    assert (status, out.splitlines()[0]) == (0, "coin  coins:Coin of coins 1.2")
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "arguments." in line]
    assert rows == [
        ["", "arguments.rate", "number > 0, ≤ 1", "0.9", "", ""],
        ["", "arguments.seed", "integer", "0", "", ""],
    ]
    assert "As bernoulli." in out
    assert yaml.safe_load(out[out.index("availability:") :]) == {"availability": {"kind": "coin"}}
    status, out, _ = command("show", "algorithm", "heated")
    rows = [[cell.strip() for cell in line.split("│")][1:4] for line in out.splitlines() if "│" in line]
    assert ["heat", "number > 0", "1.0"] in rows
    assert ["client_optimizer.clip_norm", "number | null > 0", "null"] in rows
    assert [row[0] for row in rows if row[0].startswith("arguments.")] == [
        f"arguments.{k}" for k in ("task", "cohort", "power")
    ]
    status, out, _ = command("show", "transform", "half")
    assert yaml.safe_load(out[out.index("transforms:") :]) == {"transforms": {"up": [{"name": "half"}]}}
    status, out, _ = command("show", "callback", "stop")
    assert (status, out.splitlines()[0]) == (0, "stop  coins:Stop of coins 1.2")
    status, _, error = command("show", "callback", "stopp")
    assert (status, error) == (2, "error: show callback='stopp': unknown; did you mean 'stop'? choose one of stop\n")
    tells(lambda: experiment(parts, {"availability.version": "coins 1.1"}), "availability.version='coins 1.1'")
    tells(lambda: experiment({"availability": "coinn"}), "did you mean 'coin'")


def test_a_name_that_is_not_clear_is_refused(install, command):
    install("coins", availability="always = coins:Coin\nmine = coins:Coin", tasks="nothing = coins:whole")
    with pytest.raises(fedfleet.ConfigError) as e:
        experiment({"availability": "always"})
    assert str(e.value) == (
        "availability.kind='always': coins 1.2 names one of its own as the built-in one is called: uninstall it, or name it by "
        "coins:Coin"
    )
    assert "refused" in command("list", "availability")[1].splitlines()[0]
    assert experiment({"availability": "mine"}).config.availability.kind == "mine"
    install("dice", availability="mine = dice:Coin", tasks="broken = dice:Nothing", datasets="rolls = dice:digits")
    assert command("show", "dataset", "rolls")[1].count("told by fedfleet, or to be given") == 3
    status, _, error = command("show", "task", "broken")
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("error: task: broken, dice 1.2='dice:Nothing': dice has no 'Nothing'")
    status, _, error = command("show", "availability", "mine")
    assert (status, error.count("both have that name")) == (2, 1)
    tells(lambda: experiment({"availability": "mine"}), "coins 1.2 and dice 1.2 both have that name")
