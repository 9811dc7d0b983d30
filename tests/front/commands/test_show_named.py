"""``fedfleet show KIND NAME``: every name of every kind, with its options, and an example that is a configuration."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
import yaml
from rich.console import Console

from fedfleet.commands import show_named
from fedfleet.config.schema import load

Command = Callable[..., tuple[int, str, str]]
KINDS = show_named.kinds()
ALL = [(kind, name) for kind, of in KINDS.items() for name in of.options]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=lambda x: x)
def test_every_name_has_a_page_and_an_example_that_is_read(kind: str, name: str) -> None:
    example = show_named.example(kind, name)
    assert load(yaml.safe_load(example))
    out = StringIO()
    Console(file=out, width=200).print(show_named.page(kind, name))
    page = out.getvalue()
    assert page.startswith(name)
    for option in KINDS[kind].options[name].model_fields:
        assert option in page
    assert all(line in page for line in example.splitlines())


def test_a_page_has_types_defaults_lines_and_the_paper(command: Command) -> None:
    status, page, _ = command("show", "algorithm", "fedprox")
    assert status == 0
    assert "MLSys 2020" in page
    rows = {
        cells[1].strip(): [c.strip() for c in cells[2:5]]
        for line in page.splitlines()
        if len(cells := line.split("│")) > 4
    }
    assert rows["mu"] == ["number ≥ 0", "0.01", "Weight of the proximal term, mu."]
    assert rows["weight"][:2] == ["num_examples | uniform", "num_examples"]
    assert rows["server_optimizer.lr"][:2] == ["number > 0", "1.0"]
    assert yaml.safe_load(page[page.index("algorithm:") :])["algorithm"]["name"] == "fedprox"


def test_of_a_kind_alone_its_names_are_listed(command: Command) -> None:
    status, page, _ = command("show", "availability")
    assert status == 0
    assert [line.split()[0] for line in page.splitlines()] == list(KINDS["availability"].options)
    assert "Each client goes on and off at random" in page


@pytest.mark.parametrize("word", ["availability", "partitions", "algorithm"])
def test_a_list_is_what_show_says_of_a_kind(command: Command, word: str) -> None:
    status, page, _ = command("list", word)
    assert (status, page) == command("show", word)[:2]
    assert page.count("\n") == len(KINDS[word.removesuffix("s")].options)


@pytest.mark.parametrize("section", show_named.sections())
def test_every_section_has_a_page_of_its_keys(command: Command, section: str) -> None:
    status, page, _ = command("show", section)
    assert status == 0
    rows = [line.split("│")[1].strip() for line in page.splitlines() if line.startswith("│")]
    assert set(show_named.sections()[section].model_fields) <= set(rows)
    assert ("population.clients" in rows) is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm", "fedproxx"], "show algorithm='fedproxx': unknown; did you mean 'fedprox'?"),
        (["algoritm", "x"], "show 'algoritm': choose data, or one of task, algorithm,"),
        (["scaffold"], "show 'scaffold': did you mean show algorithm scaffold? choose data, or one of"),
        (["attack", "alie", "noise"], "show attack alie noise: give one name"),
        (["data"], "show data: give a configuration"),
        (["cohort", "invite"], "show cohort invite: give no name"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(command: Command, words: list[str], said: str) -> None:
    status, _, error = command("show", *words)
    assert status == 2
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
