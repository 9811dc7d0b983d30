"""``fedfleet show data`` and ``fedfleet partition``: who holds what, in tables, as a picture, and as a file to share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

import fedfleet
from fedfleet.commands import plan, show_data
from fedfleet.config.population import load_data, make_population
from fedfleet.config.schema import load
from fedfleet.report.data_figures import ROWS, figure
from tests.front.commands.lines import line

TINY = {
    "rounds": 1, "population": {"clients": 20, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "task": {"model": "logistic"}, "algorithm": {"batch_size": 5}, "cohort": {"size": 4},
    "executor": {"kind": "local"},
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    return path


def test_what_is_counted_is_what_clients_hold():
    config = load(TINY)
    seen = show_data.look(config)
    population = make_population(config, load_data(config))
    for client in range(20):
        local = population.local_data(torch.tensor([client]))
        y = local.data["y"][local.rows[0]]
        assert seen.labels[client].tolist() == y.bincount(minlength=10).tolist()
        assert seen.sizes[client] == len(y)
    assert (seen.clients, seen.domains, seen.targets, seen.test_domains) == (20, ("0",), (), None)
    assert seen.test_labels.sum() == 355
    # Clients that know no labels beforehand are asked for their examples.
    seen = show_data.look(load({"population": {"dataset": {"name": "synthetic", "domains": 3}, "clients": 30}}))
    assert seen.labels.sum(1).tolist() == seen.sizes.tolist()
    assert seen.domain.tolist() == [i % 3 for i in range(30)]


def test_of_very_many_clients_some_are_looked_at(monkeypatch):
    monkeypatch.setattr(show_data, "LOOKED_AT", 50)
    monkeypatch.setattr(show_data, "SIZES", 80)
    seen = show_data.look(load({"population": {"dataset": "synthetic", "clients": 10**10}}))
    assert (seen.clients, len(seen.shown), len(seen.sizes), len(seen.labels)) == (10**10, 50, 80, 50)
    assert "about" in "".join(str(cell) for cell in next(show_data.tables(seen, 0)).columns[1].cells)
    assert figure(seen).axes[0].get_ylabel() == "client, 50 of 10,000,000,000"


def test_the_tables(command, tiny):
    status, out, _ = command("show", "data", tiny, "--clients", 3)
    seen = show_data.look(load(TINY))
    assert status == 0
    sizes = f"{seen.sizes.min()} to {seen.sizes.max()}, median"
    assert [text for text in ("digits, dealt by dirichlet", "1,442", "and 17 more", sizes) if text not in out] == []
    first = seen.labels[0]
    assert f"{first.argmax()}: {first.max()}" in out
    label = next(line for line in out.splitlines() if line.startswith("│     3 │"))
    assert [cell.strip() for cell in label.strip("│").split("│")][1:] == [
        f"{seen.labels[:, 3].sum()}", f"{100 * seen.labels[:, 3].sum() / seen.labels.sum():.3g} %",
        f"{(seen.labels[:, 3] > 0).sum()}", f"{seen.labels[:, 3].max()}", f"{seen.test_labels[3]}",
    ]  # fmt: skip
    assert "Clients" not in command("show", "data", tiny, "--clients", 0)[1]


def test_domains_and_targets(command, tiny):
    given = ("population.dataset=rect4", "population.partition=by_domain")
    names = show_data.look(load({"population": {"dataset": "rect4", "partition": "by_domain", "clients": 12}})).domains
    status, out, _ = command("show", "data", tiny, *given, f"domains.target=[{names[1]}]")
    assert status == 0
    assert f"{names[1]} (target)" in out
    seen = show_data.look(load(TINY, [*given, f"domains.target=[{names[1]}]"]))
    assert seen.targets == (names[1],)
    assert np.bincount(seen.domain, seen.sizes).sum() == seen.labels.sum()
    assert seen.test_domains is not None
    assert seen.test_domains.sum() == seen.test_labels.sum()
    drawn = figure(seen)
    assert [t.get_text() for t in drawn.axes[2].get_yticklabels()][1].endswith("(target)")


@pytest.mark.slow
def test_the_picture_is_the_same_bytes_each_time(command, tiny, tmp_path):
    for suffix, begin in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
        for path in paths:
            assert command("show", "data", tiny, "--out", path)[0] == 0
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert paths[0].read_bytes().startswith(begin)


def test_the_picture_shows_shares_of_clients():
    seen = show_data.look(load(TINY, {"population.clients": 150}))
    axes = figure(seen).axes[0]
    shown = axes.images[0].get_array()
    assert shown.shape == (ROWS, 10)
    assert np.allclose(shown.sum(1), 1)
    assert np.allclose(shown[0], seen.labels[0] / seen.labels[0].sum())
    assert np.allclose(shown[-1], seen.labels[-1] / seen.labels[-1].sum())
    assert axes.get_yticklabels()[-1].get_text() == "149"


def test_a_partition_that_was_written_runs_to_the_same_model(command, tiny, tmp_path):
    status, out, _ = command("partition", tiny, tmp_path / "p.parquet")
    assert (status, out) == (0, f"{tmp_path / 'p.parquet'}: 20 clients, 1,442 of 1,442 examples\n")
    shared = {"population": {"partition": {"kind": "file", "path": "p.parquet"}}}
    config = {k: v for k, v in TINY.items() if k != "population"} | shared
    there, here = fedfleet.run(TINY, out="there"), fedfleet.run(config, out="here")
    assert (there.folder / "model.safetensors").read_bytes() == (here.folder / "model.safetensors").read_bytes()
    written = yaml.safe_load((here.folder / "config.yaml").read_text())["population"]
    assert len(written["partition"]["sha256"]) == 64
    assert written["clients"] == 20
    fedfleet.resume(here.folder, overrides={"rounds": 2})
    frame = pd.read_parquet(tmp_path / "p.parquet")
    frame.assign(client=(frame.client + 1) % 20).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet now deals otherwise"):
        fedfleet.resume(here.folder, overrides={"rounds": 3})


def test_clients_and_classes_are_called_as_their_owners_call_them(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for owner in ("ash", "elm", "oak"):
        for label in ("fox", "owl") if owner != "elm" else ("owl",):
            (tmp_path / "images" / owner / label).mkdir(parents=True)
            Image.new("L", (4, 4)).save(tmp_path / "images" / owner / label / "1.png")
    own = "population={dataset: {name: image_folder, path: images, channels: 1, hold_out: 0.3}}"
    (tmp_path / "own.yaml").write_text("task: {model: logistic}\nalgorithm: {batch_size: 1}\ncohort: {size: 1}\n")
    status, out, _ = command("show", "data", tmp_path / "own.yaml", own)
    assert status == 0
    held = load_data(load(tmp_path / "own.yaml", [own])).names.tested
    assert f"of 1 client that is held out: {held[0]}" in out
    rows = [line.split("│")[1:3] for line in out.splitlines() if line.count("│") == 5]
    assert [name.strip() for _, name in rows] == [name for name in ("ash", "elm", "oak") if name not in held]
    assert "│ fox" in out
    line = dict(plan.describe(fedfleet.Experiment(load(tmp_path / "own.yaml", [own]))))["tested on"]
    lacking = "; none of class fox" if held == ("elm",) else ""
    assert line.startswith(f"{1 if lacking else 2} examples of 1 client that is held out: {held[0]}{lacking}, ")


def test_mistakes_are_said_in_one_line(subtests, command, tiny):
    shown, dealt = ("show", "data", "tiny.yaml"), ("partition", "tiny.yaml", "p.parquet")
    for words, says in (
        (("show", "model", "tiny.yaml"), "error: show 'model'"),
        ((*shown, "--out", "x.pdf"), "--out='x.pdf'"),
        ((*shown, "--out", "/proc/none/x.svg"), "it cannot be written"),
        ((*shown, "domains={kind: clusters, by: gradient, count: 2}"), "there is no model"),
        ((*shown, "population.partition={kind: file, path: none.parquet}"), "no such file"),
        (("partition", "tiny.yaml", "tiny.yaml"), "tiny.yaml: exists"),
        ((*dealt, "population.dataset=synthetic", "population.partition=iid"), "in clients"),
        ((*dealt, "population.clients=9999"), "9999 clients cannot share 1442 examples"),
        ((*dealt, "population.partition=linear", "population.clients=99"), "at most 53"),
    ):
        with subtests.test(" ".join(words)):
            assert says in line(command(*words))
