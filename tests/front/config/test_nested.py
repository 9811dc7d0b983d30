"""An algorithm within an algorithm's options: as strict, and as short to write, as one by itself."""

from __future__ import annotations

from typing import Any

import pytest

from fedfleet.config.schema import complete, load, options
from fedfleet.simulator.errors import ConfigError

OMG = {"algorithm": {"name": "omg", "of": {"name": "fedrep", "lr": 0.3, "head_epochs": 2}}}


def of(*overrides: str, source: Any = OMG) -> dict[str, Any]:
    return options(load(source, [*overrides]), "algorithm").model_dump(mode="json")["of"]


def test_it_is_fedavg_if_nothing_is_said():
    plain = complete(load({"algorithm": "fedavg"}))["algorithm"]
    for source in ({"algorithm": "omg"}, {"algorithm": {"name": "omg", "of": None}}):
        found = complete(load(source))["algorithm"]["of"]
        assert found == plain
        assert found["epochs"] == 1


def test_its_options_are_filled_in_and_read_again():
    found = complete(load(OMG))
    assert found["algorithm"]["of"]["head_epochs"] == 2
    assert found["algorithm"]["of"]["batch_size"] == 10
    assert complete(load(found)) == found


def test_a_name_alone_may_be_given_an_option():
    found = of("algorithm.of.lr=0.2", source={"algorithm": {"name": "omg", "of": "fedprox"}})
    assert (found["name"], found["lr"], found["mu"]) == ("fedprox", 0.2, 0.01)


@pytest.mark.parametrize("written", ["algorithm.of=fedprox", "algorithm.of.name=fedprox"])
def test_another_name_leaves_out_what_only_the_old_one_has(written):
    found = of(written)
    assert (found["name"], found["lr"]) == ("fedprox", 0.3)
    assert "head_epochs" not in found


def test_another_algorithm_has_no_other_within():
    assert options(load(OMG, ["algorithm.name=fedavg"]), "algorithm").lr == 0.1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.of=fedrp", r"algorithm\.of\.name='fedrp': unknown; did you mean 'fedrep'"),
        ("algorithm.of=omg", r"algorithm\.of\.name='omg': unknown; "),
        ("algorithm.of=3", r"algorithm\.of=3: give a name, or a mapping with the key 'name'"),
        ("algorithm.of.name=[fedavg]", r"algorithm\.of\.name=\['fedavg'\]: unknown; "),
        ("algorithm.of.q=1", r"algorithm\.of\.q=1: unknown key; "),
        ("algorithm.of.lr='0.3'", r"algorithm\.of\.lr='0\.3': input should be a valid number"),
        ("algorithm.of.head_epochs=true", r"algorithm\.of\.head_epochs=True: input should be a valid integer"),
        ("algorithm.of.lr=-1", r"algorithm\.of\.lr=-1: input should be greater than 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(override, says):
    with pytest.raises(ConfigError, match=f"^{says}") as caught:
        load(OMG, [override])
    assert str(caught.value).isprintable()


def test_a_rate_of_a_part_that_is_not_there_is_refused(tmp_path):
    import fedfleet

    with pytest.raises(ConfigError, match=r"algorithm\.dual_lr=0\.5: task\.name='classification' has no dual part"):
        fedfleet.run(
            {**OMG, "rounds": 1, "executor": {"kind": "local"}}, {"algorithm.of.dual_lr": 0.5}, out=tmp_path / "r"
        )
