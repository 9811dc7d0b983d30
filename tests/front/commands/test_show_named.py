"""``fedfleet show KIND NAME``: every name of every kind, with its options, and an example that is a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from typing import get_args

import pytest
import yaml
from pydantic import Field
from rich.console import Console

from fedfleet.algorithms.papers import CORRECTIONS, PAPERS
from fedfleet.algorithms.participation import Correction
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.author import LocalOptions
from fedfleet.commands import show_named
from fedfleet.config.schema import load
from tests.front.commands.lines import all_told

Command = Callable[..., tuple[int, str, str]]


class Mine(LocalOptions):
    """Options of an author's own."""

    heat: float = Field(default=2.0, gt=0)


def mine(options: Mine, task: object, many: int = 3) -> None:
    """Heat gradients."""


KINDS = show_named.kinds()
ALL = [(kind, name) for kind, of in KINDS.items() for name in of.registry]


def test_every_name_has_a_page_and_an_example_that_is_read(subtests: pytest.Subtests) -> None:
    for kind, name in ALL:
        with subtests.test(f"{kind} {name}"):
            example = show_named.example(kind, name)
            assert load(yaml.safe_load(example))
            out = StringIO()
            Console(file=out, width=200).print(show_named.page(kind, name))
            page = out.getvalue()
            assert page.startswith(name)
            for option in KINDS[kind].registry[name].options.model_fields:
                assert option in page
            assert all(line in page for line in example.splitlines())


def test_a_page_has_types_defaults_lines_and_the_paper(command: Command) -> None:
    status, page, _ = command("show", "algorithm", "fedprox")
    assert status == 0
    assert "MLSys 2020" in page
    cells = [[cell.strip() for cell in line.split("│")] for line in page.splitlines() if line.count("│") > 3]
    rows = {name: row for _, name, *row in ((*each[:2], *each[2:5]) for each in cells)}
    assert rows["mu"] == ["number ≥ 0", "0.01", "Weight of the proximal term, mu."]
    assert rows["weight"][:2] == ["num_examples | uniform", "num_examples"]
    assert rows["server_optimizer.lr"][:2] == ["number > 0", "1.0"]
    assert yaml.safe_load(page[page.index("algorithm:") :])["algorithm"]["name"] == "fedprox"


def test_a_list_is_what_show_says_of_a_kind(command: Command) -> None:
    for word in ("availability", "partitions", "algorithm"):
        status, page, _ = command("list", word)
        assert (status, page) == command("show", word)[:2]
        assert [line.split()[0] for line in page.splitlines()] == list(KINDS[word.removesuffix("s")].registry)


def test_show_alone_says_all_that_can_be_shown(command: Command) -> None:
    status, page, _ = command("show")
    assert status == 0
    for what in (*KINDS, "correction", *show_named.sections(), "data CONFIG", "availability CONFIG", "compatibility"):
        assert what in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= 80
    many = json.loads(command("show", "--json")[1])["kinds"]
    assert many["algorithm"] == len(ALGORITHMS)


def test_every_section_has_a_page_of_its_keys(subtests: pytest.Subtests, command: Command) -> None:
    for section in show_named.sections():
        with subtests.test(section):
            status, page, _ = command("show", section)
            assert status == 0
            rows = [line.split("│")[1].strip() for line in page.splitlines() if line.startswith("│")]
            assert set(show_named.sections()[section].model_fields) <= set(rows)
            assert ("population.clients" in rows) is False


def test_what_is_not_there_is_said_in_one_line(subtests: pytest.Subtests, command: Command) -> None:
    rows = [
        ("algorithm fedproxx", "show algorithm='fedproxx': unknown; did you mean 'fedprox'?"),
        ("algorithm mifa", "show algorithm='mifa': here it is fedavg with algorithm.correction=mifa"),
        ("correction none", "show correction='none': unknown"),
        ("algoritm x", "show 'algoritm'"), ("scaffold", "show 'scaffold': did you mean show algorithm scaffold?"),
        ("attack alie noise", "show attack alie noise"), ("data", "show data"),
        ("cohort invite", "show cohort invite"),
    ]  # fmt: skip
    all_told(subtests, lambda given: command("show", *given.split()), rows)


def test_an_authors_own_part_has_a_page(command: Command) -> None:
    mine = f"{__name__}:mine"
    status, page, _ = command("show", "algorithm", mine, "--json")
    assert status == 0
    options = {row["option"]: (row["type"], row["default"]) for row in json.loads(page)["options"]}
    assert options["heat"] == ("number > 0", "2.0")
    assert options["lr"][1] == "0.1"
    assert options["arguments.many"] == ("int", "3")
    assert f"{__name__} has no 'mind'" in command("show", "algorithm", f"{__name__}:mind")[2]


def test_every_algorithm_has_its_papers(command: Command) -> None:
    assert set(PAPERS) == set(ALGORITHMS)
    assert {*CORRECTIONS, "none"} == set(Correction.used) == set(get_args(Correction.model_fields["kind"].annotation))
    every = {paper for papers in (*PAPERS.values(), *CORRECTIONS.values()) for paper in papers}
    assert len({paper.key for paper in every}) == len(every)
    for paper in every:
        assert paper.bibtex.count("{") == paper.bibtex.count("}")
        assert str(paper.year) in paper.key
        assert paper.key.startswith(paper.authors.split(",")[0].split()[0].lower()[:2])
    status, out, _ = command("show", "algorithm", "cdma_ada", "--bibtex")
    assert status == 0
    head, *fields, end = out.splitlines()
    assert (head, end) == ("@inproceedings{xie2023cdma,", "}")
    assert [line.split(" = ")[0].strip() for line in fields] == ["author", "title", "booktitle", "year"]
    assert command("show", "corrections", "fedau", "--bibtex")[1].startswith("@inproceedings{wang2024lightweight,")
    rows = [row[0] for row in show_named.page("correction", "fedvarp").options]
    assert rows == ["kind", "cap", "chances"]
