"""Publication of runs: figures and tables for a paper, a paragraph on methods from what ran, and its bibliography."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedfleet.algorithms.bibtex import Paper
from fedfleet.algorithms.papers import CORRECTIONS, PAPERS
from fedfleet.commands import tuned
from fedfleet.config.schema import SECTIONS
from fedfleet.files.writing import write_text
from fedfleet.report import own_loss, publication, run_folders, study_comparisons, tables, variance
from fedfleet.report.groups import grouped
from fedfleet.report.latex import escape
from fedfleet.report.settings import HIDDEN, OF_CLIENTS
from fedfleet.report.significance import LEVEL, POWER
from fedfleet.report.study_tables import DONE, WORST, Tables, aborted, ranks
from fedfleet.report.tables import Run
from fedfleet.report.traps import counted, worst_recalls
from fedfleet.report.words import count, joined, plain_value, share
from fedfleet.simulator.errors import ConfigError, one_line

FOLDER = "paper"
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
OPTIMIZERS = ("client_optimizer", "optimizer")
FIRST = ("lr", "dual_lr", "batch_size", "steps", "epochs", *OPTIMIZERS)
"""Options of an algorithm that are told whether or not they are the defaults."""
UNTOLD = ("name", "kind", "of", "sha256", "digest", "source", "min_size")
"""Keys that are no options, or are told elsewhere."""
NAMES = ("name", "kind")
FEATURES = ("attack", "transforms", "privacy", "example_privacy", "secure_aggregation")


def runs(folders: Sequence[Path], out: Path, width: float | None = None, chosen: Path | None = None) -> list[Path]:
    """Write ``out/paper`` of run folders; return its files. Raises ConfigError, ValueError as ``write_report`` does."""
    groups = grouped([tables.read(folder) for folder in run_folders(folders)])
    return _written(
        out, lambda paper: publication.of_runs(groups, paper, width or publication.COLUMN), groups, None, chosen
    )


def check(folders: Sequence[Path], chosen: Path) -> None:
    """Refuse a search that chose what none of the runs has. Raises ConfigError, ValueError as ``runs`` does."""
    groups = grouped([tables.read(folder) for folder in run_folders(folders)])
    tuned.read(chosen).check(_configs(groups))


def study(found: Tables, out: Path, width: float | None = None, chosen: Path | None = None) -> list[Path]:
    """Write ``out/paper`` of a study; return its files."""
    groups: dict[str, list[Run]] = {label: [] for label in found.labels}
    for label, run in zip(found.study["label"], found.runs, strict=True):
        groups[label] += [] if run is None else [run]
    groups = {label: of for label, of in groups.items() if of}
    return _written(
        out, lambda paper: publication.of_study(found, paper, width or publication.COLUMN), groups, found, chosen
    )


def _written(
    out: Path, draw: Any, groups: Mapping[str, Sequence[Run]], found: Tables | None, chosen: Path | None
) -> list[Path]:
    search, paper = None if chosen is None else tuned.read(chosen), out / FOLDER
    try:
        files = draw(paper)
        write_text(paper / "methods.tex", methods(groups, found, search))
        write_text(paper / "references.bib", "\n\n".join(bibliography(groups, found)) + "\n")
    except OSError as e:
        raise ConfigError(
            f"{paper}: cannot be written ({one_line(e.strerror or e)}): give a folder you may write to"
        ) from None
    return [*files, paper / "methods.tex", paper / "references.bib"]


def methods(groups: Mapping[str, Sequence[Run]], found: Tables | None, search: tuned.Search | None) -> str:
    """Return a paragraph in LaTeX that says what ran, from the configurations of runs by label, and the tables of a study."""
    every = [run for of in groups.values() for run in of]
    varied = {} if found is None else found.varied
    over = [f"{_code(key)} over {joined(_values(key, values, varied, every))}" for key, values in varied.items()]
    parts = [
        *_shared(groups, lambda run: f"Data are {_data(run, every)}."),
        *_shared(groups, lambda run: f"{_task(run)}."),
        *_shared(groups, lambda run: f"{_participation(run)}."),
        *(f"{escape(label)} is {_algorithm(of[0])}." for label, of in groups.items()),
        _weights(groups),
        *_shared(groups, lambda run: f"{_evaluation(run)}."),
        *_shared(groups, _features),
        f"We vary {joined(over)}; what is said above is the first value." if over else "",
        *(_of_runs(every) if found is None else _of_study(found)),
        *_tuned(groups, search),
        *_seeds(every),
        *_tests(groups, found),
        _versions(every),
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _values(key: str, values: Sequence[Any], varied: Mapping[str, Any], runs: Sequence[Run]) -> list[str]:
    """Return the values of a key that varies; names of a section's kinds with the options that go with them."""
    section, _, last = key.rpartition(".")
    if last not in NAMES or section not in SECTIONS:
        return [escape(plain_value(value)) for value in values]
    told = []
    for value in values:
        given = next((found for run in runs if _name(found := _section(run, section)) == value), {})
        told.append(_with(str(value), {k: v for k, v in _plain(given).items() if f"{section}.{k}" not in varied}))
    return told


def _weights(groups: Mapping[str, Sequence[Run]]) -> str:
    """Say how clients count, and in which labels where they differ in it."""
    how = counted(groups)
    told = [f"{weight} in {escape(joined(labels))}" if len(how) > 1 else weight for weight, labels in how.items()]
    return f"Clients count {'; '.join(told)}." if how else ""


def bibliography(groups: Mapping[str, Sequence[Run]], found: Tables | None) -> list[str]:
    """Return BibTeX of the algorithms and corrections that ran, of the tests, and of fedfleet."""
    papers = {paper.key: paper for of in groups.values() for paper in (*_papers(of[0]), *_of_tests(groups, found))}
    own = (
        f"@misc{{fedfleet,\n  author = {{{{The fedfleet authors}}}},\n  title = {{fedfleet: Federated learning on many unreliable "
        f"devices, simulated}},\n  note = {{Version {version('fedfleet')}}},\n  year = {{{YEAR}}}\n}}"
    )
    return [*(paper.bibtex for _, paper in sorted(papers.items())), own]


def _shared(groups: Mapping[str, Sequence[Run]], say: Any) -> Iterator[str]:
    """Yield what is said of the first run of each label, once where it is the same for all."""
    by_text: dict[str, list[str]] = {}
    for label, of in groups.items():
        by_text.setdefault(say(of[0]), []).append(label)
    for text, labels in by_text.items():
        if text:
            yield text if len(by_text) == 1 else f"{escape(joined(labels))}: {text}"


def _at(run: Run, key: str) -> Any:
    """Return what stands at a dotted key of a run's configuration; None where there is nothing."""
    result: Any = run.config
    for part in key.split("."):
        result = result.get(part) if isinstance(result, dict) else None
    return result


def _section(run: Run, key: str) -> dict[str, Any]:
    result = _at(run, key)
    result = result.get("own", result) if isinstance(result, dict) else result
    return result if isinstance(result, dict) else {"name": result} if isinstance(result, str) else {}


def _is_own(run: Run, key: str) -> bool:
    """Whether a part was made in Python, of which there are no options, but what describes it."""
    result = _at(run, key)
    return isinstance(result, dict) and "own" in result


def _name(section: Mapping[str, Any]) -> str:
    return str(section.get("name", section.get("kind", "one of our own")))


def _chosen(key: str, section: Mapping[str, Any], always: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options of a named section: first those told always, then others that are not the defaults.

    Of an option that is a section itself only what is not the default is left, and its name.
    """
    of = SECTIONS.get(key)
    entry = of.registry.get(_name(section)) if of is not None else None
    fields = {} if entry is None else entry.options.model_fields
    result = {option: section[option] for option in always if section.get(option) is not None}
    for option, value in section.items():
        if option in UNTOLD or option in always or value in (None, [], {}):
            continue
        default: Any = fields[option].get_default(call_default_factory=True) if option in fields else None
        default = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = {k: v for k, v in value.items() if v != default.get(k) or (k in NAMES and value != default)}
        if value != default and value not in ({}, None):
            result[option] = value
    return result


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a section that are set: of partitions and availability, defaults matter, too."""
    return {option: value for option, value in section.items() if option not in UNTOLD and value not in (None, [], {})}


def _told(options: Mapping[str, Any]) -> str:
    """Return options in words; of a section of options its name, and below it its numbers and words."""
    words = []
    for option, value in options.items():
        if isinstance(value, Mapping):
            inner = {k: v for k, v in value.items() if k not in UNTOLD and v is not None}
            more = f" ({_told(inner)})" if inner else ""
            words.append(f"{_words(option)} {escape(_name(value))}{more}")
        else:
            words.append(f"{_words(option)} {escape(plain_value(value))}")
    return ", ".join(words)


def _words(option: str) -> str:
    return {"lr": "learning rate", "dual_lr": "dual learning rate"}.get(option, escape(option.replace("_", " ")))


def _with(name: str, options: Mapping[str, Any]) -> str:
    return f"{_code(name)}{f' ({_told(options)})' if options else ''}"


def _about(key: str, section: Mapping[str, Any]) -> str:
    """Return what a part is in the words of its registry, after a colon; nothing of one's own part."""
    of = SECTIONS.get(key)
    entry = of.registry.get(_name(section)) if of is not None else None
    about = "" if entry is None else entry.about.rstrip(".")
    return f": {escape(about[0].lower() + about[1:])}" if about else ""


def _code(name: str) -> str:
    return rf"\texttt{{{escape(name)}}}"


def _data(run: Run, every: Sequence[Run]) -> str:
    dataset, population = _section(run, "population.dataset"), _section(run, "population")
    clients = population.get("clients")
    many = f"{clients:,} clients" if isinstance(clients, int) else "clients"
    whose = _with(_name(dataset), {} if _is_own(run, "population.dataset") else _chosen("population.dataset", dataset))
    sizes = [of for each in every if (of := each.section("client_examples")) and _dealt_as(each) == _dealt_as(run)]
    if sizes:
        low, high = f"{min(of['least'] for of in sizes):,}", f"{max(of['most'] for of in sizes):,}"
        over = " over all seeds" * (population.get("partition_seed") == variance.PAIRED)
        many += f" of {low} training examples" if low == high else f" of {low} to {high} training examples{over}"
    if run.summary.get("dealt") is False:
        return f"{whose}, which come in {many}"
    partition = _section(run, "population.partition")
    how = _with(_name(partition), _plain(partition))
    return f"{whose}, dealt to {many} by the partition {how}{_about('population.partition', partition)}"


def _dealt_as(run: Run) -> Any:
    """Return what decides who has which examples, but for the seed."""
    population = _section(run, "population")
    return [population.get(key) for key in ("dataset", "partition", "partition_seed", "clients")]


def _task(run: Run) -> str:
    task, size = _section(run, "task"), run.summarised("model_floats")
    model = f", with {_code(str(task['model']))}" if task.get("model") else ""
    hidden = task.get("hidden") if task.get("model") in HIDDEN else None
    entropy = "; the loss is cross-entropy" * (_name(task) == "classification")
    widths = f" (hidden {plain_value(hidden)})" if hidden else ""
    numbers = f" of {size:,.0f} numbers" if size else ""
    chosen = {k: v for k, v in _chosen("task", task).items() if k not in ("model", "hidden", "options")}
    if _is_own(run, "task"):
        chosen = {} if (loss := own_loss.read(run)) is None else {"loss": loss.told()}
    return f"The task is {_code(_name(task))}{model}{widths}{numbers}{entropy}{f'; {_told(chosen)}' if chosen else ''}"


def _evaluation(run: Run) -> str:
    every, tested = run.get("evaluation", "every"), run.section("examples").get("tested_on")
    when = (
        "every round"
        if every == 1
        else f"every {every} rounds and after the last"
        if isinstance(every, int)
        else "the last round"
    )
    on = f", on {escape(str(tested))}" if tested else ""
    aside = run.get("evaluation", "validation")
    kept = f"; {escape(share(aside))} of the training examples are kept aside for validation" if aside else ""
    own = run.get("population", "held_out")
    kept += f"; {escape(share(own))} of each client's examples are kept from its work, to measure on" if own else ""
    return f"Models are evaluated after {when}{on}{kept}"


def _participation(run: Run) -> str:
    online, chosen, cohort = (_section(run, key) for key in ("availability", "selection", "cohort"))
    rounds = run.config.get("rounds")
    how = f"{_with(_name(online), _plain(online))}{_about('availability', online)}"
    by = f"by {_with(_name(chosen), _chosen('selection', chosen))}{_about('selection', chosen)}"
    by = "uniformly at random" if _name(chosen) == "uniform" else by
    who = f"all {cohort.get('size')} clients" if variance.everybody(run) else f"{cohort.get('size')} clients {by}"
    limit = f", with a deadline of {cohort['deadline_s']:g} s" if cohort.get("deadline_s") else ""
    wait_for = cohort.get("wait_for") or "all"
    waits = f", and waits for {'all that are online' if wait_for == 'all' else escape(str(wait_for))}"
    invites = f"the server invites {who}{waits}{limit}"
    if _name(online) == "always":
        invites = invites.replace(", and waits for all that are online", "")
        return f"In each of {rounds:,} rounds {invites}; all are online"
    return f"In each of {rounds:,} rounds {invites}; who is online follows {how}. {_aborted(cohort)}"


def _aborted(cohort: Mapping[str, Any]) -> str:
    """Say what follows where too few answer."""
    least = cohort.get("min_responses", 1)
    few = "nobody answers" if least == 1 else f"fewer than {least} clients answer"
    if cohort.get("on_abort") == "skip":
        return f"A round in which {few} counts as done, and is not tried again"
    if (attempts := cohort.get("attempts", 10)) == 1:
        return f"A round in which {few} ends the run"
    return f"A round in which {few} is tried again, in up to {attempts} attempts"


def _algorithm(run: Run) -> str:
    options = _section(run, "algorithm")
    told = _with(_name(options), _of_algorithm(options))
    inner = _section(run, "algorithm.of")
    if inner.get("name"):
        told += f" around {_with(_name(inner), _of_algorithm(inner))}"
    keys = ", ".join(paper.key for paper in _papers(run))
    return f"{told}{f' {chr(92)}cite{{{keys}}}' if keys else ''}"


def _of_algorithm(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an algorithm that are told; how clients count has a sentence of its own."""
    result = {key: value for key, value in _chosen("algorithm", options, FIRST).items() if key != "weight"}
    every, usual = {option for several in OF_CLIENTS.values() for option in several}, {"state": "reset"}
    for key in OPTIMIZERS:
        if isinstance(how := result.get(key), Mapping):
            others = every.difference(OF_CLIENTS.get(_name(how), ()))
            result[key] = {k: v for k, v in how.items() if k not in others and v and v != usual.get(k)}
    return result


def _papers(run: Run) -> Iterator[Paper]:
    for key in ("algorithm", "algorithm.of"):
        section = _section(run, key)
        yield from PAPERS.get(_name(section), ())
        correction = section.get("correction")
        yield from CORRECTIONS.get(_name(correction), ()) if isinstance(correction, Mapping) else ()


def _features(run: Run) -> str:
    told = []
    for key in FEATURES:
        section = {k: v for k, v in _section(run, key).items() if v not in (None, [], {})}
        if section and _name(section) != "none":
            told.append(f"{escape(key.replace('_', ' '))} {_told(section) or escape(_name(section))}")
    return f"Besides: {'; '.join(told)}." if told else ""


def _tuned(groups: Mapping[str, Sequence[Run]], search: tuned.Search | None) -> Iterator[str]:
    """Yield what there is to say of a search, and how it ran where that was otherwise than what is told of."""
    if search is None:
        yield "No search for learning rates is on record."
        return
    yield from tuned.sentences(search, _configs(groups), _code)


def _configs(groups: Mapping[str, Sequence[Run]]) -> tuned.Configs:
    return {label: [run.config for run in of] for label, of in groups.items()}


def _seeds(runs: Sequence[Run]) -> Iterator[str]:
    seeds = sorted({run.seed for run in runs if isinstance(run.seed, int)})
    if len(seeds) == 1:
        yield f"The seed is {seeds[0]}."
    elif seeds:
        yield f"Seeds are {escape(joined(list(map(str, seeds))))}; results are mean and sample standard deviation over them."
    if (held := variance.held(runs, advice=False)) is not None:
        yield escape(held)


def _of_runs(every: Sequence[Run]) -> Iterator[str]:
    """Yield what came of runs that are no study."""
    yield from _came(bool(worst_recalls(every)), sum(map(aborted, every)))


def _came(worst: bool, late: int) -> Iterator[str]:
    if worst:
        yield "The worst recall is the least share of a class's test examples that the last model finds."
    if late:
        yield f"In all runs {count(late, 'attempt')} at rounds were aborted; their time and traffic count."


def _of_study(found: Tables) -> Iterator[str]:
    """Yield what was asked of a study, and what of it went wrong."""
    if found.target is not None:
        yield f"The cost of reaching {escape(str(found.target))} is what it took up to the first evaluation that found it reached."
        if known := [run for run in found.runs if run is not None]:
            devices = _section(known[0], "devices")
            made = _with(_name(devices), _chosen("devices", devices))
            yield f"Virtual seconds are of simulated devices, {made}."
    failed = int((~found.study["status"].isin(DONE)).sum())
    late = int(found.study["aborted_attempts"].sum()) if "aborted_attempts" in found.study else 0
    if failed:
        yield f"Of {count(len(found.study), 'run')}, {failed} failed, and do not count."
    yield from _came(WORST in found.study, late)


def _several(groups: Mapping[str, Sequence[Run]]) -> bool:
    return len({run.seed for of in groups.values() for run in of}) > 1


def _of_tests(groups: Mapping[str, Sequence[Run]], found: Tables | None) -> Iterator[Paper]:
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


def _values_compared(found: Tables) -> bool:
    return len(next(iter(found.varied.values()))) > 1


def _recovers(found: Tables) -> bool:
    return bool(found.metrics) and study_comparisons.recovers(found)


def _tests(groups: Mapping[str, Sequence[Run]], found: Tables | None) -> Iterator[str]:
    keys = {paper.key for paper in _of_tests(groups, found)}
    if HOLM.key in keys:
        yield rf"Differences are paired by seed and tested by two-sided t-tests with Holm's correction \cite{{{HOLM.key}}}."
    if HOLM.key in keys and found is not None:
        against = f"Labels are compared with {escape(found.reference)}. " if len(found.labels) > 1 else ""
        yield f"{against}What agrees on every seed is no test."
    if HEDGES.key in keys:
        yield rf"Effect sizes are Hedges' g of the paired differences \cite{{{HEDGES.key}}}."
    if FIELLER.key in keys:
        yield rf"Shares of a loss that are won back have Fieller's intervals \cite{{{FIELLER.key}}}."
    if DEMSAR.key in keys:
        yield rf"Ranks over conditions are compared by Friedman's and Nemenyi's tests \cite{{{DEMSAR.key}}}."
    if found is not None and found.sought is not None and HOLM.key in keys:
        yield (
            f"Seeds needed for a difference of {found.sought:g} are those of a paired t-test at {escape(share(LEVEL))} with "
            f"{escape(share(POWER))} power, by the spread seen."
        )


def _versions(runs: Sequence[Run]) -> str:
    packages: dict[str, dict[str, None]] = {}
    for run in runs:
        known = {"Python": run.environment.get("python"), **(run.environment.get("packages") or {})}
        for name in ("fedfleet", "torch", "Python"):
            if known.get(name):
                packages.setdefault(name, {})[str(known[name])] = None
    told = [f"{name} {' and '.join(several)}" for name, several in packages.items()]
    return rf"All runs are simulated with fedfleet \cite{{fedfleet}}: {escape(joined(told))}." if told else ""
