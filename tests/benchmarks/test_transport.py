"""A model goes to actors and comes back in each way, and what a death costs is told."""

from dataclasses import replace

import pytest

from benchmarks import transport
from benchmarks.cases import CASES


@pytest.mark.ray
def test_each_way_answers_and_a_graph_alone_has_to_be_made_anew():
    found = transport.measure(replace(CASES["logistic"], clients=20, warmup=1), 2, freeze_s=0.5)
    assert set(found["ms"]) == {transport.OURS, transport.GRAPH, transport.CALLS}
    assert set(found["over"]) == {transport.GRAPH, transport.CALLS}
    assert min(found["ms"].values()) > 0
    deaths = {name: death["came"] for name, death in found["after_a_death"].items()}
    assert deaths == {transport.OURS: "answered", transport.GRAPH: "ActorDiedError"}
    assert {name: f["came"] for name, f in found["frozen"].items()} == dict.fromkeys(deaths, "answered")
    assert all(f["seconds"] > 0.4 for f in found["frozen"].values())
