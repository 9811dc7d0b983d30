"""Bibliography of runs: papers of the algorithms, of the corrections and of the tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

from fedfleet.algorithms.bibtex import Paper
from fedfleet.algorithms.papers import CORRECTIONS, HSU, PAPERS, SERVER_OPTIMIZERS
from fedfleet.commands.options_told import name_of, section_of
from fedfleet.report import study_comparisons
from fedfleet.report.study_tables import Tables, ranks
from fedfleet.report.tables import Run, mapping

HOLM = Paper(
    "holm1979simple",
    "Holm, Sture",
    "A Simple Sequentially Rejective Multiple Test Procedure",
    "Scandinavian Journal of Statistics",
    1979,
)
DEMSAR = Paper(
    "demsar2006statistical",
    "Demšar, Janez",
    "Statistical Comparisons of Classifiers over Multiple Data Sets",
    "Journal of Machine Learning Research",
    2006,
)
HEDGES = Paper(
    "hedges1981distribution",
    "Hedges, Larry V.",
    "Distribution Theory for Glass's Estimator of Effect Size and Related Estimators",
    "Journal of Educational Statistics",
    1981,
)
FIELLER = Paper(
    "fieller1954some",
    "Fieller, E. C.",
    "Some Problems in Interval Estimation",
    "Journal of the Royal Statistical Society: Series B",
    1954,
)
YEAR = 2026


def bibliography(groups: Mapping[str, Sequence[Run]], found: Tables | None) -> list[str]:
    """Return BibTeX of the algorithms and corrections that ran, of the tests, and of fedfleet."""
    papers = {
        paper.key: paper for of in groups.values() for paper in (*papers_of(of[0]), *papers_of_tests(groups, found))
    }
    own = (
        f"@misc{{fedfleet,\n  author = {{{{The fedfleet authors}}}},\n  title = {{fedfleet: Federated learning on many unreliable "
        f"devices, simulated}},\n  note = {{Version {version('fedfleet')}}},\n  year = {{{YEAR}}}\n}}"
    )
    return [*(paper.bibtex for _, paper in sorted(papers.items())), own]


def papers_of(run: Run) -> Iterator[Paper]:
    """Yield the papers of a run's algorithm, of the one that it wraps, and of their server optimisers and corrections."""
    for key in ("algorithm", "algorithm.of"):
        section = section_of(run, key)
        yield from PAPERS.get(name_of(section), ())
        for option, papers in (("server_optimizer", SERVER_OPTIMIZERS), ("correction", CORRECTIONS)):
            part = section.get(option)
            yield from papers.get(name_of(part), ()) if isinstance(part, Mapping) else ()
        if mapping(section.get("server_optimizer")).get("momentum"):
            yield HSU


def papers_of_tests(groups: Mapping[str, Sequence[Run]], found: Tables | None) -> Iterator[Paper]:
    """Yield the papers of the tests that tables hold."""
    ranked = found is not None and bool(found.metrics) and ranks(found, found.metrics[0]) is not None
    yield from [DEMSAR] * ranked
    if not _several(groups):
        return
    compares = len(groups) > 1 or (found is not None and _values_compared(found))
    yield from [HOLM] * compares
    if found is not None and compares:
        yield from [HEDGES] * (found.study["seed"].nunique() > 2)
        yield from [FIELLER] * _recovers(found)


def _several(groups: Mapping[str, Sequence[Run]]) -> bool:
    return len({run.seed for of in groups.values() for run in of}) > 1


def _values_compared(found: Tables) -> bool:
    return len(next(iter(found.varied.values()))) > 1


def _recovers(found: Tables) -> bool:
    return bool(found.metrics) and study_comparisons.recovers(found)
