"""Run folders as others may hand them over: damaged, cut, with links in them, with code that they name."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import fedfleet
from fedfleet.commands import watch
from fedfleet.commands.study import _finished
from fedfleet.config.schema import recorded
from fedfleet.experiments import parts as growing
from fedfleet.files import parquet
from fedfleet.files.summary import KEPT, MODELS, TOLD
from fedfleet.report import card, tables
from fedfleet.simulator.errors import FedfleetError
from tests.front.experiments.resuming import BASE, DIGESTS, Interrupting, check_equal, config
from tests.parts import slow_but
from tests.refusals import refused

DEEP = {".yaml": "[" * 100_000, ".json": "[" * 100_000, ".jsonl": "[" * 100_000 + "\n"}
READERS: dict[str, Callable[[Path], Any]] = {
    "report": lambda run: (tables.read(run).rounds, card.card(tables.read(run))),
    "open_run": lambda run: (fedfleet.open_run(run).rounds, fedfleet.open_run(run).model().state_dict()),
    "resume": lambda run: fedfleet.resume(run).summary,
    "study": lambda run: _finished(run, recorded(run / "config.yaml")),
    "watch": lambda run: watch.watch(run, Console(file=io.StringIO()), 0.0, once=True),
}


def damage(path: Path, data: Any) -> str:
    """Damage a file in one of several ways, and say how."""
    content = path.read_bytes()
    how = data.draw(st.sampled_from(["flip", "cut", "more", "gone", "deep", "pipe", "endless", "folder"]))
    path.unlink()
    if how == "flip":
        at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    elif how == "cut":
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif how == "more":
        path.write_bytes(content + data.draw(st.binary(min_size=1, max_size=9)))
    elif how == "deep":
        path.write_text(DEEP.get(path.suffix, "[" * 100_000))
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "endless":
        path.symlink_to("/dev/zero")
    elif how == "folder":
        path.mkdir()
    return how


@pytest.mark.parametrize("reader", READERS)
@given(data=st.data())
def test_whatever_is_damaged_is_told_in_one_line_or_changes_nothing(undisturbed, tmp_path_factory, reader, data):
    whole = undisturbed("stateless")
    run = shutil.copytree(whole, tmp_path_factory.mktemp("received") / "run")
    files = sorted(p.relative_to(run) for p in run.rglob("*") if p.is_file() and p.stat().st_size)
    name = data.draw(st.sampled_from(files))
    how = damage(run / name, data)
    kept = str(name) in (*KEPT, *TOLD)
    line, lacking = said(READERS[reader], run), how == "gone" and str(name) in MODELS
    if line is not None:
        assert "\n" not in line, line
        assert str(run) in line or str(name) == "config.yaml", line  # whose keys are told by themselves
        return
    assert not (kept and reader == "report" and not lacking), f"{how} of {name} was read without a word"
    assert not (kept and reader == "open_run" and not lacking), f"{how} of {name} was read without a word"
    assert not (str(name) in KEPT and reader in ("resume", "study") and not lacking), f"{how} of {name}"


def said(read: Callable[[Path], Any], run: Path) -> str | None:
    """Return what a reader refuses a folder with, None where it does not."""
    try:
        read(run)
    except (FedfleetError, FileNotFoundError) as e:
        return str(e)
    return None


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_the_best_model_of_a_run_without_a_summary_is_whole_or_refused(undisturbed, tmp_path, how):
    run = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    (run / "summary.json").unlink()
    best, content = run / "best.safetensors", (run / "best.safetensors").read_bytes()
    best.unlink()
    if how != "gone":
        best.write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if how == "flip" else b""))
        warm = recorded(run / "config.yaml") | {"warm_start": str(best)}
        refused(lambda: fedfleet.run(warm, out=tmp_path / "warm"), f"warm_start={best}")
    refused(lambda: fedfleet.resume(run), f"{best}: cannot be read (")
    assert fedfleet.resume(run, {"checkpoint.best": None}).summary["status"] == "finished"


@given(data=st.data())
def test_a_damaged_summary_is_told_of_by_whoever_shows_it(undisturbed, tmp_path_factory, data):
    run = shutil.copytree(undisturbed("stateless"), tmp_path_factory.mktemp("received") / "run")
    before = json.loads((run / "summary.json").read_text())
    how = damage(run / "summary.json", data)
    same = how in ("flip", "more") and _same(run / "summary.json", before)
    for reader in (READERS["report"], READERS["open_run"]):
        if how != "gone" and not same:
            refused(lambda reader=reader: reader(run), f"{run}", FedfleetError)


def _same(path: Path, before: Any) -> bool:
    """Say whether what a damaged file says is what it said: spaces, and another way to write a number or a letter."""
    try:
        return json.loads(path.read_text()) == before
    except ValueError:
        return False


VALUES = st.none() | st.booleans() | st.integers(-1, 9) | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
VALUES |= st.dictionaries(
    st.sampled_from(["eval/loss", "by", "x"]), st.none() | st.integers(0, 3) | st.text(max_size=3)
)


STATUS = {
    "state": "running",
    "pid": 1,
    "host": platform.node(),
    "said": [],
    "done": 2,
    "rounds": 9,
    "metrics": {},
    "curve": [],
}


@given(file=st.sampled_from(["summary.json", "environment.json", "status.json"]), value=VALUES, data=st.data())
def test_whatever_stands_at_a_key_is_told_in_one_line_or_read(undisturbed, tmp_path_factory, file, value, data):
    run = shutil.copytree(undisturbed("stateless"), tmp_path_factory.mktemp("received") / "run")
    (run / "summary.json").write_text(json.dumps(_without_digests(run)))
    (run / "status.json").write_text(json.dumps(STATUS))
    found = json.loads((run / file).read_text())
    if file == "status.json":  # which counts where there is no summary
        (run / "summary.json").unlink()
    found[data.draw(st.sampled_from(sorted(found)))] = value
    (run / file).write_text(json.dumps(found))
    for name, reader in READERS.items():
        if name != "resume":
            assert "\n" not in (said(reader, run) or "")


def test_a_summary_that_does_not_say_of_what_shape_examples_were_gives_no_model(undisturbed, tmp_path):
    run = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    whole = _without_digests(run)
    for examples in (
        None,
        {},
        {"shape": [8, 8]},
        {"shape": 8, "classes": 10},
        {"shape": ["8"], "classes": 10},
        {"shape": [8], "classes": 10, "words": "x"},
    ):
        (run / "summary.json").write_text(json.dumps(whole | {"examples": examples}))
        refused(lambda: fedfleet.open_run(run).model(), f"{run}: its summary does not say of what shape")


def test_a_table_of_other_columns_is_told_of(undisturbed, tmp_path, subtests):
    for name in ("rounds", "phases", "outcomes", "clients"):
        run = shutil.copytree(undisturbed("stateless"), tmp_path / name)
        (run / "summary.json").write_text(json.dumps(_without_digests(run)))
        pd.DataFrame({"round": ["x", "y"], "client": ["a", "b"]}).to_parquet(run / f"{name}.parquet")
        for reader in READERS:
            with subtests.test(f"{name} {reader}"):
                assert "\n" not in (said(READERS[reader], run) or "")


def killed(out: Path, case: str = "stateless", after: int = 5) -> Path:
    """Return the folder of a run as it is where its process was killed: with no summary, and with parts of tables."""
    with pytest.raises(KeyboardInterrupt):
        fedfleet.run(config(case), out=out, callbacks=Interrupting(after))
    (out / "summary.json").unlink()
    return out


@pytest.mark.parametrize(
    "part",
    slow_but(
        ["outcomes/000002.parquet", "clients/000001.parquet", "outcomes.parquet", "rounds.parquet", "phases.parquet"],
        *("outcomes/000002.parquet", "rounds.parquet"),
    ),
)
def test_a_table_of_a_killed_run_that_is_missing_or_damaged_is_seen(tmp_path, undisturbed, monkeypatch, part):
    monkeypatch.setattr(growing, "ROWS", 0)
    if "/" in part:  # else all are in one file by the end
        monkeypatch.setattr(growing.Parts, "finish", lambda self: self.flush())
    out = killed(tmp_path / "run")
    monkeypatch.undo()
    path = out / part
    content = path.read_bytes()
    path.unlink()
    refused(lambda: fedfleet.resume(shutil.copytree(out, tmp_path / "gone")), f"{tmp_path / 'gone'}", FedfleetError)
    path.write_bytes(content)
    with parquet.readable(path) as file:
        column = file.metadata.row_group(0).column(1)
        end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
    path.write_bytes(content[: end - 1] + bytes([content[end - 1] ^ 4]) + content[end:])
    refused(lambda: fedfleet.resume(shutil.copytree(out, tmp_path / "flip")), f"{tmp_path / 'flip'}", FedfleetError)
    path.write_bytes(content)
    fedfleet.resume(out)
    check_equal(out, undisturbed("stateless"))


def test_bits_that_were_others_stay_so_without_the_events(tmp_path, monkeypatch):
    """What tells of it is in the checkpoint, too."""
    out = killed(tmp_path / "run")
    environment = json.loads((out / "environment.json").read_text())
    (out / "environment.json").write_text(json.dumps({**environment, "processor": "another"}))
    with pytest.raises(KeyboardInterrupt):
        fedfleet.resume(out, callbacks=Interrupting(7))
    (out / "events.jsonl").unlink()
    (out / "environment.json").write_text(json.dumps(environment))
    assert fedfleet.resume(out).summary["bit_exact"] is False


def test_an_evaluation_that_comes_early_twice_is_no_damage(tmp_path, undisturbed):
    """Rows of an evaluation that a longer run has not are cut off, by each that goes on from the same checkpoint."""
    out = fedfleet.run(config("stateless"), {"rounds": 5}, out=tmp_path / "run").folder
    kept = shutil.copytree(out / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(KeyboardInterrupt):
        fedfleet.resume(out, {"rounds": 9}, Interrupting(6))
    shutil.rmtree(out / "checkpoints")
    shutil.copytree(kept, out / "checkpoints")
    (out / "summary.json").unlink()
    fedfleet.resume(out, {"rounds": 9})
    check_equal(out, undisturbed("stateless"))


LINKS = (
    *(
        "config.tmp",
        "summary.tmp",
        "environment.tmp",
        "status.tmp",
        "rounds.tmp",
        "outcomes.tmp",
        "model.tmp",
        "best.tmp",
    ),
    *("model_card.md", "model_card.tmp", "metrics.csv", "metrics.tmp", "status.json", "rounds.parquet.tmp"),
    *("config.yaml.tmp", "checkpoints/round-00000009.tmp", "checkpoints/round-00000008.tmp"),
)


def test_nothing_is_written_through_a_link(tmp_path, undisturbed):
    out, victim = shutil.copytree(undisturbed("client state"), tmp_path / "run"), tmp_path / "victim"
    victim.write_text("mine")
    for name in LINKS:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(victim)
    fedfleet.resume(out, {"rounds": 11, "track": ["csv"], "checkpoint.every_s": 0})
    fedfleet.write_report([out], out)
    assert victim.read_text() == "mine"
    assert not (out / "model_card.md").is_symlink()


@pytest.mark.parametrize("kind", slow_but(["client state", "stateless"], "client state"))
def test_a_copy_made_of_hard_links_is_left_as_it_was(tmp_path, undisturbed, kind):
    before, out = shutil.copytree(undisturbed(kind), tmp_path / "before"), tmp_path / "run"
    fedfleet.write_report([before], before)
    shutil.copytree(before, out, copy_function=os.link)
    whole = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    fedfleet.resume(out, {"rounds": 11, "track": ["csv"], "checkpoint.every_s": 0})
    fedfleet.write_report([out], out)
    assert {path: path.read_bytes() for path in before.rglob("*") if path.is_file()} == whole


@pytest.mark.parametrize(
    "name", ["events.jsonl", ".lock", "checkpoints/states.bin", "checkpoints", "outcomes", "figures"]
)
def test_a_link_that_would_have_to_be_followed_is_refused(tmp_path, undisturbed, name):
    out, away = shutil.copytree(undisturbed("client state"), tmp_path / "run"), tmp_path / "away"
    if name in ("outcomes", "figures"):
        away.mkdir()
        (away / "000001.parquet").write_bytes(b"PAR1")
    elif (out / name).exists():
        shutil.move(out / name, away)
    else:
        away.write_text('{"round": 0, "event": "mine"}\n')
    (out / name).symlink_to(away)
    before = {p: p.read_bytes() for p in [away, *away.rglob("*")] if p.is_file()}
    call = (
        (lambda: fedfleet.write_report([out], out))
        if name == "figures"
        else (lambda: fedfleet.resume(out, {"rounds": 11}))
    )
    refused(call, f"{out}", FedfleetError)
    assert {p: p.read_bytes() for p in [away, *away.rglob("*")] if p.is_file()} == before


def _without_digests(run: Path) -> dict[str, Any]:
    """Return a summary as whoever changes files of a run would leave it."""
    found = json.loads((run / "summary.json").read_text())
    return {k: v for k, v in found.items() if k not in DIGESTS}


CODE: dict[str, dict[str, Any]] = {
    "task": {"name": "module", "model": "os:system", "arguments": {"command": "touch {}"}},
    "algorithm": {"name": "os:system", "arguments": {"command": "touch {}"}},
    "callbacks": [{"name": "os:system", "arguments": {"command": "touch {}"}}],
    "executor": {"kind": "ray", "address": "10.255.255.1:6379"},
    "track": [{"name": "csv", "dir": "{}"}],
}


@pytest.mark.parametrize("section", CODE)
def test_code_and_addresses_of_a_received_folder_are_asked_about(tmp_path, undisturbed, command, section, subtests):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    written = yaml.safe_load((out / "config.yaml").read_text())
    there = json.loads(json.dumps(CODE[section]).replace("{}", str(tmp_path / "touched")))
    written[section] = {**written["executor"], **there} if section == "executor" else there
    (out / "config.yaml").write_text(yaml.safe_dump(written))
    (out / "summary.json").write_text(json.dumps(_without_digests(out)))
    calls = {
        ("resume", out): None,
        ("resume", out, "rounds=12"): None,
        ("plan", out / "config.yaml"): None,
        ("invert", out, "--out", tmp_path / "inverted"): None,
        ("bench", out / "config.yaml"): None,
        ("run", out / "config.yaml", "--out", tmp_path / "again"): None,
    }
    for call in calls:
        with subtests.test(f"{call[:1]}"):
            status, _, error = command(*call)
            assert (status, error.count("\n")) == (2, 1), error
            assert error.startswith(f"error: {out / 'config.yaml'}: {section}"), error
            assert "--trust" in error
    with subtests.test("open_run"):
        if section == "task":
            refused(lambda: fedfleet.open_run(out).model(), f"{out / 'config.yaml'}: task.")
        else:
            fedfleet.open_run(out).model()  # which calls nothing but the task's code
    assert not (tmp_path / "touched").exists()


NET = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"


def test_a_run_with_code_of_ones_own_goes_on_here_and_asks_elsewhere(tmp_path, beside, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (beside / "nets_received.py").write_text(NET)
    own = {"task": {"name": "classification", "model": "nets_received:net"}, "code_dir": str(beside)}
    given = {**BASE, "algorithm": {"name": "fedavg", "steps": 2}, **own, "rounds": 3}
    out = fedfleet.run(given, out=tmp_path / "run").folder
    fedfleet.resume(out, {"rounds": 4})
    fedfleet.resume(out, {"rounds": 5})  # by what the one before has written
    moved = shutil.copytree(out, tmp_path / "moved")
    fedfleet.open_run(moved).model()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another"))
    refused(
        lambda: fedfleet.resume(moved, {"rounds": 6}),
        f"{moved / 'config.yaml'}: task.model='nets_received:net' would be",
    )
    refused(lambda: fedfleet.open_run(moved).model(), f"{moved / 'config.yaml'}: task.model=")
    fedfleet.open_run(moved, trust=True).model()
    fedfleet.resume(moved, {"rounds": 6}, trust=True)
    fedfleet.resume(moved, {"rounds": 7})  # it was trusted, and written here, since


def test_what_goes_on_is_told_as_it_stands(tmp_path, capsys):
    out = killed(tmp_path / "run")
    done = int(fedfleet.resume(shutil.copytree(out, tmp_path / "copy"), {"rounds": 9}).summary["rounds"])
    said = capsys.readouterr().err.splitlines()
    first = next(line for line in said if line.startswith("round "))
    assert done == 9
    assert "loss" in first
    shown = float(first.partition("accuracy ")[2].split(",")[0])
    assert round(shown, 4) in {
        round(v, 4) for v in fedfleet.open_run(tmp_path / "copy").rounds["eval/accuracy"].dropna()
    }


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_told_in_one_line(undisturbed, command):
    status, _, error = command("report", undisturbed("stateless"), "--out", "/proc/nowhere")
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("error: /proc/nowhere: cannot be written")
