"""The documentation works: its Python runs, its commands are accepted, the files it names are there."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import typer
import yaml
from jsonschema import Draft202012Validator
from PIL import Image

import datasets
import fedfleet
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.commands import cli, paper, schema, tune
from fedfleet.config import tuning
from fedfleet.config.schema import load
from fedfleet.config.tuning import Tuning
from fedfleet.experiments import campaign, sweep
from fedfleet.experiments.progress import Progress
from fedfleet.tasks.targets import LOSSES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "benchmarks/README.md")),
        *ROOT.glob("docs/**/*.md"),
    ]
)
ROOMS = ("simulator", "algorithms", "datasets", "tasks", "middleware", "benchmarks")
PLACEHOLDERS = {
    "CONFIG": "configs/cdma/digits.yaml",
    "DIR": "runs/study",
    **dict.fromkeys(["runs/tuned/best.yaml", "runs/tuned_dropout/best.yaml"], "configs/cdma/digits.yaml"),
    **dict.fromkeys(["adagrad.yaml", "animals.yaml", "dropout.yaml"], "configs/cdma/digits.yaml"),
    "task.arguments.blocks=2": "task.hidden=[2]",
    **dict.fromkeys(["executor.address=auto", "executor.address=10.0.0.1:6379"], "executor.kind=local"),
    **dict.fromkeys(
        [
            "visits.parquet",
            "visits.csv",
            "homes.csv",
            "reviews.csv",
            "lines.csv",
            "femnist/data",
            "fed_emnist_train.h5",
            "cameras",
            "notes",
        ],
        "configs",
    ),
    **dict.fromkeys(["executor.actors=64", "executor.actors=2"], "executor.actors=1"),
}
"""What a command of the documentation leaves to its reader, or to another machine."""
MADE = r"^build/|runs/|\.json$|/x\.(py|yaml)$"
"""Files that commands or readers write."""
QUICK = {"rounds": 2, "population.clients": 20, "cohort.size": 4, "executor.kind": "local", "until": None}


OTHERS = {
    *(
        "docker",
        "export",
        "kubectl",
        "mkdir",
        "mkdocs",
        "pip",
        "pre-commit",
        "ray",
        "ruff",
        "basedpyright",
        "pytest",
        "sbatch",
    ),
    *("scancel", "ssh", "."),
}
"""Programs of others, whose commands are not tried."""


class Block(NamedTuple):
    """A fenced block; one with a title is code that is not run: of others, or of what is not here."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', text, re.M | re.S):
            yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2] or "", found[3])


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of a block, without its comment, the variables before it and the environment that it is in."""
    for block in blocks():
        for number, line in enumerate(block.text.replace("\\\n", " ").splitlines(), block.line + 1):
            if block.language == "" and line.strip():
                where = f"{block.page.relative_to(ROOT)}:{number}"
                for part in re.split(" && ", line):
                    words = shlex.split(re.sub(r"^(\w+=\S+ )*", "", part), comments=True)
                    yield where, [words[0].removeprefix(".venv/bin/"), *words[1:]]


VALID = Draft202012Validator(schema.config())
BLOCKS, COMMANDS = list(blocks()), list(commands())
NAMED = r"# ([\w-]+\.(?:py|yaml))\n"
"""How a block begins that is a file of its page."""
PYTHON = [b for b in BLOCKS if b.language == "python" and not b.title and not re.match(NAMED, b.text)]


def test_the_documentation_has_what_is_tested_here():
    assert len(PAGES) > 15
    assert len(PYTHON) >= 2
    assert len(COMMANDS) > 120
    assert sum(page.read_text(encoding="utf-8").count("```") for page in PAGES) == 2 * len(BLOCKS)
    assert {b.language for b in BLOCKS} <= {"", "python", "yaml", "json", "text", "bibtex"}
    assert {words[1] for _, words in COMMANDS if words[0] == "fedfleet"} >= {
        "run",
        "plan",
        "study",
        "tune",
        "paper",
        "bench",
        "resume",
    }


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in that has the repository's configurations, and short runs where the documentation has long ones."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for path in (tmp_path / "configs" / name for name in ("quickstart.yaml", "cdma/digits.yaml")):
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        path.write_text(yaml.safe_dump(load(given, QUICK).model_dump(mode="json", exclude_unset=True)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_files(page: Path) -> None:
    """Write the files that a page shows, with few rounds, and the images that one of them is about."""
    for block in BLOCKS:
        if block.page == page and (named := re.match(NAMED, block.text)):
            quick = "executor: {kind: local}\n" if named[1].endswith(".yaml") else ""
            Path(named[1]).write_text(re.sub(r"rounds: \d+", "rounds: 2", block.text) + quick, encoding="utf-8")
    if page.name == "your_net.md":
        for camera, animal, i in itertools.product(range(6), range(2), range(6)):
            folder = Path("cameras") / f"gate-{camera}" / ("fox", "owl")[animal]
            folder.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng([camera, animal, i]).integers(0, 100, (20, 30, 3)) + 100 * animal
            Image.fromarray(noise.astype(np.uint8)).save(folder / f"{i}.png")


@pytest.fixture
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("nets", "fleets", "stops", "mifa", "adagrad"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_own_modules")
@pytest.mark.slow
def test_a_net_of_ones_own_is_compared_in_few_lines(repository: Path):
    page = ROOT / "docs" / "guides" / "your_net.md"
    write_files(page)
    lines = [line for name in ("nets.py", "animals.yaml") for line in Path(name).read_text().splitlines()[1:]]
    assert len([line for line in lines if line.strip()]) <= 25
    runs = campaign.run(load("animals.yaml"), Path("runs/both"), Progress.silent())
    assert [run.summary["label"] for run in runs] == ["FedAvg", "SCAFFOLD"]
    assert Path("runs/both/report.html").exists()
    assert all(f"`{name}`" in page.read_text(encoding="utf-8") for name in LOSSES)


@pytest.mark.usefixtures("_own_modules")
@pytest.mark.parametrize(
    "block",
    [b if b.page.name == "README.md" else pytest.param(b, marks=pytest.mark.slow) for b in PYTHON],
    ids=lambda b: b.where,
)
def test_python_runs(repository: Path, block: Block):
    write_files(block.page)
    if "fedfleet.resume(" in block.text:  # what it goes on with
        fedfleet.run("configs/cdma/digits.yaml", out="runs/long")
    few = re.sub(r'"rounds": \d+', '"rounds": 3', block.text)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(few, block.where, "exec"), {"__name__": "__main__"})
    assert list(repository.glob("runs/**/model.safetensors"))


def test_configurations_and_records_are_read(subtests: pytest.Subtests):
    for block in [b for b in BLOCKS if b.language in ("yaml", "json")]:
        with subtests.test(block.where):
            if block.language == "json":
                assert json.loads(block.text)
            elif block.title:
                assert yaml.safe_load(block.text)
            else:
                assert fedfleet.load(yaml.safe_load(block.text))
                VALID.validate(yaml.safe_load(block.text))


def test_python_of_others_is_python(subtests: pytest.Subtests):
    for block in [b for b in BLOCKS if b.language == "python" and b.title]:
        with subtests.test(block.where):
            assert compile(block.text, block.where, "exec")


FEDFLEET = [(where, words) for where, words in COMMANDS if words[0] == "fedfleet"]


@pytest.mark.slow
def test_commands_of_fedfleet_are_accepted(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch):
    """Their options exist, and configurations and overrides make runs that can be; long runs are not begun."""
    for where, words in FEDFLEET:
        with subtests.test(where):
            monkeypatch.chdir(ROOT)
            words = [PLACEHOLDERS.get(word, word) for word in words[1:]]
            command = typer.main.get_command(cli.app).commands[words[0]]  # pyright: ignore[reportAttributeAccessIssue]
            given = command.make_context(words[0], words[1:]).params
            if "table" in given:
                assert load(given["table"].parent / paper.read(given["table"]).config, given["overrides"]).compare
            elif words[0] == "tune":
                said = {key: given[key] for key in Tuning.model_fields if key in given and key != "search"}
                chosen = tune.configured(
                    load(given["config"], given["overrides"]), given["search"] or [], given["seeds"], said
                )
                assert chosen.tune is not None
                assert tuning.checked(chosen.tune, chosen.rounds)
            elif words[0] == "show" and given["what"] != "data":
                command.invoke(command.make_context(words[0], words[1:]))
            elif "config" in given:
                assert sweep.planned(load(given["config"], given["overrides"]))
            elif "what" in given:
                command.invoke(command.make_context(words[0], words[1:]))


SESSION = (
    "README.md",
    "docs/explanation/overview.md",
    *(f"docs/guides/{page}.md" for page in ("reliability", "trackers", "your_data", "your_net")),
)
"""Pages whose commands are run, one after another in one folder, smaller than they are shown."""
UNTRIED = {
    "bench": "its own tests run it",
    "report": "its own tests run it, and it draws for seconds",
    "study": "its own tests run it, and notebooks",
    "paper": "its own tests run it",
    "tune": "its own tests run it",
    "configs/averaging_fmnist.yaml": "needs data and many rounds",
    "runs/comparison": "is what the command before it, of many runs, has left",
    "runs/dropout": "is a study",
    "femnist/data": "is of others; the layout's own tests convert one",
    "fed_emnist_train.h5": "is of others, too",
    "run animals.yaml": "is run by the test of that page",
}
"""What commands of those pages have that are only read, and why."""


@pytest.mark.slow
def test_commands_do_what_they_are_shown_for(repository: Path, capsys: pytest.CaptureFixture[str]):
    write_files(ROOT / "docs" / "guides" / "your_net.md")
    who, two, age = np.arange(40) % 8, np.arange(40) % 2, np.arange(40.0)
    pd.DataFrame({"client": who, "y": two, "age": age}).to_parquet("visits.parquet")
    texts = ["a fine film" if liked else "a poor film" for liked in two]
    tables = {
        "visits": {"hospital": who, "returned": two, "age": age},
        "homes": {"city": who, "price": 2 * age, "size": age},
        "reviews": {"critic": who, "liked": two, "review": texts},
        "lines": {"speaker": who, "line": texts},
    }
    for name, columns in tables.items():
        pd.DataFrame(columns).to_csv(f"{name}.csv", index=False)
    notes = {"user": who.tolist(), "text": texts, "label": two.tolist()}
    datasets.Dataset.from_dict(notes).save_to_disk("notes")
    fedfleet.run("configs/cdma/digits.yaml", out="runs/long")
    left = set(UNTRIED)
    for where, words in COMMANDS:
        text = " ".join(words[1:])
        if words[0] != "fedfleet" or where.partition(":")[0] not in SESSION:
            continue
        if reason := [part for part in UNTRIED if f" {part} " in f" {text} "]:
            left -= {*reason}
            continue
        few = [re.sub(r"^rounds=\d+$", "rounds=3", word) for word in words[1:]]
        plain = ["--no-report"] if few[0] in ("run", "resume") else []
        cli.app([*few, *plain], standalone_mode=False)
    assert not left
    for made in (
        "longer/summary.json",
        "quickstart/FedVARP/model_card.md",
        "tracked/metrics.csv",
        "tracked/tensorboard",
    ):
        assert Path("runs", made).exists()
    assert json.loads(Path("fedfleet.schema.json").read_text(encoding="utf-8"))["$schema"]
    assert fedfleet.open_run("runs/tracked").summary["rounds"] == 3
    assert Path("runs/who.svg").read_text(encoding="utf-8").startswith("<?xml")
    for folder, clients in (
        ("visits", 7),
        ("cameras", 5),
        ("visits-csv", 7),
        ("homes", 7),
        ("reviews", 7),
        ("lines", 7),
        ("notes", 7),
    ):
        assert len(pd.read_feather(f"runs/{folder}/clients.arrow")) == clients  # one is held out
    said = capsys.readouterr().out
    assert all(text in said for text in ("phases a round", "federated averaging", "over_select", "uri", "finished"))


def test_the_readme_names_every_algorithm_once():
    table = re.findall(r"^\|.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    named = [name for row in table for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(ALGORITHMS)


def test_the_readme_is_short_and_plain():
    """It has fifteen words a sentence, thirty at most, and ten highlights of twelve words at most."""
    whole = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$|\]\([^)]*\)|[`*]", "", whole, flags=re.M | re.S)
    assert len([line for line in whole.splitlines() if line.strip()]) <= 75
    highlights = re.findall(r"^- (.*)$", text[: text.index("## Algorithms")], re.M)
    assert len(highlights) == 10
    assert max(len(each.split()) for each in highlights) <= 12
    prose = "\n".join(line for line in text.replace("al.,", "al,").splitlines() if not re.match(r"[|#!]", line))
    sentences = [each.split() for each in re.split(r"(?<=[.:!?])\s|\n\s*\n|\n- ", prose) if each.split()]
    lengths = [len(words) for words in sentences]
    assert max(lengths) <= 30
    assert sum(lengths) / len(lengths) <= 15


MODULES = [(where, words) for where, words in COMMANDS if words[:2] == ["python", "-m"]]


def test_docstrings_name_fields_and_arguments_that_are_there(subtests: pytest.Subtests):
    """Names in sections of attributes and arguments; a class whose fields another one declares is left out."""
    section = {
        "Attributes": re.compile(r"Attributes:\n((?: {4}.*\n|\n)+)"),
        "Args": re.compile(r"Args:\n((?: {4}.*\n|\n)+)"),
    }
    for file in sorted(f for room in ("src/fedfleet", *ROOMS) for f in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ClassDef(bases=[] | [_]):
                    kind, known = "Attributes", {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
                case ast.FunctionDef(args=a):
                    every = (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg)
                    kind, known = "Args", {arg.arg for arg in every if arg is not None}
                case _:
                    continue
            told = section[kind].search((ast.get_docstring(node) or "") + "\n")
            if told is None or not known:
                continue
            named = re.findall(r"^ {4}((?:\w+)(?:, \w+)*):", told[1], re.MULTILINE)
            with subtests.test(file=file.name, of=node.name):
                assert {name for some in named for name in some.split(", ")} <= known


def test_every_command_is_tried_or_one_of_others(subtests: pytest.Subtests):
    for where, words in COMMANDS:
        with subtests.test(where):
            match words:
                case ["python", "-c", code]:
                    assert compile(code, "command", "exec")
                case ["python", path] if path.endswith(".py"):
                    assert (ROOT / path).exists()
                case [program, *_]:
                    assert program in ("fedfleet", *OTHERS) or words[:2] in (["python", "-m"], ["python3", "-m"])


def test_measurements_know_their_options(subtests: pytest.Subtests):
    """The module is there, and the help of its command names every option."""
    for where, words in MODULES:
        with subtests.test(where):
            source = Path(str(importlib.util.find_spec(words[2]).origin))  # pyright: ignore
            if source.name == "__init__.py":
                source = source.with_name("__main__.py")
            assert source.exists()
            text = "".join(path.read_text(encoding="utf-8") for path in {source, ROOT / "benchmarks" / "command.py"})
            for word in words[3:]:
                if word.startswith("--"):
                    assert f'"{word}"' in text, f"{words[2]} has no option {word}"


def test_files_that_are_named_are_there(subtests: pytest.Subtests):
    for page in PAGES:
        with subtests.test(str(page.relative_to(ROOT))):
            text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
            named = re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", text)
            ours = [n for n in named if n.split("/")[0] in {p.name for p in ROOT.iterdir()}]
            missing = [n for n in ours if not re.search(MADE, n) and not (ROOT / n).exists()]
            assert not missing
            for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
                assert (page.parent / link).exists(), link


def test_commands_would_say_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["fedfleet", "run", "configs/none.yaml"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "no such configuration file" in capsys.readouterr().err
