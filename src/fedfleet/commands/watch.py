"""A live page of a run, or of several, that another process is at work on: of what it leaves in the run folder alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedfleet.config.schema import load
from fedfleet.experiments import campaign, sweep
from fedfleet.experiments.progress import time_left
from fedfleet.experiments.runfolder import EVENTS
from fedfleet.experiments.status import status_of
from fedfleet.files.documents import is_there, json_lines, json_of
from fedfleet.report.study_tables import MARK
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line

UNDER_WAY = ("starting", "running")
BARS, BLOCKS = "▁▂▃▄▅▆▇█", 30
NAME = 10  # columns that the name of a run has, at least
SHOWN, EVENTS_SHOWN = 40, 4  # runs that have a row; events
COLORS = {
    "running": "cyan",
    "finished": "green",
    "stopped": "green",
    "failed": "red",
    "killed": "red",
    "interrupted": "yellow",
}
OUTCOMES = ("completed", "stale", "late", "failed", "unavailable")


def watch(folder: Path, console: Console, every_s: float, *, once: bool) -> None:
    """Show a page until all has come to an end; ``once``: as it stands. Raises ConfigError where there is no run."""
    if not once and console.is_terminal:
        _await(folder, console, every_s)
    result, page = look(folder, {})
    if once or (not console.is_terminal and result):
        console.print(page)
    if once:
        return
    seen: dict[Path, dict[str, Any]] = {}
    with Live(page, console=console, auto_refresh=False, transient=False) as live:
        while True:
            under_way, page = look(folder, seen)
            live.update(page, refresh=True)
            if not under_way:
                return
            time.sleep(every_s)


def _await(folder: Path, console: Console, every_s: float) -> None:
    """Wait for a folder that is not there yet, since what makes it may just have been begun."""
    if not is_there(folder):
        console.print(f"waiting for {folder}, which is not there yet; Ctrl-C ends this", markup=False)
    while not is_there(folder):
        time.sleep(every_s)


def look(folder: Path, seen: dict[Path, dict[str, Any]]) -> tuple[bool, RenderableType]:
    """Return whether anything is under way, and the page; ``seen`` keeps what has ended. Raises ConfigError."""
    if _is_run(folder):
        status = status_of(folder)
        return status["state"] in UNDER_WAY, one(folder, status)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder: give that of a run, or of several")
    runs = list(_below(folder))
    wanted = _wanted(folder)
    if not runs and wanted is None:
        raise ConfigError(f"{folder}: no run there or below: give the folder of a run, or of several")
    for run in runs:
        if seen.get(run, {"state": "running"})["state"] in UNDER_WAY:
            seen[run] = status_of(run)
    under_way = any(seen[run]["state"] in UNDER_WAY for run in runs) or len(runs) < (wanted or 0)
    return under_way, several(folder, {run: seen[run] for run in runs}, wanted)


def one(folder: Path, status: Mapping[str, Any]) -> RenderableType:
    """Return the page of a run. Raises ConfigError where what it says of itself is not what a run says."""
    try:
        return _page(folder, status)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(
            f"{folder}: what it says of itself cannot be shown ({type(e).__name__}: {one_line(e)})"
        ) from None


def _page(folder: Path, status: Mapping[str, Any]) -> RenderableType:
    summary = status.get("summary") or {}
    parts: list[RenderableType] = [_title(str(folder), status)]
    if "done" in status:
        rounds = status.get("rounds") or status["done"]
        parts.append(Text(_progress(status, rounds)))
        parts.append(_metrics(status))
        curve = status["curve"]
        if len(curve) > 2:
            name = next(iter(status["metrics"])).removeprefix("eval/")
            parts.append(Text(f"{name}  {sparkline([v for _, v in curve])}  after round {curve[-1][0]:,}"))
        parts.append(Text(_outcomes(status["totals"])))
    for key, style in (("error", "red"), ("stopped", "")):
        if told := summary.get(key):
            text = told if isinstance(told, str) else f"{told['by']}: {told['why']}"
            parts.append(Text(f"{key}: {text}", style=style))
    parts += [Text(f"! {line}", style="yellow") for line in _events(folder)]
    parts += [Text(line, style="dim") for line in status.get("said", ())]
    if status["state"] == "killed":
        parts.append(Text(f"nothing is at work on it: go on with `fedfleet resume {folder}`", style="yellow"))
    return Group(*parts)


def several(folder: Path, runs: Mapping[Path, Mapping[str, Any]], wanted: int | None) -> RenderableType:
    """Return the page of several runs: those under way first."""
    counts = Counter(s["state"] for s in runs.values())
    waiting = max((wanted or 0) - len(runs), 0)
    told = [f"{n} {state}" for state, n in counts.most_common()] + ([f"{waiting} to come"] if waiting else [])
    title = Text.assemble((str(folder), "bold"), f"  {', '.join(told) or 'nothing yet'}")
    table = Table()
    for name in ("run", "state", "rounds", "metric", "last", "best", "left"):
        left = name in ("run", "state", "metric")
        table.add_column(
            name,
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=name != "run",
            min_width=NAME * (name == "run"),
        )
    order = sorted(
        runs, key=lambda run: (runs[run]["state"] not in UNDER_WAY, runs[run]["state"] in ("finished", "stopped"))
    )
    for run in order[:SHOWN]:
        s = runs[run]
        metric = next(iter(s.get("metrics") or {}), "")
        known = (s.get("metrics") or {}).get(metric, {})
        state = Text(s["state"], style=COLORS.get(s["state"], ""))
        of = f"{s['done']:,}/{s['rounds']:,}" if "rounds" in s else f"{s.get('done', 0):,}"
        numbers = (f"{known[k]:.4f}" if k in known else "" for k in ("last", "best"))
        names = map(Text, (str(run.relative_to(folder)), metric.removeprefix("eval/")))  # as they are, with [brackets]
        table.add_row(next(names), state, of, next(names), *numbers, _left(s))
    if len(runs) > SHOWN:
        table.caption = f"and {len(runs) - SHOWN:,} more"
    return Group(title, table)


def sparkline(values: Sequence[float]) -> str:
    """Draw values as bars between the least and the largest, which are told."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    return f"{low:.4g} {''.join(BARS[round((v - low) * scale)] for v in values)} {high:.4g}"


def _title(where: str, status: Mapping[str, Any]) -> Text:
    name = status.get("name") or (status.get("summary") or {}).get("label") or ""
    age = f", {time.time() - status['at']:.0f} s ago" if status["state"] == "running" else ""
    return Text.assemble((where, "bold"), f"  {name}  ", (status["state"], COLORS.get(status["state"], "")), age)


def _progress(status: Mapping[str, Any], rounds: int) -> str:
    done, share = status["done"], status["done"] / max(rounds, 1)
    text = f"{'█' * round(BLOCKS * share):░<{BLOCKS}} round {done:,}/{rounds:,}"
    if "rounds_per_second" in status:
        text += (
            f" | {status['rounds_per_second']:.1f} rounds/s | {status['client_steps_per_second']:,.0f} client steps/s"
        )
        text += f" | left {_left(status)}"
    elif status.get("seconds") is not None:
        text += f" | {status['seconds']:,.0f} s"
    text += f" | virtual {status['totals'].get('virtual_s', 0):,.0f} s"
    loss = status.get("train_loss")
    return text if loss is None else f"{text} | train loss {loss:.4g}"


def _left(status: Mapping[str, Any]) -> str:
    pace = status.get("rounds_per_second")
    return time_left((status["rounds"] - status["done"]) / pace) if pace and status["state"] == "running" else ""


def _metrics(status: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("metric", "initial", "last", "best"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name, known in status["metrics"].items():
        table.add_row(name.removeprefix("eval/"), *(f"{known[k]:.4f}" for k in ("initial", "last", "best")))
    return table


def _outcomes(totals: Mapping[str, float]) -> str:
    invited = totals.get("invited") or 0
    each = [f"{k} {totals[k] / invited:.0%}" for k in OUTCOMES if invited and totals.get(k)]
    return f"invited {invited:,.0f}: {', '.join(each)}" if each else "nobody invited yet"


def _events(folder: Path) -> list[str]:
    try:
        lines = list(json_lines(folder / EVENTS))
    except OSError:
        return []
    result = []
    for event in filter(None, lines[-EVENTS_SHOWN:]):
        more = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("round", "event"))
        result.append(f"round {event.get('round')}: {event.get('event')}{f' ({more})' if more else ''}")
    if len(lines) > EVENTS_SHOWN:
        result.insert(0, f"{len(lines) - EVENTS_SHOWN:,} events before")
    return result


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists() and (folder / "checkpoints").is_dir()


def _below(folder: Path, depth: int = 4) -> Iterator[Path]:
    """Yield the runs below a folder."""
    for child in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        if _is_run(child):
            yield child
        elif depth > 1:
            yield from _below(child, depth - 1)


def _wanted(folder: Path) -> int | None:
    """Return how many runs there are to be, where that is written down."""
    try:
        if (folder / MARK).exists():
            return int(json_of(folder / MARK)["trials"])
        if (folder / campaign.CAMPAIGN).exists():
            return len(sweep.planned(load(folder / campaign.CAMPAIGN)))
    except (OSError, ValueError, KeyError, TypeError, FedfleetError):
        return None
    return None
