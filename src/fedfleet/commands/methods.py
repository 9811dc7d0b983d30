"""Paragraph on methods, in LaTeX, from the configurations and tables of what ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedfleet.commands import rounds_told, tuned
from fedfleet.commands.options_told import (
    DEFAULTS,
    NAMES,
    about,
    code,
    explained,
    in_words,
    is_own,
    name_of,
    options_that_matter,
    section_of,
    with_options,
)
from fedfleet.commands.references import DEMSAR, FIELLER, HEDGES, HOLM, papers_of, papers_of_tests
from fedfleet.config.executor import Executor
from fedfleet.config.schema import SECTIONS
from fedfleet.experiments.same_run import STOPS
from fedfleet.files.documents import leaves
from fedfleet.report import own_loss, variance
from fedfleet.report.latex import escape
from fedfleet.report.meanings import measured_on
from fedfleet.report.settings import HIDDEN, USED, USUAL, without_effect
from fedfleet.report.significance import LEVEL, POWER
from fedfleet.report.study_tables import DONE, WORST, Tables, aborted
from fedfleet.report.tables import Run, skipped
from fedfleet.report.traps import counted, worst_recalls
from fedfleet.report.words import count, joined, plain_value, share

FIRST = (
    "lr", "dual_lr", "global_lr", "server_lr", "batch_size", "steps", "epochs", "client_optimizer", "optimizer", "server_optimizer",
)  # fmt: skip
"""Options of an algorithm that are told whether or not they are the defaults."""
FEATURES = ("attack", "transforms", "privacy", "example_privacy", "secure_aggregation")
TOLD = (
    "rounds", "population.dataset", "population.partition", "population.clients", "population.held_out", "task", "algorithm",
    "availability", "selection", "devices", "cohort.size", "cohort.wait_for", "cohort.response_low", "cohort.response_high",
    "cohort.over_select", "cohort.deadline_s", "cohort.partial_work", "cohort.min_responses", "cohort.on_abort", "cohort.attempts",
    "cohort.late", "cohort.stale_discount", "evaluation.every", "evaluation.validation", "evaluation.test_examples",
    "warm_start", "seed", *STOPS, *FEATURES,
)  # fmt: skip
"""Settings, or sections of them, that have a sentence; of others those are listed that are no defaults."""
UNTOLD = (
    "schema_version", "label", "seeds", "compare", "vary", "tune", "code_dir", "population.data_dir", "checkpoint", "track",
    "evaluation.per_client", "evaluation.cosines", "evaluation.outcomes", "evaluation.duality_gap", "evaluation.train_examples",
    *(f"executor.{key}" for key in Executor.model_fields if key != "tf32"),
)  # fmt: skip
"""Those that change nothing of what a paper tells."""
COMMON = ("classification", "module", "language_model")
"""Tasks that their names, models and losses say."""


def paragraph(groups: Mapping[str, Sequence[Run]], found: Tables | None, search: tuned.Search | None) -> str:
    """Return a paragraph in LaTeX that says what ran, from the configurations of runs by label, and the tables of a study."""
    every = [run for of in groups.values() for run in of]
    over = [] if found is None else [f"{code(key)} over {joined(_values(found, key))}" for key in found.varied]
    parts = [
        *_shared(groups, lambda run: f"Data are {_data(run, every)}."),
        *_shared(groups, lambda run: f"{_task(run)}."),
        *_shared(groups, lambda run: f"{rounds_told.participation(run, every)}."),
        *_shared(groups, lambda run: rounds_told.devices(run, timed=found is not None and found.target is not None)),
        *(f"{escape(label)} is {_algorithm(of[0])}." for label, of in groups.items()),
        _weights(groups),
        *_shared(groups, _evaluation),
        *_shared(groups, _start),
        *_shared(groups, _besides),
        f"We vary {joined(over)}; what is said above is the first value." if over else "",
        *rounds_told.stops(every),
        *(_of_runs(every) if found is None else _of_study(found)),
        *_tuned(groups, search),
        *_seeds(every),
        *_tests(groups, found),
        _versions(every),
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _values(found: Tables, key: str) -> list[str]:
    """Return the values of a key that varies; of a named section, or its name, with the options that go with them."""
    above, _, last = key.rpartition(".")
    section, told = key if key in SECTIONS else above if last in NAMES else "", []
    for value in found.varied[key]:
        there = found.study[key] == value
        run = next((run for run, here in zip(found.runs, there, strict=True) if here and run is not None), None)
        if section not in SECTIONS or run is None:
            told.append(escape(plain_value(value)))
            continue
        part = section_of(run, section)
        part = {
            option: each
            for option, each in part.items()
            if option in NAMES or f"{section}.{option}" not in found.varied
        }
        mine = section == "algorithm"
        told.append(with_options(name_of(part), _of_algorithm(part)) if mine else explained(section, part))
    return told


def _weights(groups: Mapping[str, Sequence[Run]]) -> str:
    """Say how clients count, and in which labels where they differ in it."""
    how = counted(groups)
    told = [f"{weight} in {escape(joined(labels))}" if len(how) > 1 else weight for weight, labels in how.items()]
    return f"Clients count {'; '.join(told)}." if how else ""


def _shared(groups: Mapping[str, Sequence[Run]], say: Any) -> Iterator[str]:
    """Yield what is said of the first run of each label, once where it is the same for all."""
    by_text: dict[str, list[str]] = {}
    for label, of in groups.items():
        by_text.setdefault(say(of[0]), []).append(label)
    for text, labels in by_text.items():
        if text:
            yield text if len(by_text) == 1 else f"{escape(joined(labels))}: {text}"


def _data(run: Run, every: Sequence[Run]) -> str:
    dataset, population = section_of(run, "population.dataset"), section_of(run, "population")
    clients = population.get("clients")
    many = f"{clients:,} clients" if isinstance(clients, int) else "clients"
    own = is_own(run, "population.dataset")
    whose = with_options(name_of(dataset), {} if own else options_that_matter("population.dataset", dataset))
    sizes = [of for each in every if (of := each.section("client_examples")) and _dealt_as(each) == _dealt_as(run)]
    if sizes:
        low, high = f"{min(of['least'] for of in sizes):,}", f"{max(of['most'] for of in sizes):,}"
        over = " over all seeds" * (population.get("partition_seed") == variance.PAIRED)
        many += f" of {low} training examples" if low == high else f" of {low} to {high} training examples{over}"
    if run.summary.get("dealt") is False:
        return f"{whose}, which come in {many}"
    partition = section_of(run, "population.partition")
    return f"{whose}, dealt to {many} by the partition {explained('population.partition', partition)}"


def _dealt_as(run: Run) -> Any:
    """Return what decides who has which examples, but for the seed."""
    population = section_of(run, "population")
    return [population.get(key) for key in ("dataset", "partition", "partition_seed", "clients")]


def _task(run: Run) -> str:
    task, size = section_of(run, "task"), run.summarised("model_floats")
    model = f", with {code(str(task['model']))}" if task.get("model") else ""
    hidden = task.get("hidden") if task.get("model") in HIDDEN else None
    entropy = "; the loss is cross-entropy" * (name_of(task) == "classification")
    widths = f" ({in_words({'hidden': hidden})})" if hidden else ""
    numbers = f" of {size:,.0f} numbers" if size else ""
    chosen = {
        k: v
        for k, v in options_that_matter("task", task, ("loss",), defaults=False).items()
        if k not in ("model", "hidden", "options")
    }
    if is_own(run, "task"):
        chosen = {} if (loss := own_loss.told(run)) is None else {"loss": loss}
        model = f", {code(str(net))}" if (net := run.summary.get("net")) else ""
    goal, more = about("task", name_of(task)), f"; {in_words(chosen)}" if chosen else ""
    aim = f" ({goal})" if goal and name_of(task) not in COMMON else ""
    return f"The task is {code(name_of(task))}{aim}{model}{widths}{numbers}{entropy}{more}"


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
    few = run.get("evaluation", "test_examples") or 0
    kept += "; the last model on all test examples, too, of which recalls of classes are" if few else ""
    return f"Models are evaluated after {when}{on}{kept}.{''.join(_of_clients(run))}"


def _of_clients(run: Run) -> Iterator[str]:
    """Yield of which models and examples metrics are that were measured client by client."""
    for prefix, whose in (("clients_", "the model"), ("own_", "clients' own models")):
        if name := next((each for each in run.metrics if each.startswith(prefix)), None):
            on = measured_on(name, run.get("population", "held_out") or 0.0)
            yield f" Metrics named {code(prefix)} are of {whose}, on {on}."


def _algorithm(run: Run) -> str:
    options = section_of(run, "algorithm")
    told = with_options(name_of(options), _of_algorithm(options))
    inner = section_of(run, "algorithm.of")
    if inner.get("name"):
        told += f" around {with_options(name_of(inner), _of_algorithm(inner))}"
    keys = ", ".join(dict.fromkeys(paper.key for paper in papers_of(run)))
    return f"{told}{f' {chr(92)}cite{{{keys}}}' if keys else ''}"


def _of_algorithm(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an algorithm that are told; how clients count has a sentence of its own."""
    result = {key: value for key, value in options_that_matter("algorithm", options, FIRST).items() if key != "weight"}
    for naming in USED:
        key = naming.partition(".")[0]
        if isinstance(result.get(key), Mapping):  # told with its defaults, which decide results, too
            how: Mapping[str, Any] = options[key]
            unsaid = without_effect(naming, how)
            has_state = name_of(how) != "sgd" or how.get("momentum")  # of which it is said what becomes of it
            unsaid |= {k for k in how if how[k] == USUAL.get(f"{key}.{k}") and not (k == "state" and has_state)}
            result[key] = {k: v for k, v in how.items() if k not in unsaid and v}
    return result


def _start(run: Run) -> str:
    begins = run.config.get("warm_start")
    return f"The first model is that of {code(str(begins))}." if begins else ""


def _besides(run: Run) -> str:
    """List the features that are used, and all other settings that are no defaults."""
    told = []
    for key in FEATURES:
        section = {k: v for k, v in section_of(run, key).items() if v not in (None, [], {})}
        if section and name_of(section) != "none":
            told.append(f"{escape(key.replace('_', ' '))} {in_words(section) or escape(name_of(section))}")
    for key, value in leaves(run.config):
        said = any(key == each or key.startswith(f"{each}.") for each in (*TOLD, *UNTOLD))
        dealt_anew = key == "population.partition_seed" and value == variance.PAIRED  # which the spreads say
        if not said and not dealt_anew and value not in (DEFAULTS.get(key), None, [], {}):
            told.append(f"{code(key)} {escape(plain_value(value))}")
    return f"Besides: {'; '.join(told)}." if told else ""


def _tuned(groups: Mapping[str, Sequence[Run]], search: tuned.Search | None) -> Iterator[str]:
    """Yield what there is to say of a search, and how it ran where that was otherwise than what is told of."""
    if search is None:
        yield "No search for learning rates is on record."
        return
    yield from tuned.sentences(search, configs(groups), code)


def configs(groups: Mapping[str, Sequence[Run]]) -> tuned.Configs:
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
    lost = sum(map(skipped, every)), sum(run.rounds_done for run in every)
    yield from _came(bool(worst_recalls(every)), sum(map(aborted, every)), *lost)


def _came(worst: bool, late: int, lost: int, done: int) -> Iterator[str]:
    if worst:
        yield "The worst recall is the least share of a class's test examples that the last model finds."
    if late:
        yield f"In all runs {count(late, 'attempt')} at rounds were aborted; their time and traffic count."
    if lost:
        yield f"In {lost:,} of all {count(done, 'round')} too few clients answered."


def _of_study(found: Tables) -> Iterator[str]:
    """Yield what was asked of a study, and what of it went wrong."""
    if found.target is not None:
        yield f"The cost of reaching {escape(str(found.target))} is what it took up to the first evaluation that found it reached."
    failed = int((~found.study["status"].isin(DONE)).sum())
    columns = ("aborted_attempts", "skipped_rounds", "rounds_done")  # missing where all trials failed
    counts = [int(found.study[name].sum()) if name in found.study else 0 for name in columns]
    if failed:
        yield f"Of {count(len(found.study), 'run')}, {failed} failed, and do not count."
    yield from _came(WORST in found.study, *counts)


def _tests(groups: Mapping[str, Sequence[Run]], found: Tables | None) -> Iterator[str]:
    keys = {paper.key for paper in papers_of_tests(groups, found)}
    if HOLM.key in keys:
        of = "pairs of labels" if found is None else "differences of a kind in a metric"
        tests = rf"two-sided t-tests with Holm's correction \cite{{{HOLM.key}}} for all {of}"
        yield f"Differences are paired by seed and tested by {tests}."
    if HOLM.key in keys and found is not None:
        against = f"Labels are compared with {escape(found.reference)}. " if len(found.labels) > 1 else ""
        yield f"{against}A difference that is the same on every seed is no test."
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
