"""Tables of papers: what is compared with what. ``tests/front/experiments/test_domains.py`` runs one."""

import json

import pytest
import yaml

import fedfleet
from fedfleet.commands import paper, study
from fedfleet.config.schema import load
from fedfleet.experiments.progress import Progress
from fedfleet.report import paper_figure
from fedfleet.simulator.errors import ConfigError

FOUND = {"a, small": {"loss": [1.0, 3.0]}, "b, small": {"loss": [0.5, 3.5]}, "b, large": {"loss": [9.0, 9.5]}}
DIGITS = {"rounds": 1, "compare": {row: {"algorithm.lr": 0.1 * n} for n, row in enumerate(FOUND, start=1)}}


def table(**given):
    return paper.PaperTable(title="T", source="S", config="c.yaml", columns={"loss": "loss"}, **given)


def differences(**given) -> list[str]:
    return paper.markdown(table(**given), FOUND).partition("\nDifferences")[2].splitlines()


def test_rows_are_compared_with_one_row_with_rows_of_their_own_or_with_none():
    found = differences(baseline="a, small")
    assert found[0].startswith(" from a, small, seed by seed")
    assert found[4:] == ["| b, small | +0.00 ± 0.50 (1 of 2) |", "| b, large | +7.25 ± 0.75 (0 of 2) |"]
    small, large = differences(baseline={"b, small": "a, small", "b, large": "b, small"})[4:]
    assert small == "| b, small beside a, small | +0.00 ± 0.50 (1 of 2) |"
    assert large == "| b, large beside b, small | +7.25 ± 1.25 (0 of 2) |"
    assert differences() == []


@pytest.mark.parametrize("baseline", ["d", {"d": "a, small"}, {"a, small": "d"}])
def test_an_unknown_row_is_refused(tmp_path, baseline):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(DIGITS))
    written = {"title": "T", "source": "S", "config": "c.yaml", "columns": {"loss": "loss"}, "baseline": baseline}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(written))
    with pytest.raises(ConfigError, match=r"baseline: 'd' is no label of compare in c\.yaml"):
        paper.run(tmp_path / "t.yaml", None, 1, tmp_path / "out", progress=None)  # type: ignore[arg-type]


def test_rows_that_are_cited_alone_stand_below_those_that_are_run(tmp_path):
    lines = paper.markdown(table(paper={"a, small": {"loss": 2.5}}, cited={"theirs": {"loss": (4.0, 0.5)}}), FOUND)
    rows = [line for line in lines.splitlines() if "| paper |" in line]
    assert rows == ["| | paper | 2.50 |", "| theirs | paper | 4.00 ± 0.50 |"]
    other = paper.markdown(table(paper={"a, small": {"loss": 2.5}}, printed="calibration"), FOUND)
    assert "| | calibration | 2.50 |" in other.splitlines()
    assert "paper" not in other
    for cited, key in (({"theirs": {"no": 1.0}}, "cited.theirs.no"), ({"a, small": {"loss": 1.0}}, "cited.a, small")):
        written = {"title": "T", "source": "S", "config": "c.yaml", "columns": {"loss": "loss"}, "cited": cited}
        (tmp_path / "t.yaml").write_text(yaml.safe_dump({**written, "paper": {"a, small": {"loss": 2.5}}}))
        with pytest.raises(ConfigError, match=key):
            paper.read(tmp_path / "t.yaml")


def test_of_several_settings_that_of_the_configuration_alone_is_printed(tmp_path):
    blocks = [
        {
            "where": {"cohort.size": size, "population.partition.alpha": 0.5},
            "source": f"size {size}",
            "paper": {row: {"loss": 0.1 * size}},
        }
        for size, row in ((2, "a, small"), (3, "b, small"))
    ]
    made = table(blocks=blocks)

    def told(*given: str) -> str:
        config = load({"rounds": 1, "population": {"dataset": "digits", "clients": 4}}, ["cohort.size=3", *given])
        return paper.markdown(made.at(config), FOUND)

    here = told("population.partition={kind: dirichlet, alpha: 0.5}")
    assert "(S, size 3)" in here
    assert [line for line in here.splitlines() if "| paper |" in line] == ["| | paper | 0.30 |"]
    for other in ("population.partition={kind: dirichlet, alpha: 0.1}", "population.partition=iid"):
        assert "(S, nothing of this setting)" in told(other)
        assert "| paper |" not in told(other)
    assert table(paper={"a, small": {"loss": 1.0}}).at(load(DIGITS)).paper
    written = {"title": "T", "source": "S", "config": "c.yaml", "columns": {"loss": "loss"}, "blocks": blocks}
    for more, says in (
        ({"paper": {"a, small": {"loss": 1.0}}}, "blocks: they are instead of paper"),
        ({"cited": {"b, small": {"loss": 1.0}}}, "cited.b, small: it is a row of paper too"),
        ({"blocks": [blocks[0] | {"paper": {"a, small": {"no": 1.0}}}]}, "blocks.0.paper.a, small.no: no such column"),
    ):
        (tmp_path / "t.yaml").write_text(yaml.safe_dump(written | more))
        with pytest.raises(ConfigError, match=says):
            paper.read(tmp_path / "t.yaml")


def test_columns_may_be_pairs_of_domains_of_which_the_second_is_the_target(tmp_path):
    both = {"A to B": ["id", "target"], "B to A": ["target", "id"]}
    config = {
        "rounds": 2, "executor": {"kind": "local"}, "cohort": {"size": 2}, "domains": {"kind": "given", "target": 1},
        "population": {"dataset": {"name": "digits_to_rot30", "domains": both["A to B"]}, "clients": 2,
                       "partition": {"kind": "domain_share", "share": 1.0}},
        "task": {"name": "domain_adaptation", "hidden": [8]}, "algorithm": {"name": "fedsgda", "lr": 1.0},
        "compare": {"FedSGDA": {}},
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    across = {"key": "population.dataset.domains", "columns": both, "metric": "target_accuracy"}
    (tmp_path / "t.yaml").write_text(
        yaml.safe_dump({"title": "T", "source": "S", "config": "c.yaml", "across": across})
    )
    paper.run(tmp_path / "t.yaml", None, 1, tmp_path / "out", Progress.silent(), 1)
    found = json.loads((tmp_path / "out" / "table.json").read_text())["FedSGDA"]
    for column, domains in both.items():
        named = {"population.dataset.domains": domains, "domains.target": domains[1]}
        run = fedfleet.run(fedfleet.load(config, {**named, "compare": None}), out=tmp_path / column)
        assert found[column] == [run.summary["final"]["eval/target_accuracy"]]
    assert found["A to B"] != found["B to A"]


TO = r"(?P<row>\d), .* to (?P<column>\w+)"
PLAIN = {"title": "T", "source": "S", "config": "c.yaml", "columns": {"x": "accuracy", "y": "accuracy"}, "labels": TO}


def test_rows_and_columns_may_be_parts_of_labels(tmp_path):
    """Two labels of one cell are averaged, seed by seed; one that does not match is not run; a cell may be of none."""
    values = {"1, a to x": [1.0, 2.0], "1, b to x": [3.0, 6.0], "1, a to y": [8.0, 7.0], "2, a b to x": [5.0, 5.5]}
    config = load({"rounds": 1, "compare": {label: {} for label in [*values, "other"]}})
    made = paper.PaperTable(**PLAIN, mean_of=["x", "y"], baseline="1", paper={"2": {"x": 0.5}})
    config, places = paper.arranged(config, made, tmp_path)
    planned = study.plan(config, seeds=2, grid=False)
    assert [trial.label for trial in planned.trials[::2]] == [*values]
    for trial in planned.trials:
        folder = study.folder(tmp_path, trial)
        folder.mkdir(parents=True)
        final = {"eval/accuracy": values[trial.label][trial.config.seed]}
        (folder / "summary.json").write_text(json.dumps({"status": "finished", "final": final}))
    found = paper.collected(study.Prepared(planned, (), {}), made, places, tmp_path)
    assert found == {
        "1": {"x": [2.0, 4.0], "y": [8.0, 7.0], "mean": [5.0, 5.5]},
        "2": {"x": [5.0, 5.5], "y": [], "mean": []},
    }
    lines = paper.markdown(made, found).splitlines()
    assert "over 2 seeds" in lines[0]
    assert "| 2 | ours | 5.25 ± 0.35 |  |  |" in lines
    assert lines[-1] == "| 2 | +2.25 ± 0.75 (2 of 2) | none | none |"
    assert paper_figure.draw("T", found, {}).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"labels": "(?P<row>.+)"}, "labels: .*needs the groups row and column"),
        ({"labels": "(?P<row>"}, "labels: .*no regular expression"),
        ({"labels": r"(?P<row>\d), (?P<column>\w) .*"}, "labels: '1, a to x' is of the column 'a': choose of x, y"),
        ({"columns": {"x": "accuracy", "z": "accuracy"}}, "labels: '1, a to y' is of the column 'y'"),
        ({"columns": {"x": "accuracy", "y": "accuracy", "z": "accuracy"}}, "labels: no label is of the column 'z'"),
        ({"columns": {}, "across": {"key": "seed", "columns": {"x": 1}, "metric": "loss"}}, "labels: not with across"),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path, changed, says):
    compare = {"1, a to x": {}, "1, a to y": {"algorithm.lr": 0.2}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"rounds": 1, "compare": compare}))
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({**PLAIN, **changed}))
    with pytest.raises(ConfigError, match=says):
        paper.run(tmp_path / "t.yaml", None, 1, tmp_path / "out", progress=None)  # type: ignore[arg-type]
