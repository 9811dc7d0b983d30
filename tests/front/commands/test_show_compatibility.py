"""The table of what goes with what: each cell is what a run is refused for."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from fedfleet.assembly.prepared import Prepared
from fedfleet.commands import show_compatibility as compatibility
from fedfleet.commands.show_named import example
from fedfleet.config.schema import load
from fedfleet.middleware.facts import Break, Fact, Need, clashes, refusal
from fedfleet.simulator.errors import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "compatibility.md"
EVERY = 5  # of hundreds of pairs
OF_THE_RUN = ("secure_aggregation.clip", "measures no accuracy")
"""Reasons of refusals that lie in the options or the task, not in the algorithm."""


def test_a_refusal_names_the_key_the_reason_and_what_to_do():
    need = Need("attack.kind='alie'", (Fact.OWN_ROUND, Fact.EACH_SEEN), "attack")
    late = Break(Fact.OWN_ROUND, "late answers count later", "cohort.late='keep'")
    by_itself = Break(Fact.EACH_SEEN, "mine tells no more than a sum")
    assert [b for _, b in clashes([need], [late, by_itself])] == [late, by_itself]
    assert refusal(need, late) == (
        "cohort.late='keep': late answers count later, and attack.kind='alie' needs answers to count in their own round: "
        "leave cohort.late or attack out"
    )
    assert refusal(need, by_itself).startswith("attack.kind='alie': mine tells no more than a sum, and it needs ")
    assert list(clashes([Need("a", (Fact.ONCE,))], [late])) == []


@pytest.mark.slow
def test_the_page_is_what_runs_are_refused_for(subtests: pytest.Subtests):
    found = compatibility.look(lambda name: None)
    assert PAGE.read_text(encoding="utf-8") == compatibility.markdown(found)
    assert all("?" not in cells for _, cells in found.algorithms)
    pairs = itertools.product(found.algorithms, enumerate(compatibility.FEATURES.items()))
    for (name, cells), (place, (feature, given)) in itertools.islice(pairs, 0, None, EVERY):
        if cells[place] == compatibility.NONE:
            continue
        with subtests.test(f"{name}, {feature}"):
            assert refuses(name, feature, given) == bool(cells[place])


def refuses(name: str, feature: str, given: dict) -> bool:
    """Say whether a run of an algorithm is refused with a feature, on the first small run that takes the algorithm."""
    said = yaml.safe_load(example("algorithm", name))
    if "weight" in said["algorithm"]:
        said["algorithm"]["weight"] = "uniform"
    for world in compatibility.WORLDS:
        try:
            config = Prepared(load(world, said)).config
        except ConfigError:
            continue
        extra = {"algorithm": {"correction": compatibility.memory(config.algorithm)}} if feature == "memory" else given
        try:
            Prepared(load(config, extra))
        except ConfigError as e:
            return not any(text in str(e) for text in OF_THE_RUN)
        return False
    raise AssertionError(name)
