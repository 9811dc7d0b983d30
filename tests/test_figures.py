"""Pages of algorithms end with a table of every figure of a paper, whose commands run; here small, on data made up as published."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from fedfleet.commands import cli, paper, study
from fedfleet.commands.plan import describe
from fedfleet.config.schema import Config, load, with_overrides
from fedfleet.datasets import mnistm
from fedfleet.datasets.files import DataError
from fedfleet.datasets.folders import SETS
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.sweep import Trial
from tests.datasets.layouts import small_celeba, small_mnist, with_attributes
from tests.datasets.test_originals import bundle, photographs, write
from tests.datasets.test_text import write_treebank
from tests.front.experiments.test_left_out_domains import made

ROOT = Path(__file__).resolve().parents[1]
HEAD = "## Every table and figure\n"
MADE = "digit_five|(rotated_)?(fashion_)?mnist|mnistm|celeba|celeba_blond|cornell_ptb"
"""Data sets that are made up, besides those of folders."""
FEW: dict[str, Any] = {"population.clients": 3, "cohort.size": 2}
SCORED = FEW | {"task.samples": 1000, "task.width": 0.0625, "task.scorer.net": "small", "task.scorer.epochs": 0.5}
SMALL: dict[str, dict[str, Any]] = {
    "averaging_fmnist": FEW | {"algorithm.batch_size": 4},
    "async_fmnist": {
        **{"population.clients": 3, "population.partition": "iid"},
        **{"algorithm.batch_size": 4, "algorithm.buffer": 2, "algorithm.concurrency": 3},
    },
    "fedau_fashion": FEW | {"algorithm.batch_size": 2},
    **dict.fromkeys(("auc_mnist", "auc_cifar10", "auc_fashion_mnist", "robust_mnist", "robust_fashion_mnist"), FEW),
    **dict.fromkeys((f"{kind}_{data}" for kind in ("gan", "k_sweep") for data in ("mnist", "fashion_mnist")), SCORED),
    **dict.fromkeys(("gan_fashion_mnist_small", "k_sweep_fashion_mnist_small", "gan_celeba"), SCORED),
    "celeba": {"population.clients": 4, "cohort.size": 4, "task.weights": "random", "algorithm.batch_size": 2},
    "many_clients": {"algorithm.batch_size": 2},
    "many_clients_digits": {"algorithm.batch_size": 2},
    "clients": FEW | {"population.partition": "iid", "algorithm.batch_size": 2},
    "clients_matching": FEW | {"population.partition": "iid", "algorithm.batch_size": 2},
    "fedomg/fashion_mnist": FEW | {"population.partition": "iid", "algorithm.batch_size": 2},
    "left_out_clothes": {"population.clients": 6, "cohort.size": 5, "algorithm.batch_size": 2},
    "niid_bench": {"population.clients": 3, "population.partition": "iid", "cohort.size": 3, "algorithm.batch_size": 4},
}
"""What configurations of many clients have on few examples."""
WAITING = {"fact/digit_five", "fact/office31", "fact/office_caltech10"}
"""Tables of many methods on data that have to be fetched: each of their rows is planned. FedOMG's have a file of their own."""
NETS = {"two_heads": "digits_small", "domain_adaptation": "cnn"}
"""Small nets in the place of theirs."""


class Command(NamedTuple):
    """A command of the last table of a page."""

    page: str
    line: int
    words: list[str]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def given(self) -> dict[str, Any]:
        """What its arguments are read as."""
        command = typer.main.get_command(cli.app).commands[self.words[1]]  # pyright: ignore[reportAttributeAccessIssue]
        return command.make_context(self.words[1], self.words[2:]).params

    @property
    def of(self) -> Path | None:
        """The configuration that it runs."""
        path = next((ROOT / word for word in self.words if word.endswith(".yaml")), None)
        return path.parent / paper.read(path).config if path is not None and path.stem.endswith("_table") else path

    def trials(self) -> tuple[Trial, ...]:
        """The runs of one seed that it asks for."""
        given = self.given
        match self.words[1]:
            case "paper":
                path = given["table"]
                table = paper.read(path)
                config = load(path.parent / table.config, given["overrides"])
                if table.across is not None:
                    config = with_overrides(config, {"vary": {table.across.key: [*table.across.columns.values()]}})
                return study.plan(paper.arranged(config, table, path)[0], seeds=1, grid=False).trials
            case "study":
                return study.plan(load(given["config"], given["overrides"]), given["vary"] or [], seeds=1).trials
            case _:
                return study.plan(load(given["config"], given["overrides"]), seeds=1, grid=False).trials


def last_tables() -> Iterator[Command]:
    for path in sorted((ROOT / "docs" / "algorithms").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        before, there, last = text.partition(HEAD)
        if not there:
            continue
        for number, row in enumerate(last.splitlines(), before.count("\n") + 2):
            for code in re.findall(r"`((?:fedfleet|python -m) [^`]+)`", row if row.startswith("|") else ""):
                yield Command(path.stem, number, shlex.split(code))


COMMANDS = list({" ".join(command.words): command for command in last_tables()}.values())
"""Each once, though several pages may have it."""
BY_CONFIGURATION = [[c for c in COMMANDS if c.of == path] for path in dict.fromkeys(c.of for c in COMMANDS)]


def test_pages_end_with_a_table_of_every_figure(subtests: pytest.Subtests):
    pages = {path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md")}
    assert {command.page for command in COMMANDS} == pages
    for page in sorted(pages):
        with subtests.test(page):
            last = (ROOT / "docs" / "algorithms" / f"{page}.md").read_text(encoding="utf-8").partition(HEAD)[2]
            rows = [line for line in last.splitlines() if line.startswith("|")]
            assert rows[0] == "| of the paper | command here | measured |"
            assert last.rstrip().splitlines()[-1] == rows[-1]
            cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows[2:]]
            assert all(len(row) == 3 and all(row) for row in cells)


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Config], Config]:
    """Return what makes a run short: a round of a step on a few examples, made up where those published are not there."""
    monkeypatch.chdir(ROOT)
    data = tmp_path / "data"
    data.mkdir()
    write(data, bundle(20, 6))
    small_mnist(data, "mnist")
    small_mnist(data, "fashion_mnist")
    photographs(data)
    monkeypatch.setattr(mnistm, "VALIDATION", 2)
    small_celeba(data, range(12), [0] * 8 + [2] * 4, range(0, 240, 20))
    with_attributes(data, [0, 0, 1, 1] * 3, [0, 1] * 6)
    write_treebank(data)
    for name, each in {"office31": 1, "office_caltech10": 2, "pacs": 3, "vlcs": 4, "office_home": 1}.items():
        made(data, name, each)

    def short(config: Config) -> Config:
        said = config.model_dump(mode="json")
        dataset, photographs = said["population"]["dataset"], said["population"]["dataset"]["name"] in SETS
        given: dict[str, Any] = {"rounds": 1, "evaluation.every": 1}
        if photographs or re.fullmatch(MADE, dataset["name"]):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            given["population.data_dir"] = str(data)
        for key, options in (("algorithm", said["algorithm"]), ("algorithm.of", said["algorithm"].get("of", {}))):
            given |= {
                f"{key}.{name}": 1 for name in ("rounds", "epochs", "steps", "pairs", "every") if options.get(name)
            }
            given |= {f"{key}.batch_size": 10} if options.get("batch_size") else {}
        given |= {"population.dataset.per_domain": 20} if dataset.get("per_domain") else {}
        given |= {"population.dataset.side": 32, "task.weights": "random"} if photographs else {}
        return with_overrides(config, given)

    return short


def made_small(few: Callable[[Config], Config], command: Command, trial: Trial) -> Config:
    """Return a run of a command, as short as its configuration can be."""
    config, path = few(trial.config), command.of
    assert path is not None
    own = SMALL.get(path.stem, SMALL.get(f"{path.parent.name}/{path.stem}", {}))
    wrapped = bool(config.algorithm.model_dump().get("of"))
    return with_overrides(
        config, {key.replace("algorithm.", "algorithm.of.") if wrapped else key: value for key, value in own.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "commands",
    [found for found in BY_CONFIGURATION if (path := found[0].of) and f"{path.parent.name}/{path.stem}" in WAITING],
    ids=lambda commands: commands[0].name,
)
def test_every_row_that_waits_is_planned(
    few: Callable[[Config], Config], subtests: pytest.Subtests, commands: list[Command]
):
    """Every method and task of a table, once, on data made up."""
    rows: dict[str, tuple[Command, Trial]] = {}
    for command in commands:
        for trial in command.trials():  # the first of each, whose data are made up
            rows.setdefault(trial.config.model_dump_json(include={"algorithm", "task"}), (command, trial))
    for command, trial in rows.values():
        with subtests.test(trial.label):
            config = made_small(few, command, trial)
            net = {
                "task.model": NETS[config.task.name],
                "task.weights": "imagenet",
            }  # these take no weights: the default
            lines = dict(describe(Experiment(with_overrides(config, net))))
            assert "clients" in lines


@pytest.mark.slow
@pytest.mark.parametrize("commands", BY_CONFIGURATION, ids=lambda commands: commands[0].name)
def test_a_command_runs(few: Callable[[Config], Config], tmp_path: Path, commands: list[Command]):
    """The last of its runs, or the first where data of the last are not there; others of its configuration can be planned."""
    command, *others = sorted(commands, key=lambda each: each.words[1] in ("plan", "show"))  # one that trains
    if command.of is None:  # a benchmark, which its own tests run
        assert all(importlib.util.find_spec(each.words[2]) is not None for each in commands)
        return
    assert all(other.trials() for other in others)
    trials, experiment, missing = command.trials(), None, ""
    for trial in (trials[-1], trials[0]):
        try:
            experiment = Experiment(made_small(few, command, trial))
            break
        except DataError as e:
            missing = str(e)
    if experiment is None:
        pytest.skip(missing)
    if command.words[1] in ("plan", "show"):  # which train nothing
        assert experiment.population.size
    else:
        assert experiment.run(tmp_path / "run").summary["rounds"] == 1
