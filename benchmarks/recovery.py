"""The cost of dropout, and the methods that recover it: ``python -m benchmarks.recovery digits --out runs/recovery_digits``.

Each method of ``configs/dropout/NAME.yaml`` meets each of its models of availability. Where learning rates are searched, a run
with a seed of its own is made of each, and the best by the loss on all clients' training examples is taken, in two ways: "there",
for each availability; "before", where everybody is online, and then kept. Where it lies at the edge, the grid is longer by one.
Then come the runs with the configuration's seeds. What they came to is written as Parquet, a row a run, and printed as tables.

``target_rounds``, ``target_bytes`` and ``target_s`` say when a run first had 95 % of what the first method ends with where
everybody is online; NaN if it never did.

``bias`` is the projection of z - z* on z_q - z*, the solution weighted by who was heard: 1 where all of the predicted error is
there, 0 where none is. ``recovery`` is the share of what dropout costs the first method that another gets back.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from safetensors.numpy import load_file

import fedfleet
from benchmarks import command
from benchmarks.command import say
from fedfleet.commands import study
from fedfleet.config import shipped
from fedfleet.config.schema import Config, with_overrides
from fedfleet.experiments.progress import Progress
from fedfleet.files import parquet
from fedfleet.report import study_tables, tables
from fedfleet.report.significance import LEVEL, contrast, difference, holm, ranked, recovery

SEARCH_SEED = 1000
TOLD = 0.05  # predicted distance from which a bias is told: below, it is noise over noise
LAST = 3  # evaluations whose mean is a run's result
PROTOCOLS = ("there", "before")
MARKERS = "os^DvPX<*"
BESIDES = ("#7B3294", "#8C510A")
"""Colours of methods beyond the palette of reports."""
WORDS = {"worst_class_score": "accuracy of the worst class", "distance": "relative distance to the solution"}
"""Measures, as figures call them."""
ENOUGH = 0.95  # share of the first method's result without dropout that is a target
TO_TARGET = {"target_rounds": ("rounds", 1.0), "target_bytes": ("MB", 1e6), "target_s": ("virtual hours", 3600.0)}
"""Columns of what was spent by the target, with their units in tables and how large these are."""
HEARD = ("heard_mean", "heard_least", "gini", "never_completed", "predicted_distance")
"""Columns of how often clients were heard: mean and least number of rounds, how unequal they are, share of those never heard, and
the relative distance from the solution of all to that of clients that count as often as they were heard."""


class Search(NamedTuple):
    """A task: the value that is searched for, and its measures.

    Attributes:
        key: of the configuration, or None.
        values: of it.
        beyond: the next value for each at the edge, tried where that is the best.
        by: the metric by which one is chosen: the largest of it, or the least of what is in ``falling``.
        measures: reported; of those in ``falling`` less is better. ``drawn`` is that of the figure.
        target: the measure of which a share is a target, or None.
        names: by ``title``, what tables and figures call an availability, as docs/guides/dropout.md does.

    """

    key: str | None
    values: Sequence[float]
    beyond: Mapping[float, float]
    by: str
    measures: Sequence[str]
    falling: Sequence[str]
    drawn: str
    target: str | None
    names: Mapping[str, str]


DIGITS = {
    "bernoulli": "half",
    "ByLabel": "by class",
    "independent fedau": "rare",
    "independent fedawe": "uneven",
    "sine fedawe": "sine",
    "sine fedawe interleaved": "interleaved",
    "markov_rounds fedau": "sticky",
    "outages constant": "outages",
}
GAME = {"bernoulli": "each 0.6", "ByLabel": "by label"}
REFUSED = {(f"known p ({form})", "sine fedawe interleaved") for form in ("HT", "Hajek")}
"""Methods and availabilities that do not go together: where a client is never online, its chance is 0."""
OF_CLASSES = ("accuracy", "worst_class_score")
FASHION = Search(
    "algorithm.lr",
    (0.03, 0.1),
    {0.03: 0.01, 0.1: 0.3},
    "train_loss",
    ("train_loss", "accuracy", "clients_accuracy_worst_tenth", "worst_class_score"),
    ("train_loss",),
    "worst_class_score",
    "accuracy",
    DIGITS,
)
TASKS = {
    "digits": Search(
        "algorithm.lr",
        (0.1, 0.3, 1.0),
        {0.1: 0.03, 1.0: 3.0},
        "train_loss",
        OF_CLASSES,
        ("train_loss",),
        "worst_class_score",
        "accuracy",
        DIGITS,
    ),
    "fashion": FASHION,
    "fashion_cohorts": FASHION,
    "lenet": FASHION,
    "auc_fashion": Search(
        "algorithm.lr",
        (0.1, 0.316),
        {0.1: 0.0316, 0.316: 1.0},
        "train_auc",
        ("auc",),
        (),
        "auc",
        None,
        {"label_correlated 0.5": "half, by class", "label_correlated 0.1": "a tenth, by class"},
    ),
    "auc_digits": Search(None, (), {}, "", ("distance", "auc"), ("distance",), "distance", None, DIGITS),
    "game": Search(None, (), {}, "", ("distance",), ("distance",), "distance", None, GAME),
}


class Run(NamedTuple):
    """One to be made: a method, an availability by its number, and the value of what is searched for."""

    method: str
    online: int
    value: float | None

    @property
    def label(self) -> str:
        """Its name."""
        return " ".join(map(str, self))


def title(section: Mapping[str, Any]) -> str:
    """Return what an availability is called in tables."""
    rates, cut = section.get("rates") or {}, "interleaved" if section.get("below") else ""
    share = f"{section['rate']:g}" if section["kind"] == "label_correlated" else ""
    return " ".join(filter(None, [str(section["kind"]).rpartition(":")[2], rates.get("kind", ""), share, cut]))


def named(method: str) -> str:
    """Return what a method is called in tables and figures."""
    return method.replace("Hajek", "Hájek")


def planned(config: Config, runs: Sequence[Run], seeds: Sequence[int], key: str | None) -> Config:
    """Return a configuration with a label for each run."""
    online = config.vary["availability"] if config.vary else []
    compare = {}
    for run in runs:
        own = dict((config.compare or {})[run.method])
        chosen = {} if run.value is None or key is None else {key: run.value}
        compare[run.label] = {**own, **chosen, "availability": online[run.online]}
    return with_overrides(config, {"compare": compare, "vary": None, "seeds": list(seeds)})


def made(config: Config, runs: Sequence[Run], seeds: Sequence[int], key: str | None, out: Path, jobs: int) -> Any:
    """Make the runs that are not there yet, and return a row a run: as ``runs``, the seed and the folder."""
    plan = study.plan(planned(config, runs, seeds, key), grid=False)
    progress = Progress()
    ready = study.prepare(plan, progress)
    study.check(study.run_trials(ready, out, progress, jobs), plan)
    of = {run.label: run._asdict() for run in runs}
    rows = [{**of[t.label], "seed": t.config.seed, "folder": study.folder(out, t)} for t in plan.trials]
    return pd.DataFrame(rows)


def result(run: tables.Run, measure: str) -> float:
    """Return the mean of a run's last evaluations."""
    values = run.rounds[f"eval/{measure}"]
    return float(np.mean(values[np.isfinite(values)][-LAST:]))


def measured(
    folder: Path, task: Any, measures: Sequence[str], target: study_tables.Target | None = None
) -> dict[str, float]:
    """Return what a run came to: means of its last evaluations, its bias, how unequally clients were heard, what was sent."""
    run = tables.read(folder)
    found = {name: result(run, name) for name in measures}
    if target is not None:
        rounds, _, up, down, seconds = study_tables.reached(study_tables.evaluations(run), target)
        found |= dict(zip(TO_TARGET, (rounds, up + down, seconds), strict=True))
    clients = run.get("population", "clients")
    rows = tables.answered(run)
    first = run.outcomes["phase"] == run.outcomes["phase"][0] if "phase" in run.outcomes else np.ones(len(rows), bool)
    columns = {name: np.asarray(run.outcomes[name]).astype(np.int64) for name in ("round", "client")}
    by_round = pd.DataFrame(columns)[np.asarray(rows & first, dtype=bool)]
    share = 1 / np.asarray(by_round.groupby("round")["client"].transform("size"), dtype=np.float64)
    heard = np.bincount(by_round["client"], minlength=clients)
    weight = np.bincount(by_round["client"], share, minlength=clients)
    found["heard_mean"], found["heard_least"] = float(heard.mean()), float(heard.min())
    found["gini"] = tables.gini(heard[heard > 0], clients)
    found["never_completed"] = float((heard == 0).mean())
    found["bytes"] = (run.total("bytes_up") or 0.0) + (run.total("bytes_down") or 0.0)
    if task is None:
        return found | dict.fromkeys(("final_distance", "predicted_distance", "bias"), np.nan)
    wrong = task.solve(weight / weight.sum()) - task.saddle
    point = sorted(load_file(folder / "model.safetensors").items())  # in the order of ``solve``
    off = np.concatenate([leaf.astype(np.float64).ravel() for _, leaf in point]) - task.saddle
    found["final_distance"] = float(np.linalg.norm(off) / np.linalg.norm(task.saddle))
    found["predicted_distance"] = float(np.linalg.norm(wrong) / np.linalg.norm(task.saddle))
    found["bias"] = float(off @ wrong / (wrong @ wrong)) if found["predicted_distance"] > TOLD else np.nan
    return found


def problem(config: Config) -> Any:
    """Return the configured problem, which knows its solution; None for a task whose solution is not known."""
    name = str(config.model_dump(mode="json")["task"]["name"])
    if ":" not in name:
        return None
    spec: Any = importlib.util.spec_from_file_location("recovery_problems", shipped.FOLDER / "dropout" / "problems.py")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses want
    spec.loader.exec_module(module)
    return getattr(module, name.rpartition(":")[2])()


def best(found: Any, search: Search) -> dict[tuple[str, int], float]:
    """Return by method and availability the value that was best."""
    at = {}
    for (method, online), rows in found.groupby(["method", "online"], sort=False):
        last = np.array([tables.read(folder).rounds[f"eval/{search.by}"][-1] for folder in rows["folder"]])
        loss = last if search.by in search.falling else -last
        at[method, online] = float(rows["value"].iloc[int(np.argmin(np.where(np.isfinite(loss), loss, np.inf)))])
    return at


def protocols_of(search: Search) -> Sequence[str]:
    """Return the ways in which values are chosen: one alone where none is searched for."""
    return PROTOCOLS if search.key is not None else PROTOCOLS[:1]


def results(name: str, out: Path, jobs: int) -> Any:
    """Make all runs of a task, and return a row a run and protocol."""
    config = fedfleet.load(shipped.FOLDER / "dropout" / f"{name}.yaml")
    search, methods, online = TASKS[name], list(config.compare or {}), list((config.vary or {})["availability"])
    pairs = itertools.product(methods, range(len(online)))
    cells = [(method, i) for method, i in pairs if (method, title(online[i])) not in REFUSED]
    chosen: Mapping[tuple[str, int], float | None] = dict.fromkeys(cells)
    if search.key is not None:
        grid = [Run(*cell, value) for cell in cells for value in search.values]
        found = made(config, grid, [SEARCH_SEED], search.key, out / "search", jobs)
        further = [
            Run(*cell, search.beyond[value]) for cell, value in best(found, search).items() if value in search.beyond
        ]
        if further:
            more = made(config, further, [SEARCH_SEED], search.key, out / "further", jobs)
            found = pd.concat([found, more], ignore_index=True)
        chosen = best(found, search)
    of = {
        "there": {cell: chosen[cell] for cell in cells},
        "before": {(method, i): chosen[method, 0] for method, i in cells},
    }
    protocols = protocols_of(search)
    wanted = list(dict.fromkeys(Run(*cell, of[p][cell]) for p in protocols for cell in cells))
    rows = made(config, wanted, config.seeds or [config.seed], search.key, out / "runs", jobs)
    task, target = problem(config), None
    if search.target is not None:
        best_case = rows[(rows["method"] == methods[0]) & (rows["online"] == 0)]
        reached = [result(tables.read(folder), search.target) for folder in best_case["folder"]]
        target = study_tables.Target(f"eval/{search.target}", True, ENOUGH * float(np.mean(reached)))
    say(f"reading {len(rows)} runs; target: {target}")
    told = pd.DataFrame([measured(folder, task, search.measures, target) for folder in rows["folder"]])
    known: Any = pd.concat([rows.drop(columns="folder"), told], axis=1)
    found = []
    for protocol in protocols:
        for method, i in cells:
            value = of[protocol][method, i]
            same: Any = known[(known["method"] == method) & (known["online"] == i)]
            same = same if value is None else same[same["value"] == value]
            about = {"task": name, "protocol": protocol, "availability": title(online[i])}
            found.append(same.drop(columns="online").assign(**about))
    return pd.concat(found, ignore_index=True)


def show(found: Any, search: Search) -> None:
    """Print a table a protocol and measure, with recovery and what can be told apart; then the bias, and the ranks."""
    methods, online = list(dict.fromkeys(found["method"])), list(dict.fromkeys(found["availability"]))
    shown = [search.names.get(where, where) for where in online]
    for protocol, measure in itertools.product(protocols_of(search), (*search.measures, "bias")):
        of = found[found["protocol"] == protocol]
        none = np.full(of["seed"].nunique(), np.nan)
        at = dict.fromkeys(itertools.product(methods, online), none)
        at |= {
            key: rows.sort_values("seed")[measure].to_numpy() for key, rows in of.groupby(["method", "availability"])
        }
        sign = -1.0 if measure in search.falling else 1.0
        clear = {}  # by availability, of each method but the first
        for where in online[1:]:
            p = holm([difference(contrast([at[m, where]], [at[methods[0], where]])).p for m in methods[1:]])
            clear[where] = {m: each < LEVEL for m, each in zip(methods[1:], p, strict=True)}
        lines = []
        for method in methods:
            line = [named(method)]
            for where in online:
                text = _text(at[method, where])
                if measure != "bias" and where != online[0] and method != methods[0] and text != "-":
                    cells = [sign * at[key] for key in ((method, where), (methods[0], where), (methods[0], online[0]))]
                    text += f" R {recovery(*cells).part:.2f}{'*' if clear[where][method] else ''}"
                line.append(text)
            lines.append(line)
        command.show(f"{measure}, tuned {protocol}: mean (sd)", ["method", *shown], lines)
        if measure != "bias" and len(online) > 2:
            means = np.array([[at[method, where].mean() for method in methods] for where in online[1:]])
            ranks = ranked(means, least_is_best=measure in search.falling)
            order = ", ".join(f"{named(methods[i])} {ranks.mean[i]:.1f}" for i in ranks.order)
            print(f"mean ranks over {ranks.conditions} availabilities: {order}")
            print(f"Friedman p {ranks.p:.2g}, Nemenyi {ranks.distance:.2f}\n")
    _show_heard(found, online, shown)
    for protocol, (column, unit) in itertools.product(protocols_of(search), TO_TARGET.items()):
        if column in found:
            _show_target(found[found["protocol"] == protocol], column, unit, f"tuned {protocol}", online, shown)


def show_beside(found: Any, search: Search, other: str) -> None:
    """Print by how much each method is ahead of another: the mean of the differences paired by seed, and half of its interval."""
    online = list(dict.fromkeys(found["availability"]))
    shown = [search.names.get(where, where) for where in online]
    for protocol, measure in itertools.product(protocols_of(search), search.measures):
        at = found[found["protocol"] == protocol].pivot_table(
            index=["availability", "seed"], columns="method", values=measure, sort=False
        )
        ahead = (at.sub(at[other], axis=0)) * (-1.0 if measure in search.falling else 1.0)
        lines = []
        for method in at.columns.drop(other):
            each = [difference(ahead.loc[where, method].to_numpy()) for where in online]
            lines.append([named(method), *("-" if not d.pairs else f"{d.mean:+.3f} ± {d.half:.3f}" for d in each)])
        command.show(f"{measure}, tuned {protocol}: ahead of {named(other)}", ["method", *shown], lines)


def _show_heard(found: Any, online: Sequence[str], shown: Sequence[str]) -> None:
    """Print how often clients were heard, and the distance that this predicts, which are the same for all methods."""
    of = found[(found["protocol"] == PROTOCOLS[0]) & (found["method"] == found["method"].iloc[0])]
    known = [column for column in HEARD if column in of]
    lines = [[c, *(_text(of[of["availability"] == where][c].to_numpy()) for where in online)] for c in known]
    command.show("how often clients were heard: mean (sd)", ["", *shown], lines)


def _show_target(
    of: Any, column: str, unit: tuple[str, float], how: str, online: Sequence[str], shown: Sequence[str]
) -> None:
    """Print what was spent by the target: the mean over the runs that got there, and how many these are where not all did."""
    lines = []
    for method in dict.fromkeys(of["method"]):
        line = [named(method)]
        for where in online:
            spent = of[(of["method"] == method) & (of["availability"] == where)][column].to_numpy() / unit[1]
            there = spent[np.isfinite(spent)]
            some = "" if len(there) == len(spent) else f" ({len(there)} of {len(spent)})"
            line.append(f"{there.mean():.3g}{some}" if len(there) else "-")
        lines.append(line)
    command.show(f"{unit[0]} to the target, {how}", ["method", *shown], lines)


def draw(found: Any, search: Search, path: Path) -> None:
    """Draw a measure by availability, and each run's bias beside its distance to the solution."""
    import matplotlib
    from matplotlib.figure import Figure

    from fedfleet.report.canvas import DASHES, DPI, PALETTE, STYLE

    measure = search.drawn
    of = found[found["protocol"] == PROTOCOLS[0]]
    methods, online = list(dict.fromkeys(of["method"])), list(dict.fromkeys(of["availability"]))
    colors = (*PALETTE, *BESIDES)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[2, 1])
        for i, method in enumerate(methods):
            mine = of[of["method"] == method]
            style: Any = {"color": colors[i % len(colors)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
            each = [difference(mine[mine["availability"] == where][measure].to_numpy()) for where in online]
            x = np.arange(len(online)) + (i - (len(methods) - 1) / 2) * 0.75 / len(methods)
            drawn = left.errorbar(
                x, [d.mean for d in each], [d.half for d in each], ls="", label=named(method), **style
            )
            drawn.lines[2][0].set_linestyle(DASHES[i % len(DASHES)])
            right.plot(mine["bias"], mine["final_distance"], linestyle="", alpha=0.7, **style)
        left.set_xticks(range(len(online)), [search.names.get(where, where) for where in online])
        left.set_title(f"{WORDS.get(measure, measure)}: mean, 95 % interval")
        right.set_title("each run")
        right.set_ylabel("relative distance to the solution")
        right.set_xlabel("bias: 0 is the solution, 1 that of those heard")
        for axes in (right, *([left] if measure in search.falling else [])):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            low, high = axes.get_ylim()
            axes.yaxis.set_minor_formatter("{x:g}" if high < 20 * low else "")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI // 2)


def _text(values: np.ndarray) -> str:
    if np.isnan(values).any():  # of some runs it is not known
        return "-"
    return f"{values.mean():.3f} ({values.std(ddof=1) if len(values) > 1 else 0:.3f})"


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.recovery", __doc__)
    ask.add_argument("task", choices=TASKS)
    ask.add_argument(
        "--out",
        type=Path,
        default=Path("runs/recovery"),
        help="of the runs (default %(default)s)",
    )
    ask.add_argument("--jobs", type=command.count, default=2, help="runs at a time (default 2)")
    ask.add_argument("--parquet", type=Path, help="write a row a run")
    ask.add_argument("--show", type=Path, help="print the tables of such a file, and run nothing")
    ask.add_argument("--beside", metavar="METHOD", help="print how far each is ahead of this one, with 95 %% intervals")
    ask.add_argument("--figure", type=Path, help="draw it, as PNG or SVG")
    args = ask.parse_args(argv)
    found = pd.read_parquet(args.show) if args.show else results(args.task, args.out, args.jobs)
    if args.parquet:
        args.parquet.parent.mkdir(parents=True, exist_ok=True)
        parquet.write(found, args.parquet)
    if args.beside is not None and args.beside not in set(found["method"]):
        ask.error(f"--beside {args.beside}: there are {', '.join(dict.fromkeys(found['method']))}")
    show(found, TASKS[args.task])
    if args.beside is not None:
        show_beside(found, TASKS[args.task], args.beside)
    if args.figure:
        draw(found, TASKS[args.task], args.figure)


if __name__ == "__main__":
    main()
