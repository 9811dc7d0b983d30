"""The figures of a report. Runs come in groups by label; a label has one colour everywhere, its seeds make a band.

What no table holds is left out: each function returns None where there is nothing to draw.
"""

from __future__ import annotations

import dataclasses
import math
import re

import matplotlib
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedfleet.report import canvas, charts, decision_boundary, domain_figures, participation_groups, samples
from fedfleet.report.canvas import Groups
from fedfleet.report.curves import Curve, band, smooth, window, worst_tenth
from fedfleet.report.meanings import meaning
from fedfleet.report.picture import Picture
from fedfleet.report.shown import asked_for, parted
from fedfleet.report.tables import OUTCOMES, Run, completed_counts, gini, outcome_shares
from fedfleet.report.words import joined, number, quantity, share
from fedfleet.simulator.driver.evaluation import less_is_better

FATE_COLORS: dict[str, str] = dict(zip(OUTCOMES, ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#C4C7CC"), strict=True))
CLASSES, DOMAINS, CLIENTS = "Classes", "Domains", "Clients and messages"
OF_DOMAINS = re.compile(r"^(domains-|cosines$)|_(worst_domain|spread)$|^metric-(validation_)?(source|target|gap)_")
OF_CLIENTS = re.compile(r"^(clients-|participation$|outcomes$|communication$)")
NO_METRICS = {"round", "client", "name", "copy", "domain", "seed", "num_examples"}  # columns of clients.parquet


def draw(groups: Groups) -> list[Picture]:
    """Every figure the runs have data for, in the order of the page, with file names that are safe and distinct."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc (usetex!) must not change the report
        matplotlib.rcParams.update(canvas.STYLE)
        runs = [run for group in groups.values() for run in group]
        metrics = list(dict.fromkeys(m for run in runs for m in run.metrics))
        shown, _ = parted(metrics, asked_for(runs))
        drawn = [_metric(groups, metric, folded=metric not in shown) for metric in metrics]
        drawn += [
            samples.draw(groups),
            decision_boundary.draw(groups),
            _train_loss(groups),
            _participation(groups),
            _outcomes(groups),
            _communication(groups),
        ]
        for column in dict.fromkeys(c for run in runs for c in client_metrics(run)):
            drawn += [_clients(groups, column), participation_groups.draw(groups, column)]
        drawn += domain_figures.draw(groups)
    placed = [_placed(picture) for picture in drawn if picture]
    order = ("Learning", CLASSES, DOMAINS, CLIENTS)
    return list(canvas.distinct(sorted(placed, key=lambda picture: order.index(picture.section))))


def _placed(picture: Picture) -> Picture:
    """Put what is about classes, domains and clients below headings of their own."""
    name = picture.name
    section = DOMAINS if OF_DOMAINS.search(name) else CLIENTS if OF_CLIENTS.search(name) else None
    section = CLASSES if name.startswith("classes-") else section
    return picture if section is None else dataclasses.replace(picture, section=section)


def _metric(groups: Groups, metric: str, *, folded: bool) -> Picture | None:
    column = f"eval/{metric}"
    shown = [x for x in canvas.still(groups) if canvas.drawable(groups, column, x)]
    if not shown:
        return None
    figure, panels = canvas.panels(len(shown), width=4.1, height=3.3, share_y=True)
    for panel, x in zip(panels, shown, strict=True):
        canvas.lines(panel, groups, column, x)
    panels[0].set_ylabel(canvas.plain(metric))
    canvas.legend(figure, groups)
    against = joined([canvas.X_LABELS[x] for x in shown])
    more = [label for x, label in canvas.X_LABELS.items() if x not in shown and canvas.drawable(groups, column, x)]
    also = f"; in the page's chart also against {joined(more)}" if more else ""
    meant = meaning(groups, metric)
    caption = f"{metric} at each evaluation, against {against}{also}. {meant}{canvas.band_note(groups)}"
    drawn = canvas.picture(figure, f"metric-{metric}", metric, caption, charts.chart(groups, column, metric))
    return dataclasses.replace(drawn, folded=folded)


def _train_loss(groups: Groups) -> Picture | None:
    if not canvas.drawable(groups, "train_loss", "rounds_completed"):
        return None
    figure, (axes,) = canvas.panels(1, width=7.2, height=3.4)
    width = canvas.lines(axes, groups, "train_loss", "rounds_completed", smoothed=True)
    low, high = axes.dataLim.intervaly
    if low > 0 and high / low > 50:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("training loss" + (", log scale" if axes.get_yscale() == "log" else ""))
    canvas.legend(figure, groups)
    pale = "" if all(len(runs) > 1 for runs in groups.values()) else " (pale: as recorded)"
    smoothed = f"Smoothed: centred means over {width} rounds{pale}. " if width > 1 else ""
    meant = meaning(groups, "train_loss")
    caption = f"Training loss on the clients that took part, by round. {meant}{smoothed}{canvas.band_note(groups)}"
    log = axes.get_yscale() == "log"
    chart = charts.chart(groups, "train_loss", "training loss", smoothed=True, log=log)
    return canvas.picture(figure, "train-loss", "Training loss", caption, chart)


def _participation(groups: Groups) -> Picture | None:
    counts = {label: [result for run in runs if (result := completed_counts(run))] for label, runs in groups.items()}
    counts = {label: result for label, result in counts.items() if result}
    if not counts:
        return None
    top = max(int(heard.max(initial=0)) for result in counts.values() for heard, _ in result)
    width = math.ceil((top + 1) / 60)
    edges = np.arange(0, top + 1 + width, width) - 0.5
    figure, (axes,) = canvas.panels(1, width=7.2, height=3.4)
    ginis: dict[str, float] = {}
    never: list[float] = []
    steep = False
    for label, result in counts.items():
        bars = np.mean([np.histogram(heard, edges)[0] for heard, _ in result], axis=0)
        bars[0] += np.mean(
            [size - len(heard) for heard, size in result]
        )  # those that never completed one are in no table
        never += [1 - len(heard) / size for heard, size in result]
        ginis[label] = float(np.mean([gini(heard, size) for heard, size in result]))
        canvas.steps(axes, bars, edges, canvas.look(groups, label)[0], filled=len(counts) == 1)
        steep |= bars.max() > 50 * np.median(bars[bars > 0])
    if steep:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))
    known = [value for value in ginis.values() if math.isfinite(value)]
    spread = " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(known), max(known)))) if known else "undefined"
    axes.set_title(f"Rounds a client completed: Gini coefficient {spread}")
    axes.set_xlabel("rounds that the client completed" + (f" (bins of {width})" if width > 1 else ""))
    axes.set_ylabel("clients" + (", log scale" if steep else ""))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    canvas.legend(figure, groups, {label: f"Gini {value:.2f}" for label, value in ginis.items()})
    seeds = " Counts are means over seeds." if any(len(result) > 1 for result in counts.values()) else ""
    caption = (
        "How evenly the fleet took part: how many clients completed how many rounds; "
        f"{share(float(np.mean(never)))} of the clients never completed one. A Gini coefficient (here {spread}) of 0 "
        f"means that all completed equally many, near 1 that few did all the work.{seeds}"
    )
    return canvas.picture(figure, "participation", "Participation", caption)


def _outcomes(groups: Groups) -> Picture | None:
    shares = {label: result for label, runs in groups.items() if (result := outcome_shares(runs)) is not None}
    if not shares:
        return None
    one = len(shares) == 1
    figure, panels = canvas.panels(len(shares), width=7.2 if one else 4.1, height=3.2 if one else 2.6, share_y=True)
    width = max(window(len(rounds)) for rounds, _ in shares.values())
    averages = np.mean([table.mean(axis=0) for _, table in shares.values()], axis=0)
    means: dict[str, float] = dict(zip(OUTCOMES, averages.tolist(), strict=True))
    seen = [outcome for outcome in OUTCOMES if means[outcome] > 0]
    colors = [FATE_COLORS[outcome] for outcome in seen]
    for panel, (label, (rounds, table)) in zip(panels, shares.items(), strict=True):
        x = np.append(rounds, rounds[-1] + 1)  # a share holds for its whole round, from t to t + 1
        y = [smooth(table[:, OUTCOMES.index(outcome)], width) for outcome in seen]
        y = [np.append(values, values[-1]) for values in y]
        panel.stackplot(x, y, colors=colors, alpha=0.9, linewidth=0, step="post" if width == 1 else None)
        panel.set(xlim=(x[0], x[-1]), ylim=(0, 1), xlabel="rounds")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panel.grid(visible=False)
        if len(groups) > 1:
            panel.set_title(canvas.plain(label))
    panels[0].set_ylabel("share of invitations")
    squares = [Line2D([], [], marker="s", linestyle="", markersize=7, color=color, alpha=0.9) for color in colors]
    figure.legend(squares, seen, loc="outside lower center", ncols=len(seen))
    totals = joined([f"{share(means[outcome])} {outcome}" for outcome in seen])
    smoothed = f" Areas are centred means over {width} rounds." if width > 1 else ""
    caption = f"What became of the invited clients, by round; in the mean of rounds {totals}.{smoothed}"
    return canvas.picture(figure, "outcomes", "Outcomes of invited clients", caption)


def _communication(groups: Groups) -> Picture | None:
    ways = {"total/floats_up": "Up: received by the server", "total/floats_down": "Down: sent by the server"}
    shown = [way for way in ways if canvas.drawable(groups, way, "rounds_completed")]
    if not shown:
        return None
    figure, panels = canvas.panels(len(shown), width=7.2 if len(shown) == 1 else 4.1, height=3.2, share_y=True)
    for panel, way in zip(panels, shown, strict=True):
        canvas.lines(panel, groups, way, "rounds_completed")
        panel.set_title(ways[way])
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))
    panels[0].set_ylabel("floats, cumulative")
    panels[0].set_ylim(bottom=0)  # last, for it stops the shared axis from growing
    canvas.legend(figure, groups)
    caption = f"Floats exchanged between clients and server, summed over the rounds so far. {canvas.band_note(groups)}"
    return canvas.picture(figure, "communication", "Communication", caption)


def _clients(groups: Groups, column: str) -> Picture | None:
    high_is_bad = less_is_better(column)
    last: dict[str, np.ndarray] = {}
    trends: dict[str, list[tuple[Curve, Curve]]] = {}
    for label, runs in groups.items():
        tables = [table for run in runs if len((table := _finite(run, column))[0])]
        if tables:
            last[label] = np.concatenate([values[rounds == rounds.max()] for rounds, values in tables])
            trends[label] = [_trends(*table, high_is_bad) for table in tables]
    if not last:
        return None
    several = any(len(mean[0]) > 1 for result in trends.values() for mean, _ in result)
    figure, panels = canvas.panels(1 + several, width=7.2 - 2 * several, height=3.4)
    edges = np.histogram_bin_edges(np.concatenate(list(last.values())), bins=30)
    worst = {label: worst_tenth(values, high_is_bad) for label, values in last.items()}
    for label, values in last.items():
        color = canvas.look(groups, label)[0]
        bars = np.histogram(values, edges)[0] / len(values)
        canvas.steps(panels[0], bars, edges, color, filled=len(last) == 1)
        panels[0].axvline(worst[label], color=color, linestyle=(0, (4, 3)), linewidth=1.1)
        for curves, dash in zip(zip(*trends[label], strict=True), ("-", "--"), strict=True) if several else ():
            if middle := band(curves):
                panels[1].plot(middle[0], middle[1], color=color, linestyle=dash, linewidth=1.5)
    panels[0].set(xlabel=canvas.plain(column), title="Last evaluated round")
    panels[0].set_ylabel("share of clients")
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    if several:
        panels[1].set(xlabel="rounds", ylabel=canvas.plain(column), title="Mean (solid) and worst 10 % (dashed)")
    canvas.legend(figure, groups, {label: f"worst 10 %: {value:.3g}" for label, value in worst.items()})
    told = [
        f"{label + ': ' if len(groups) > 1 else ''}mean {number(values.mean())}, worst 10 % {number(worst[label])}"
        for label, values in last.items()
    ]
    pooled = " Clients of all seeds are pooled." if any(len(result) > 1 for result in trends.values()) else ""
    whose = "each client's own model" if column.startswith("own_") else "the model"
    caption = (
        f"{column} of {whose} on each client's data at the last evaluated round. Dashed: mean of the worst 10 % of "
        f"clients (the {'highest' if high_is_bad else 'lowest'} values). {'; '.join(told)}.{pooled}"
    )
    return canvas.picture(figure, f"clients-{column}", f"{column} by client", caption)


def client_metrics(run: Run) -> list[str]:
    """Return the columns of ``clients.parquet`` that are metrics, and have a number."""
    return [name for name in run.clients if name not in NO_METRICS and len(_finite(run, name)[0])]


def _finite(run: Run, column: str) -> Curve:
    """Rounds and values, each (n,), of the finite entries of a column of clients.parquet; n = 0 if it has none."""
    rounds, values = run.clients.get("round"), run.clients.get(column)
    if rounds is None or values is None or values.dtype != np.float64:
        return np.empty(0), np.empty(0)
    keep = np.isfinite(values)
    return rounds[keep], values[keep]


def _trends(rounds: np.ndarray, values: np.ndarray, high_is_bad: bool) -> tuple[Curve, Curve]:
    """Mean over clients and mean of the worst 10 %, each against the number of rounds done."""
    evaluated = np.unique(rounds)
    by_round = [values[rounds == at] for at in evaluated]
    mean = np.array([result.mean() for result in by_round])
    worst = np.array([worst_tenth(result, high_is_bad) for result in by_round])
    return (evaluated + 1, mean), (evaluated + 1, worst)
