"""The page in a browser, where Debian's Chromium is: light, dark, on a phone, with charts, with a stranger's script."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedfleet.report import write_report
from tests.front.report.report_runs import comparison, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
PHONE, DESKTOP = 360, 1200

PROBE = """
const told = {}, wait = (ms) => new Promise((done) => setTimeout(done, ms));
const overflow = (frame) => frame.contentDocument.scrollingElement.scrollWidth - frame.contentDocument.scrollingElement.clientWidth;
addEventListener("load", async () => {
  const phone = document.getElementById("phone"), page = phone.contentDocument, root = page.documentElement;
  told.script = root.classList.contains("script");
  told.stranger = page.title === "stranger" || "stranger" in phone.contentWindow;
  told.overflow = [overflow(phone), overflow(document.getElementById("desktop"))];
  told.scrolls = [...page.querySelectorAll(".scroll")].some((box) => box.scrollWidth > box.clientWidth);
  const figure = page.getElementById("metric-accuracy"), live = figure.querySelector(".live"), svg = live.querySelector("svg");
  told.still = [figure, page.getElementById("participation")].map((each) => each.querySelector(".still").hidden);
  const count = () => svg.querySelectorAll(".lines > path").length, read = () => live.querySelector(".read").textContent;
  const key = (name) => svg.dispatchEvent(new phone.contentWindow.KeyboardEvent("keydown", { key: name }));
  const ends = () => [...svg.querySelectorAll("text[text-anchor=middle]")].slice(0, -1).map((each) => each.textContent);
  told.lines = count(); told.names = [...live.querySelectorAll(".keys button")].map((each) => each.textContent);
  key("ArrowRight"); key("ArrowRight"); key("ArrowRight");
  told.read = read();
  const area = svg.getBoundingClientRect(), pointer = (name, share) => {
    const where = { clientX: area.left + 62 + share * (area.width - 76), clientY: area.top + 40, pointerId: 1 };
    svg.dispatchEvent(new phone.contentWindow.PointerEvent(name, where));
  };
  svg.setPointerCapture = () => {};
  told.before = ends(); pointer("pointerdown", 0.5); pointer("pointermove", 0.9); pointer("pointerup", 1);
  told.zoomed = ends(); key("Escape"); told.after = ends();
  live.querySelector(".tools button:nth-child(2)").click();
  key("ArrowRight"); key("ArrowRight");
  told.floats = read();
  live.querySelector(".keys button").click();
  told.hidden = count();
  const theme = page.getElementById("theme");
  told.themes = [root.dataset.theme ?? null, theme.textContent];
  theme.click();
  told.themes.push(root.dataset.theme, theme.textContent);
  const again = document.createElement("iframe");
  again.srcdoc = phone.srcdoc;
  await new Promise((done) => { again.onload = done; document.body.append(again); });
  told.remembered = again.contentDocument.documentElement.dataset.theme;
  document.body.textContent = JSON.stringify(told);
});
"""


def chromium(page: Path, *options: str) -> str:
    given = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    with tempfile.TemporaryDirectory() as profile:  # what it remembers
        given += [f"--user-data-dir={profile}", "--virtual-time-budget=2000", *options, page.as_uri()]
        done = subprocess.run([str(CHROMIUM), *given], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = comparison(tmp_path_factory.mktemp("browser"))
    label = "<img src=x onerror='stranger = 1'> and a label without end " + "x" * 90
    summary = {"status": "failed", "label": label, "error": "x" * 300, "initial": {"eval/accuracy": 0.0}}
    make_run(root / "C", summary=summary, config={"seed": 0, "algorithm": {"name": "y" * 120}})
    return write_report([root], root / "out")


@pytest.fixture(scope="module")
def seen(page: Path) -> dict[str, Any]:
    """What a script around the page sees of it, in frames as wide as a phone and as a desktop."""
    text = page.read_text(encoding="utf-8")
    text = text.replace("</body>", "<script>document.title = 'stranger'; window.stranger = 1</script></body>")
    held = html.escape(text)
    frames = [
        f'<iframe id="{name}" width="{width}" height="800" srcdoc="{held}"></iframe>'
        for name, width in (("phone", PHONE), ("desktop", DESKTOP))
    ]
    around = page.parent / "around.html"
    around.write_text(f"<!doctype html><meta charset=utf-8>{''.join(frames)}<script>{PROBE}</script>", encoding="utf-8")
    dumped = re.search(r"<body>(\{.*?\})</body>", chromium(around, "--dump-dom"), re.DOTALL)
    assert dumped, "the script around the page has not come to its end"
    return json.loads(html.unescape(dumped[1]))


def test_its_own_script_alone_runs_only_tables_scroll_sideways_and_the_switch_is_remembered(seen):
    assert (seen["script"], seen["stranger"]) == (True, False)
    assert (seen["overflow"], seen["scrolls"]) == ([0, 0], True)
    assert seen["themes"] == [None, "Dark", "dark", "Light"]
    assert seen["remembered"] == "dark"


def test_charts_are_read_with_keys_zoomed_by_dragging_and_against_other_axes(seen: dict[str, Any]) -> None:
    assert seen["still"] == [True, False]
    assert seen["lines"] == 4  # a line a label, and A's band
    assert seen["names"][:2] == ["label A", "label B"]
    assert seen["names"][2].startswith("<img src=x")
    # A's seeds gain 0.1 and 0.2 a round, B and C as the first of them and as rounds_table has it.
    assert seen["read"].startswith("rounds 2: label A 0.3 (0.2 to 0.4); label B 0.2; <img")
    assert seen["before"] == seen["after"] == ["0", "2", "4"]
    assert set(seen["zoomed"]) <= {"2", "3", "4"}
    assert seen["zoomed"][-2:] == ["3", "4"]
    assert seen["floats"].startswith("floats received by the server 100: label A 0.15 (0.1 to 0.2); label B 0.2; ")
    assert seen["hidden"] == 2


@pytest.mark.parametrize(("scheme", "ground"), [(1, (246, 247, 249)), (0, (20, 22, 26))])
def test_light_and_dark(page: Path, scheme: int, ground: tuple[int, int, int]) -> None:
    shot = page.parent / f"{scheme}.png"
    look = f"--blink-settings=preferredColorScheme={scheme}"
    chromium(page, f"--window-size={DESKTOP},3000", look, f"--screenshot={shot}")
    image = Image.open(shot).convert("RGB")
    assert image.getpixel((3, 3)) == ground
    colors = {color for _, color in image.getcolors(1 << 24) or []}  # pyright: ignore
    first = (0x00, 0x72, 0xB2) if scheme else (0x4E, 0xA8, 0xE6)
    assert first in colors, "the first label's line"
    assert ((255, 255, 255) in colors) == bool(scheme), "a white figure on a dark page"
