"""A run in a notebook: one well-formed piece of HTML, and one line of progress that replaces itself."""

from __future__ import annotations

import shutil
import sys
import types
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

import fedfleet
from fedfleet.experiments.progress import Progress
from fedfleet.experiments.run import svg
from tests.front.experiments.resuming import BASE, CASES

SMALL = {**BASE, **CASES["stateless"], "rounds": 6, "label": "a < b & c"}


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.replace("<br>", "<br/>"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fedfleet.run(SMALL, out=tmp_path_factory.mktemp("shown") / "run")


def test_a_run_is_shown_as_a_table_and_a_curve(run):
    page = parsed(run._repr_html_())
    text = "".join(page.itertext())
    assert "a < b & c finished, 6 rounds" in text
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert rows[0] == ["metric", "initial", "final", "best"]
    (accuracy,) = [r for r in rows if r[0] == "accuracy"]
    assert accuracy[2] == f"{run.summary['final']['eval/accuracy']:.4f}"
    (line,) = [e for e in page.iter() if e.tag.endswith("polyline")]
    assert len(line.attrib["points"].split()) == 4  # the initial model, and after 2, 4 and 6 rounds


def test_a_run_that_stopped_says_why_and_one_whose_tables_are_gone_has_no_curve(tmp_path):
    run = fedfleet.run(SMALL, {"until": "eval/accuracy>=0"}, out=tmp_path / "run")
    assert "stopped by until: eval/accuracy is" in "".join(parsed(run._repr_html_()).itertext())
    assert "<svg" not in run._repr_html_()  # one point is no line
    shutil.rmtree(run.folder)
    assert "accuracy" in run._repr_html_()
    assert parsed(fedfleet.Run(tmp_path, {})._repr_html_()) is not None


def test_a_curve_stays_within_its_frame():
    for points in ([(0, 1), (5, 1)], [(0, -3), (1, 2.5), (9, float(10**9))]):
        line = next(e for e in ElementTree.fromstring(svg(points, "x<y")).iter() if e.tag.endswith("polyline"))
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 420
            assert 0 <= y <= 150


@pytest.mark.slow
def test_a_notebook_gets_one_line_that_replaces_itself(tmp_path, monkeypatch):
    shown: list[str] = []
    lines: list[list[str]] = []

    class Handle:
        def update(self, data: Any, *, raw: bool) -> None:
            lines[-1].append(data["text/plain"])

    def display(data: Any, *, raw: bool, display_id: bool) -> Handle:
        lines.append([data["text/plain"]])
        return Handle()

    fake = types.ModuleType("IPython.display")
    fake.display = display  # pyright: ignore
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    progress = Progress(Console(force_jupyter=True, width=120))
    for name in "ab":
        fedfleet.run(SMALL, {"rounds": 30, "evaluation.every": 1}, out=tmp_path / name, callbacks=progress)
    assert len(shown) == 6  # of each run that it starts, how clients work, and the initial model
    assert len(lines) == 2
    assert all(each[-1].startswith("round 30/30") for each in lines)
