"""Overview of runs, in a few sentences of plain words, from their records alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedfleet.report import traps, variance, verdicts
from fedfleet.report.settings import OF_THEOREMS
from fedfleet.report.significance import in_order
from fedfleet.report.tables import Run, completed_counts
from fedfleet.report.words import count, duration, joined, mean_sd, number, plain_value, quantity, share, span, whole
from fedfleet.simulator.driver.evaluation import less_is_better

SPENT = ("epsilon_spent", "example_epsilon_spent")  # of which there is no best
CHOSEN = ("lr", "dual_lr", "batch_size", "steps", "epochs")  # of the options of an algorithm
LEARNS = {
    "classification": "classify examples of",
    "stochastic": "classify examples of",
    "attentive": "classify examples of",
    "two_heads": "classify examples of",
    "robust": "classify examples of, under a perturbation that all images share,",
    "auc": "rank one class above the others (AUC) on",
    "gan": "generate images like those of",
    "language_model": "predict the next word of",
    "domain_adaptation": "classify examples of domains without labels, from those with labels, of",
}
"""Task -> what it is to learn, before the name of the data."""


def of_run(run: Run) -> list[str]:
    """Sentences about one run; nothing is said of what is not on record."""
    paragraphs = [_who, _steps, _heard, _skipped, _metrics], [_end, _cost, _beset]
    return [" ".join(sentence for part in parts for sentence in part(run)) for parts in paragraphs]


def of_comparison(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Sentences about runs under several labels, or of several seeds."""
    runs = [run for group in groups.values() for run in group]
    seeds = {repr(run.seed) for run in runs if run.seed is not None}
    words = f"{count(len(groups), 'label')}, {count(len(runs), 'run')}" + (
        f", {count(len(seeds), 'seed')}" if seeds else ""
    )
    told = [f"Compared here: {words}. {_same(runs)}".strip()]
    told += _heard_together(runs)
    metrics = headline(runs)
    if metrics:
        told.append(_ranking(groups, metrics[0]))
        told += [*_verdict(groups, metrics[0]), *_worst_domains(groups, metrics[0])]
    told += [*_worst_classes(groups), *traps.of_comparison(groups)]
    ended = Counter(str(run.summary.get("status") or "unknown") for run in runs)
    if set(ended) != {"finished"}:
        told.append(f"Of the runs, {joined([f'{many} {status}' for status, many in ended.items()])}.")
    attacked = {label: said for label, group in groups.items() if (said := _attack(group[0]))}
    told += (
        [f"Under attack: {'; '.join(f'“{label}” ({said})' for label, said in attacked.items())}."] if attacked else []
    )
    if (varies := variance.held(runs)) is not None:
        told.append(varies)
    if len(seeds) < 2:
        told.append("There is one seed a label: no spread can be told, and a difference may be chance.")
    return told


def _worst_classes(groups: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """The recall of the class that each run of a label serves worst, and which they are."""
    found: dict[str, tuple[float, str]] = {}
    for label, runs in groups.items():
        if worst := traps.worst_recalls(runs):
            values = [value for _, value in worst]
            which = [str(k) for k in dict.fromkeys(k for k, _ in worst)]
            named = f"{'class' if len(which) == 1 else 'classes'} {joined(which)}"
            found[label] = float(np.mean(values)), f"{mean_sd(values)} ({named})"
    if found:
        order = sorted(found, key=lambda label: -found[label][0])
        yield f"Recall of the worst class: {', '.join(f'“{label}” {found[label][1]}' for label in order[:6])}."


def _worst_domains(groups: Mapping[str, Sequence[Run]], metric: str) -> Iterator[str]:
    """Yield each label's final metric of the domain where it is worst."""
    found = {
        label: [v for run in runs if (v := _of_worst_domain(run, metric)) is not None] for label, runs in groups.items()
    }
    order = sorted(
        filter(found.get, found), key=lambda label: np.mean(found[label]), reverse=not less_is_better(metric)
    )
    if order:
        yield f"{metric} of the worst domain: {', '.join(f'“{label}” {mean_sd(found[label])}' for label in order[:6])}."


def _of_worst_domain(run: Run, metric: str) -> float | None:
    return run.final(f"{metric}_worst_domain")


def headline(runs: Sequence[Run]) -> list[str]:
    """The metrics that were evaluated, the first the one that a model is selected by; not what is spent of a budget."""
    known = list(dict.fromkeys(metric for run in runs for metric in run.metrics if metric not in SPENT))
    chosen = {str(run.get("checkpoint", "best")).removeprefix("eval/") for run in runs}
    return sorted(known, key=lambda metric: metric not in chosen)


def _who(run: Run) -> Iterator[str]:
    name = run.get("algorithm", "name")
    if name is None:
        return
    model, floats = run.get("task", "model"), run.summarised("model_floats")
    model = None if model == run.get("task", "name") else model  # of one's own there is one name alone
    size = f"{floats:,.0f} numbers" if floats else ""
    using = f", with {model}{f', {size}' if size else ''}" if model else f", with a model of {size}" if size else ""
    verb = "learnt" if traps.constant(run) is None else "did not clearly learn"
    yield f"{name} {verb} {_goal(run)}{_among(run)}{using}."


def _steps(run: Run) -> Iterator[str]:
    """How clients learnt: the rates and batches that were chosen, the local steps that followed."""
    given = run.config.get("algorithm")
    given = given if isinstance(given, dict) else {}
    given = {**given["of"], **given} if isinstance(given.get("of"), dict) else given
    names = [name for name in CHOSEN if not (given.get("theory") and name in OF_THEOREMS)]
    falling = _schedule(given)
    chosen = joined(
        [f"{name} {given[name]}{falling * (name == 'lr')}" for name in names if given.get(name) is not None]
    )
    known = {name: told for name, told in run.section("local_steps").items() if _is_span(told)}
    spans = [span(**told) + (f" in {name}" if len(known) > 1 else "") for name, told in known.items()]
    each = f"local steps of a client a round: {joined(spans)}" if spans else ""
    if chosen:
        yield f"Clients learnt with {chosen}{f' ({each})' if each else ''}."
    elif each:
        yield f"{each[0].upper()}{each[1:]}."


def _schedule(given: Mapping[str, Any]) -> str:
    """How the rate changes over rounds, if it does."""
    told = given.get("lr_schedule")
    if not isinstance(told, dict) or told.get("kind") in (None, "constant"):
        return ""
    more = [f"{key} {value}" for key, value in told.items() if key != "kind" and value not in (None, "round")]
    return f" (schedule: {', '.join([told['kind'], *more])})"


def _is_span(told: object) -> bool:
    ends = {"least", "middle", "most"}
    return isinstance(told, dict) and told.keys() == ends and all(isinstance(n, int) for n in told.values())


def _goal(run: Run) -> str:
    task, data = run.get("task", "name"), run.get("population", "dataset")
    if task not in LEARNS:
        return f"the task {task} on {data}" if task else f"from {data}"
    positive = run.get("task", "positive_class")
    learns = LEARNS[task].replace("one class", "one class" if positive is None else f"class {positive}")
    return f"to {learns} {data}"


def _among(run: Run) -> str:
    population = run.config.get("population")
    population = population if isinstance(population, dict) else {}
    clients, partition = population.get("clients"), population.get("partition")
    dealt = f" ({partition['kind']})" if isinstance(partition, dict) and "kind" in partition else ""
    if run.summary.get("dealt") is False:
        dealt = ", as the data say"
    return f", held by {clients:,} clients{dealt}" if isinstance(clients, int) else ""


def _each(value: float) -> str:
    """Write a mean in three digits, or as a whole number: 12.5, 1,000."""
    return f"{value:.3g}" if value < 100 else whole(value)


def _heard(run: Run) -> Iterator[str]:
    asked, heard = run.total("invited"), run.total("completed")
    if not asked or heard is None:
        return
    ever = ""
    if counts := completed_counts(run):
        ever = f"; {len(counts[0]):,} of {counts[1]:,} clients completed at least one round"
    rounds = run.rounds_done
    often = f" in {count(rounds, 'round')}, {_each(asked / rounds)} a round" if rounds else ""
    yield f"Of {whole(asked)} invitations{often}, {share(heard / asked)} were answered in time ({whole(heard)}){ever}."


def _skipped(run: Run) -> Iterator[str]:
    yield from filter(None, [traps.skipped_rounds({run.label: [run]})])


def _heard_together(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the share of several runs' invitations that were answered, and the law of who is online; nothing if laws differ."""
    asked, heard = ([n for run in runs if (n := run.total(name)) is not None] for name in ("invited", "completed"))
    online = {json.dumps(run.config.get("availability"), sort_keys=True, default=str) for run in runs}
    kind = runs[0].get("availability", "kind")
    if min(len(asked), len(heard)) < len(runs) or not sum(asked) or len(online) > 1 or kind in (None, "always"):
        return
    options = runs[0].config["availability"]
    told = ", ".join(f"{k} {plain_value(v)}" for k, v in options.items() if isinstance(v, int | float))
    law = f"{kind} ({told})" if told else kind
    yield f"Of {whole(sum(asked))} invitations {share(sum(heard) / sum(asked))} were answered in time; who is online: {law}."


def _metrics(run: Run) -> Iterator[str]:
    if tested_on := run.section("examples").get("tested_on"):
        yield f"Models were tested on {tested_on}."
    if said := traps.constant(run):
        yield f"{said[0].upper()}{said[1:]}."
    for metric in headline([run])[:1]:
        rounds, values = run.curve(f"eval/{metric}", "rounds_completed")
        final = run.final(metric)
        if final is None:
            continue
        worst = _of_worst_domain(run, metric)
        last = number(final) if worst is None else f"{number(final)} (in the worst domain {number(worst)})"
        if len(values) < 2:
            yield f"The final model's {metric} is {last}."
            continue
        best = int(np.argmin(values) if less_is_better(metric) else np.argmax(values))
        first = "before the first round" if rounds[0] == 0 else f"after round {rounds[0]:.0f}"
        at = "of the initial model" if rounds[best] == 0 else f"after round {rounds[best]:.0f}"
        yield f"{metric} went from {number(values[0])} {first} to {last}; the best was {number(values[best])}, {at}."


def _end(run: Run) -> Iterator[str]:
    status, asked, done = run.summary.get("status"), run.config.get("rounds"), run.rounds_done
    of = f"{done:,} of {asked:,} rounds" if isinstance(asked, int) else count(done, "round")
    stopped = run.section("stopped")
    if status == "finished":
        yield "It ran to its last round."
    elif status == "stopped":
        yield f"It stopped after {of}" + (f": {stopped['why']}." if stopped.get("why") else ".")
    elif status == "failed":
        first = str(run.summary.get("error") or "").partition("\n")[0]
        yield f"It failed after {of}" + (f": {first}" if first else ".")
    elif status == "interrupted":
        yield f"It was interrupted after {of}."
    else:
        yield f"How it ended is not on record; {of} are."


def _cost(run: Run) -> Iterator[str]:
    time, up, down = (run.total(name) for name in ("virtual_s", "bytes_up", "bytes_down"))
    parts = [f"{duration(time)} of virtual time"] if time else []
    parts += [f"{quantity(up, 'B')} sent by clients"] if up else []
    parts += [f"{quantity(down, 'B')} sent to them"] if down else []
    if parts:
        yield f"On the simulated fleet that took {joined(parts)}."


def _beset(run: Run) -> Iterator[str]:
    for key, whom in (("privacy", "a client"), ("example_privacy", "an example")):
        told = run.section(key)
        if isinstance(told.get("epsilon"), int | float) and isinstance(told.get("delta"), int | float):
            spent = f"ε = {number(told['epsilon'])} at δ = {told['delta']:g}"
            yield f"It spent {spent} of the privacy of {whom} ({told.get('accounting')})."
    if run.config.get("secure_aggregation"):
        yield "The server saw sums of clients' updates alone (secure aggregation)."
    if said := _attack(run):
        yield f"It was attacked: {said}."


def _attack(run: Run) -> str | None:
    told = run.config.get("attack")
    if not isinstance(told, dict) or told.get("kind") in (None, "none"):
        return None
    part, clients = told.get("share"), told.get("clients")
    who = f" by {share(part)} of the clients" if isinstance(part, int | float) else ""
    who = f" by {count(len(clients), 'client')}" if isinstance(clients, list) else who
    return f"{told['kind']}{who}"


def _same(runs: Sequence[Run]) -> str:
    """What all runs learn, where that is the same."""
    result = {f"{_goal(run)}{_among(run)}" for run in runs if run.get("population", "dataset")}
    return f"All learn {result.pop()}." if len(result) == 1 else ""


def _verdict(groups: Mapping[str, Sequence[Run]], metric: str) -> Iterator[str]:
    """Say which labels are ahead, or that they cannot be ranked, where labels share seeds."""
    seeds = sorted({run.seed for runs in groups.values() for run in runs if isinstance(run.seed, int)})
    finals = {label: {run.seed: run.final(metric) for run in runs} for label, runs in groups.items()}
    values = np.array([[_known(of.get(seed)) for of in finals.values()] for seed in seeds])
    if len(groups) > 1 and len(seeds) > 1 and np.isfinite(values).all(axis=1).sum() > 1:
        order = in_order(values, least_is_best=less_is_better(metric))
        yield verdicts.ranking(list(groups), order, f"final {metric}")


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _ranking(groups: Mapping[str, Sequence[Run]], metric: str) -> str:
    """The labels by their mean final metric; runs of one label are those of one code and one configuration."""
    means: dict[str, tuple[float, str]] = {}
    for label, group in groups.items():
        values = [value for run in group if (value := run.final(metric)) is not None and math.isfinite(value)]
        if values:
            means[label] = float(np.mean(values)), mean_sd(values)
    order = sorted(means, key=lambda label: means[label][0], reverse=not less_is_better(metric))
    if not order:
        return f"Nothing was measured of {metric} at the end."
    named = [f"“{label}” {means[label][1]}" for label in order[:6]]
    more = f", and {len(order) - 6} more" if len(order) > 6 else ""
    how = " (mean ± sample standard deviation over seeds)" if any(len(group) > 1 for group in groups.values()) else ""
    best = "lowest" if less_is_better(metric) else "highest"
    return f"Final {metric}, the {best} first: {', '.join(named)}{more}{how}."
