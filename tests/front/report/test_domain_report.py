"""Domains and planes in a report, from run folders made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from safetensors.numpy import save_file

from fedfleet.report import canvas, decision_boundary, sheet, tables, write_report
from fedfleet.report.picture import Picture
from fedfleet.report.sheet import Grid
from tests.front.report.report_runs import Page, figures, make_run, rounds_table

NAMES = ["ink", "oil", "chalk"]


def run(path: Path, lift: float = 0.0, seed: int = 0, label: str | None = None, **changes: Any) -> Path:
    table = rounds_table(4)
    table["algorithm/cosine_mean"] = [0.4, 0.5, 0.6, 0.7 + lift]
    table["algorithm/cosine_worst"] = [0.1, 0.2, 0.3, 0.4]
    table["algorithm/cosine_variance"] = [0.04, 0.03, 0.02, 0.01]
    table["eval/accuracy_worst_domain"] = table["eval/gap_accuracy"] = table["eval/accuracy"]
    summary = {"status": "finished", "domains": NAMES, "label": label, "final": {}, "initial": {}}
    config = {"seed": seed, "algorithm": {"name": "omg"}}
    folder = make_run(path, **{"rounds": table, "summary": summary, "config": config, **changes})
    domains = pd.DataFrame({"round": [1] * 3 + [3] * 3, "domain": [0, 1, 2] * 2, "examples": 5})
    domains["accuracy"] = [0.1, 0.2, 0.3, 0.5 + lift, 0.6, 0.7]
    domains["cosine"] = [0.1, np.nan, 0.3, 0.9, np.nan, 0.8]
    domains.sample(frac=1, random_state=0).to_parquet(folder / "domains.parquet")
    return folder


def test_the_section_of_domains(tmp_path: Path) -> None:
    html = Page(write_report([run(tmp_path / "run")], tmp_path / "out"))
    assert {"cosines", "domains-accuracy", "domains-cosine", "metric-gap-accuracy"} <= figures(tmp_path / "out")
    before, after = html.html.split(">Domains</h2>")
    assert ">Learning</h2>" in before
    for name in ("cosines", "domains-accuracy", "metric-gap-accuracy", "metric-accuracy-worst-domain"):
        assert f'id="{name}"' in after
    assert 'id="metric-accuracy"' in before
    assert "to 0.5 (in the worst domain 0.5); the best was 0.5" in html.text
    assert "last evaluation ink oil chalk accuracy 0.5 0.6 0.7 cosine 0.9 – 0.8" in html.text


@pytest.mark.slow
def test_the_table_by_domain_has_seeds_and_labels(tmp_path: Path) -> None:
    for label in ("A", "B"):
        for seed in (0, 1):
            run(tmp_path / "runs" / label / str(seed), 0.1 * seed, seed, label)
    text = Page(write_report([tmp_path / "runs"], tmp_path / "out")).text
    assert "accuracy, A 0.550 ± 0.071 0.6 ± 0 0.7 ± 0 accuracy, B 0.550 ± 0.071" in text
    assert "cosine, B 0.9 ± 0 – 0.8 ± 0" in text
    other = run(tmp_path / "C", summary={"status": "finished", "domains": ["a", "b", "c"], "label": "C"})
    text = Page(write_report([tmp_path / "runs", other], tmp_path / "numbered")).text
    assert "last evaluation domain 0 domain 1 domain 2" in text


@pytest.mark.slow
def test_one_domain_or_very_many_have_no_table_and_runs_without_cosines_no_figure(tmp_path: Path) -> None:
    for count in (1, 15):
        folder = make_run(tmp_path / str(count))
        each = pd.DataFrame({"round": 3, "domain": range(count), "accuracy": 0.5})
        each.to_parquet(folder / "domains.parquet")
        assert "last evaluation" not in Page(write_report([folder], tmp_path / f"{count}-out")).text
        assert "cosines" not in figures(tmp_path / f"{count}-out")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are drawn, by name."""
    found: dict[str, Figure] = {}
    picture = canvas.picture

    def keep(figure: Figure, name: str, *given: Any) -> Any:
        found[name] = figure
        return picture(figure, name, *given)

    monkeypatch.setattr(canvas, "picture", keep)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_domains_of_which_nothing_is_known_in_the_end_and_points_between_gaps(tmp_path: Path, kept: Any) -> None:
    folder = run(tmp_path / "run")
    heard = np.arange(60).reshape(20, 3) % 2 == 0  # never twice in a row
    heard[-1] = False
    each = pd.DataFrame({"round": np.arange(20).repeat(3), "domain": [0, 1, 2] * 20, "accuracy": 0.5})
    each["cosine"] = np.where(heard.ravel(), 0.7, np.nan)
    each.to_parquet(folder / "domains.parquet")
    html = Page(write_report([folder], tmp_path / "out"))
    assert "cosine of each domain at every evaluation; at the last one from – to –." in html.text
    marks = {name: {line.get_marker() for line in kept[name].axes[0].lines} for name in kept if "domains-" in name}
    assert marks == {"domains-cosine": {"o"}, "domains-accuracy": {""}}


def test_sections_have_tables_and_pictures_of_one_heading_in_the_order_asked_for() -> None:
    made = [Picture(name=n, title="", caption="", png=b"", section=s) for n, s in ("aX", "bY", "cX")]
    one, two = Grid(["h"], [["1"]]), Grid(["h"], [["2"]])
    found = sheet.blocks(made, [("Z", one), ("Y", two), ("W", None)], order=("Y", "W"))
    shown = [(b.title, b.tables, [p.name for p in b.pictures]) for b in found]
    assert shown == [("Y", [two], ["b"]), ("Z", [one], []), ("X", [], ["a", "c"])]


def flat(folder: Path, slope: float, classes: int = 2, **changes: Any) -> tables.Run:
    """A run whose classes part at x2 = slope x1, or three that part at angles."""
    axes = np.stack([np.linspace(-2, 2, 21), np.linspace(-1, 1, 21)]).astype(np.float32)
    first, second = np.meshgrid(axes[0], axes[1])
    logits = [np.zeros_like(first), second - slope * first, first][:classes]
    points = {
        "x": np.array([[-1, 0.5], [1, -0.5], [0.5, 0.5]], np.float32), "y": np.array([1, 0, 1]),
        "domain": np.array([0, 1, 1]), "axes": axes, "log_probability": np.stack(logits, -1).astype(np.float32),
    }  # fmt: skip
    save_file({**points, **changes}, folder / "decision_boundary.safetensors")
    return tables.read(folder)


def test_points_and_boundaries(tmp_path: Path, kept: dict[str, Figure]) -> None:
    assert decision_boundary.draw({s: [flat(run(tmp_path / s, label=s), float(s))] for s in ("0", "0.5")})
    (figure,) = kept.values()
    (axes,) = figure.axes
    marks = {(line.get_marker(), *np.round(line.get_xydata()[0], 3)) for line in axes.lines}
    assert marks == {("o", -1.0, 0.5), ("s", 1.0, -0.5), ("s", 0.5, 0.5)}
    by_class = {float(line.get_xdata()[0]): line.get_color() for line in axes.lines}
    assert by_class[-1.0] == by_class[0.5] != by_class[1.0]
    for slope, contour in zip((0.0, 0.5), axes.collections, strict=True):
        (path,) = contour.get_paths()
        np.testing.assert_allclose(path.vertices[:, 1], slope * path.vertices[:, 0], atol=1e-5)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ink", "oil", "0", "0.5"]
    kept.clear()
    assert decision_boundary.draw(
        {"run": [flat(run(tmp_path / "three"), 0.0, 3)]}
    )  # classes, which part in three lines
    (figure,) = kept.values()
    assert len(figure.axes[0].collections) == 3


@pytest.mark.parametrize("change", [{"log_probability": np.zeros((3, 4, 2), np.float32)}, {"axes": np.zeros(3)}])
def test_a_file_that_is_no_plane_is_left_out(tmp_path: Path, change: Any) -> None:
    assert decision_boundary.draw({"run": [flat(run(tmp_path / "run"), 0.0, **change)]}) is None
    (tmp_path / "run" / "decision_boundary.safetensors").write_bytes(b"not a file")
    assert decision_boundary.draw({"run": [tables.read(tmp_path / "run")]}) is None
