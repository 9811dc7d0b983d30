"""Trust in what a configuration names outside of it, and the seal of one that was written here."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import fedfleet
from fedfleet.config import trust
from fedfleet.config.trust import check, dumped, key_file, outside
from fedfleet.files.documents import sealed_text
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.named import found
from tests.refusals import all_refused, refused


@pytest.fixture(autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def test_what_lies_outside(subtests):
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (fedfleet.load({}).model_dump(mode="json"), {}),
        ({"task": {"name": "module", "model": "net:Net"}}, {"task.model": "net:Net"}),
        ({"algorithm": "mine:alg"}, {"algorithm": "mine:alg"}),
        ({"algorithm.name": "mine:alg"}, {"algorithm.name": "mine:alg"}),
        ({"callbacks": [{"name": "stops:Rising", "arguments": {}}]}, {"callbacks.name": "stops:Rising"}),
        ({"compare": {"a": {"task.model": "net:Net"}}}, {"compare.a.task.model": "net:Net"}),
        ({"vary": {"algorithm.name": ["fedavg", "os:system"]}}, {"vary.algorithm.name": "os:system"}),
        ({"compare": {"own": {"algorithm.name": "os:system"}}}, {"compare.own.algorithm.name": "os:system"}),
        ({"compare": {"track": {"algorithm": "os:system"}}}, {"compare.track.algorithm": "os:system"}),
        ({"algorithm": "transformers:pipeline"}, {"algorithm": "transformers:pipeline"}),
        ({"task": {"model": "transformers:config"}}, {}),
        ({"compare": {"a": {"executor.address": "b:1"}}}, {"compare.a.executor.address": "b:1"}),
        ({"executor": {"address": "10.0.0.1:6379"}}, {"executor.address": "10.0.0.1:6379"}),
        ({"track": [{"name": "csv", "dir": "/home"}]}, {"track.dir": "/home"}),
        ({"track": "wandb"}, {"track": "wandb"}),
        ({"track": ["csv", "tensorboard"], "label": "a:b", "task": {"own": {"name": "a:b"}}}, {}),
    ]
    for config, told in rows:
        with subtests.test(f"{config}"):
            assert outside(config) == told


def test_what_a_resume_may_change_is_said_how(tmp_path, subtests):
    rows: list[tuple[dict[str, Any], str]] = [
        ({"executor": {"address": "10.0.0.1:6379"}}, "executor.address=HOST:PORT of a cluster of yours, or null"),
        ({"track": "wandb"}, "track=[]"),
        ({"callbacks": [{"name": "stops:Rising"}]}, "callbacks=[]"),
        ({"algorithm": "mine:alg"}, "trust=True)"),
    ]
    for config, end in rows:
        with subtests.test(f"{config}"):
            path = written(tmp_path, yaml.safe_dump(config))
            with pytest.raises(ConfigError) as e:
                check(path, trust=False)
            assert str(e.value).endswith(end)


OWN: dict[str, Any] = {"rounds": 3, "task": {"name": "module", "model": "net:Net", "arguments": {"width": 3}}}


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_one_that_was_written_here_is_not_asked_about_and_one_that_was_changed_is(tmp_path):
    path = written(tmp_path, dumped(OWN))
    check(path, trust=False)
    assert stat.S_IMODE(key_file().stat().st_mode) == 0o600
    text = path.read_text()
    written(tmp_path, text.replace("rounds: 3", "rounds: 9"))  # which no code is given
    check(path, trust=False)
    for before, after in (
        ("width: 3", "width: 4"),
        ("net:Net", "os:system"),
        ("task:", "executor: {address: a}\ntask:"),
    ):
        written(tmp_path, text.replace(before, after))
        refused(lambda: check(path, trust=False), f"{path}: ")
        check(path, trust=True)


@given(st.data())
def test_no_byte_of_a_seal_is_another(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("sealed")
    text = dumped(OWN)
    at = data.draw(st.integers(text.rindex(":") + 2, len(text) - 2))
    digit = data.draw(st.sampled_from("0123456789abcdef"))
    path = written(folder, text[:at] + digit + text[at + 1 :])
    if digit == text[at]:
        check(path, trust=False)
    else:
        refused(lambda: check(path, trust=False), f"{path}: task.model='net:Net' would be called")


def test_another_users_key_a_known_one_and_none_do_not_count(tmp_path, monkeypatch):
    path = written(tmp_path, dumped(OWN))
    key_file().chmod(0o644)  # others might have sealed it
    refused(lambda: check(path, trust=False), f"{path}: ")
    key_file().chmod(0o600)
    check(path, trust=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    refused(lambda: check(path, trust=False), f"{path}: ")
    assert not key_file().exists()  # to look makes none
    monkeypatch.setattr(trust, "_make", lambda path: (_ for _ in ()).throw(PermissionError()))
    assert dumped(OWN) == yaml.safe_dump(OWN, sort_keys=False)


def test_a_configuration_that_names_nothing_makes_no_key(tmp_path):
    text = dumped({"rounds": 3})
    assert "sealed" not in text
    assert not key_file().exists()
    check(written(tmp_path, text), trust=False)


def test_what_is_overridden_is_not_asked_about(tmp_path):
    path = written(tmp_path, yaml.safe_dump({**OWN, "callbacks": [{"name": "stops:Rising"}]}))
    refused(lambda: check(path, ["callbacks"], trust=False), f"{path}: task.model=")
    check(path, ["callbacks", "task"], trust=False)
    refused(lambda: check(path, trust=False, section="task."), f"{path}: task.model=")
    check(path, trust=False, section="algorithm.")


def test_one_file_is_asked_about_where_a_run_has_written_it(subtests, tmp_path):
    text = yaml.safe_dump({"algorithm": "os:system"})
    path = written(tmp_path, text)
    assert fedfleet.load(path).algorithm.name == "os:system"  # a file of the user's own
    search = written(tmp_path, text).rename(tmp_path / "tune.yaml")
    assert fedfleet.load(search).algorithm.name == "os:system"  # of that name, and nothing of a search beside it
    (tmp_path / "journal.jsonl").write_text("")
    refused(lambda: fedfleet.load(search), f"{search}: algorithm='os:system' would be called")
    (tmp_path / "journal.jsonl").unlink()
    search.write_text(sealed_text(text))
    refused(lambda: fedfleet.load(search), f"{search}: algorithm='os:system' would be called")
    path = written(tmp_path, text)
    for name in trust.OF_RUNS:
        with subtests.test(name):
            (tmp_path / name).write_text("{}")
            refused(lambda: fedfleet.load(path), f"{path}: algorithm='os:system' would be called")
            assert fedfleet.load(path, trust=True).algorithm.name == "os:system"
            (tmp_path / name).unlink()
    path = written(
        tmp_path, f"{text}# sealed by fedfleet: {'0' * 64}\n"
    )  # of somebody else's run, and nothing beside it
    refused(lambda: fedfleet.load(path), f"{path}: algorithm='os:system' would be called")


def test_what_makes_nothing_here_is_not_called(subtests):
    names = ("os:system", "subprocess:run", "builtins:exec", "shutil:rmtree", "torch:os.system", "functools:partial")
    all_refused(subtests, lambda name: found("algorithm.name", name), [(n, f"algorithm.name={n!r}") for n in names])
    assert found("task.loss", "torch.nn:MSELoss").__name__ == "MSELoss"
