"""Rounds in the words of a paper: who is invited and waited for, what follows where too few answer, and what ends a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedfleet.commands.options_told import DEFAULTS, explained, name_of, section_of
from fedfleet.experiments.same_run import STOPS
from fedfleet.report import variance
from fedfleet.report.latex import escape
from fedfleet.report.tables import Run
from fedfleet.report.words import count, joined
from fedfleet.simulator.fleet.policies import rounded_up

ENDS: Mapping[str, Callable[[Any], str]] = {
    "until": str,
    "patience": lambda of: f"{of['metric']} has not improved for {of['evaluations']} evaluations",
    "stop_if_diverged": lambda value: (
        "a training loss is not finite" + ("" if isinstance(value, str) else f", or above {value:g}")
    ),
    "max_seconds": lambda value: f"{value:g} s of computing are over",
    "callbacks": lambda several: f"{joined([name_of(each) for each in several])} says so",
}
"""Settings that end a run, and when they do, in words."""


def participation(run: Run, every: Sequence[Run]) -> str:
    """Say whom the server invites and waits for, who is online, and what follows where too few answer; ``every`` run is told of."""
    online, cohort = section_of(run, "availability"), section_of(run, "cohort")
    always = [name_of(section_of(each, "availability")) == "always" for each in every]
    at_most = "at most " * any(run.config.get(key) for key in STOPS)
    told = f"In each of {at_most}{run.config.get('rounds'):,} rounds the server invites {_invited(run)}{_waits(run)}"
    if name_of(online) == "always":
        told += "; all are online"
    else:
        told += f"; who is online follows {explained('availability', online)}"
    if cohort.get("late") == "keep":
        told += f". A late answer counts in a later round, with a weight of {cohort.get('stale_discount')} for each round of delay"
    return told if all(always) and not cohort.get("deadline_s") else f"{told}. {_aborted(cohort)}"


def _invited(run: Run) -> str:
    chosen, cohort = section_of(run, "selection"), section_of(run, "cohort")
    asked = rounded_up((cohort.get("size") or 0) * (cohort.get("over_select") or 1))
    if variance.everybody(run):
        return f"all {count(asked, 'client')}"
    by = "uniformly at random" if name_of(chosen) == "uniform" else f"by {explained('selection', chosen)}"
    return f"{count(asked, 'client')} {by}"


def _waits(run: Run) -> str:
    """Say for which of those invited the server waits, and until when."""
    cohort, always = section_of(run, "cohort"), name_of(section_of(run, "availability")) == "always"
    wait_for = cohort.get("size") if (cohort.get("over_select") or 1) > 1 else cohort.get("wait_for") or "all"
    most = f"a deadline of {cohort['deadline_s']:g} s" if cohort.get("deadline_s") else ""
    most += ", by which slow clients send what they have done" * bool(cohort.get("partial_work"))
    if wait_for == "all":
        whom = "" if always else " for all that are online"
        return f", and waits{whom}{' until ' * bool(most)}{most}" if whom or most else ""
    fails = not always or section_of(run, "devices").get("failures_per_hour")
    ends = [*filter(None, [most]), *["everybody online has answered or failed"] * bool(fails)]
    share = f"a share between {cohort.get('response_low')} and {cohort.get('response_high')}, uniformly drawn, of the"
    whom = share if wait_for == "siwer" else f"the first {wait_for}"
    return ", or until ".join([f", and waits for {whom} answers", *ends])


def _aborted(cohort: Mapping[str, Any]) -> str:
    """Say what follows where too few answer."""
    least = cohort.get("min_responses", 1)
    few = "nobody answers" if least == 1 else f"fewer than {least} clients answer"
    if cohort.get("on_abort") == "skip":
        return f"A round in which {few} counts as done, and is not tried again: no answer of it is used"
    if (attempts := cohort.get("attempts", 10)) == 1:
        return f"A round in which {few} ends the run"
    return f"A round in which {few} is tried again, in up to {attempts} attempts"


def devices(run: Run, *, timed: bool) -> str:
    """Say what devices are simulated where times are told of (``timed``) or decide who is heard, or where they are no defaults."""
    how, cohort = section_of(run, "devices"), section_of(run, "cohort")
    decides = cohort.get("deadline_s") or (cohort.get("over_select") or 1) > 1 or cohort.get("wait_for", "all") != "all"
    chosen = any(value != DEFAULTS.get(f"devices.{key}") for key, value in how.items())
    if not how or not (timed or decides or chosen):
        return ""
    return f"Virtual seconds are of simulated devices, {explained('devices', how)}."


def stops(every: Sequence[Run]) -> Iterator[str]:
    """Yield what ends runs before their last round, and after how many rounds they ended."""
    given = {key: next((value for run in every if (value := run.config.get(key))), None) for key in ENDS}
    if how := [say(given[key]) for key, say in ENDS.items() if given[key]]:
        yield f"A run stops once {escape(' or '.join(how))}."
    ended = [run.rounds_done for run in every if run.rounds_done != run.config.get("rounds")]
    if ended:
        took = f"{min(ended):,}" if min(ended) == max(ended) else f"{min(ended):,} to {max(ended):,}"
        yield f"Of {count(len(every), 'run')}, {len(ended)} ended before the last round, after {took}."
