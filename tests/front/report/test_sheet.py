"""The page itself: it stands alone, runs its own script alone, can be read in light and dark, and holds the numbers it draws."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from fedfleet.report import sheet, vector, write_report
from fedfleet.report.canvas import DASHES, PALETTE
from fedfleet.report.figures import FATE_COLORS
from fedfleet.report.tables import read
from tests.front.report.report_runs import Page, comparison, figures, make_run, rounds_table


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """A comparison, and its page."""
    root = comparison(tmp_path_factory.mktemp("compared"))
    return root, Page(write_report([root], root / "out"))


def test_the_page_fetches_nothing_and_runs_one_script(compared: tuple[Path, Page]) -> None:
    _, page = compared
    assert not page.all("link")
    own, data = page.all("script")
    assert (own, data) == ({}, {"type": "application/json", "id": "charts"})
    policy = next(meta["content"] or "" for meta in page.all("meta") if "http-equiv" in meta)
    script = page.html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}';" in policy
    for _, attributes in page.tags:
        for key in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(key) or "#").startswith(("#", "data:"))
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", page.html)


def test_every_figure_is_there_without_the_script_and_is_told_to_those_who_do_not_see_it(compared):
    root, page = compared
    drawn = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert len(page.all("figure")) == len(drawn) == len(figures(root / "out"))
    assert all(len(svg["aria-label"] or "") > 20 for svg in drawn)
    names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(names) == len(set(names))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    anchors = [link["href"] or "" for link in page.all("a")]
    assert {anchor.removeprefix("#") for anchor in anchors} <= set(names)
    boxes = [box for box in page.all("div") if re.search("scroll|still", box.get("class") or "")]
    assert all(box.get("tabindex") == "0" and box.get("aria-label") for box in boxes)


def test_charts_hold_what_figures_draw(compared: tuple[Path, Page]) -> None:
    root, page = compared
    chart = page.charts["metric-accuracy"]
    looks = [(label["name"], label["color"], label["dash"]) for label in chart["labels"]]
    assert looks == [("label A", 0, 0), ("label B", 1, 0)]
    names = ["rounds", "floats received by the server", "bytes received by the server", "virtual time, seconds"]
    assert [axis["name"] for axis in chart["axes"]] == names
    assert [axis["whole"] for axis in chart["axes"]] == [True, False, False, False]
    (a, b) = chart["axes"][0]["lines"]
    gains = [np.array([0.0, 0.1, 0.2, 0.3, 0.4]) * k for k in (1, 2)]
    np.testing.assert_allclose(a["x"], range(5))
    np.testing.assert_allclose(a["y"], np.mean(gains, axis=0))
    np.testing.assert_allclose([a["low"], a["high"]], gains)
    assert "low" not in b
    bytes_up = chart["axes"][2]["lines"][1]
    x, y = read(root / "B" / "seed-0").curve("eval/accuracy", "total/bytes_up")
    np.testing.assert_allclose([bytes_up["x"], bytes_up["y"]], [x, y])
    assert set(page.charts) == {"metric-accuracy", "train-loss"}


def test_a_long_loss_is_smooth_with_what_was_recorded_beside_it_and_on_its_scale(tmp_path: Path) -> None:
    page = Page(write_report([make_run(tmp_path / "run", rounds=rounds_table(150))], tmp_path / "out"))
    chart = page.charts["train-loss"]
    assert chart["log"]
    pale, line = chart["axes"][0]["lines"]
    assert (pale["kind"], line["kind"]) == ("pale", "line")
    np.testing.assert_allclose(pale["y"], 1 / np.arange(1, 151), rtol=1e-5)
    np.testing.assert_allclose(line["y"][3], np.mean(1 / np.arange(1, 8)), rtol=1e-5)  # a window of 7
    assert not page.charts["metric-accuracy"]["log"]


def test_what_could_end_the_element_or_is_no_number_is_not_in_the_data() -> None:
    text = sheet._data({"a": {"name": "</script><!--&", "y": (1.0, 2.0), "z": [(1.0, 2.0), (3.0,)]}})
    assert not re.search("[<>&]", text)
    assert '"pool":[[1.0,2.0],[3.0]]' in text  # once each
    with pytest.raises(ValueError, match="Out of range"):
        sheet._data({"a": {"y": (float("nan"),)}})


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def mixed(a: str, b: str, share: float) -> str:
    both = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in (a, b)]
    return "#" + "".join(f"{round(x * share + y * (1 - share)):02x}" for x, y in zip(*both, strict=True))


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(compared: tuple[Path, Page], dark: bool) -> None:
    """AA of the Web Content Accessibility Guidelines: 4.5 for text, 3 for lines and the edges of buttons."""
    style = compared[1].html.split("<style>")[1].split("</style>")[0]
    chosen = re.search(r':root\[data-theme="dark"\] \{(.*?)\}' if dark else r":root \{(.*?)\}", style, re.DOTALL)
    assert chosen
    own = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", chosen[1]))
    for ground in ("page", "sheet"):
        for text in ("text", "quiet", "accent", "finished", "stopped", "interrupted", "failed"):
            assert contrast(own[text], own[ground]) >= 4.5, (text, ground)
    assert contrast(own["on-accent"], own["accent"]) >= 4.5
    assert contrast(own["ink"], own["sheet"]) >= 4.5
    assert contrast(own["text"], mixed(own["accent"], own["sheet"], 0.45)) >= 4.5  # the hottest cell
    assert "calc(var(--share) * 45%)" in style
    for line in ("edge", "axis", *(f"c{i}" for i in range(len(PALETTE)))):
        assert contrast(own[line], own["sheet"]) >= 3, line
    assert {f"{name}" for name in vector.COLORS.values()} <= set(own)


def test_every_colour_and_dash_of_the_figures_is_the_pages(compared: tuple[Path, Page]) -> None:
    assert [vector.COLORS[color.lower()] for color in PALETTE] == [f"c{i}" for i in range(len(PALETTE))]
    assert {color.lower() for color in FATE_COLORS.values()} <= set(vector.COLORS)
    script = (sheet.HERE / "report.js").read_text(encoding="utf-8")
    assert len(re.findall('"', re.findall(r"DASHES = \[(.*?)\]", script)[0])) == 2 * len(DASHES)
    assert len(script.splitlines()) < 200
    svgs = "".join(re.findall(r"<svg.*?</svg>", compared[1].html, re.DOTALL))
    assert "var(--c0)" in svgs
    assert "var(--sheet)" in svgs
    assert not re.search(": ?#[0-9a-fA-F]{6}", svgs), "a colour that is the same in light and dark"


def test_what_is_too_large_as_svg_is_shown_as_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "LARGEST", 30_000)
    page = Page(write_report([make_run(tmp_path / "run")], tmp_path / "out"))
    images = page.all("img")
    assert 0 < len(images) < len(figures(tmp_path / "out"))
    files = {base64.b64encode(file.read_bytes()).decode() for file in (tmp_path / "out" / "figures").glob("*.png")}
    assert {(image["src"] or "").removeprefix("data:image/png;base64,") for image in images} <= files
    assert all(image["alt"] for image in images)
