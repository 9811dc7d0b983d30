"""Grafana's dashboard shows every gauge of a run, and no other."""

import json
import re
from pathlib import Path

from fedfleet.assembly.metrics_export import WHAT

FILE = Path(__file__).resolve().parents[2] / "recipes" / "grafana" / "fedfleet.json"


def test_each_gauge_has_a_panel_of_its_own_and_says_what_it_is():
    panels = json.loads(FILE.read_text(encoding="utf-8"))["panels"]
    shown = {re.findall(r"ray_fedfleet_(\w+)\{", p["targets"][0]["expr"])[0]: p["description"] for p in panels}
    assert shown == WHAT
    assert len(panels) == len({p["id"] for p in panels}) == len(WHAT)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(places)
