"""A search for hyper-parameters: checked, run, and gone on with where it was interrupted.

Each trial is a run in a folder of its own, `trials/<number>/seed-<n>`. At a rung it pauses, and one that is promoted goes on in
that folder from its checkpoint, so that its files are those of a run that was never paused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfleet.config import schema as C
from fedfleet.config import tuning
from fedfleet.config.made import typed
from fedfleet.config.population import Data
from fedfleet.config.schema import Config
from fedfleet.config.search import Distribution
from fedfleet.config.trust import dumped
from fedfleet.config.tuning import Tuning
from fedfleet.experiments import campaign, trials
from fedfleet.experiments.progress import Progress
from fedfleet.experiments.runfolder import claim, locked
from fedfleet.experiments.same_run import WHERE, differences, without
from fedfleet.experiments.side_by_side import Job, at_a_time, run_jobs
from fedfleet.files.summary import summary_of
from fedfleet.files.writing import write_text
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.tuning import searchers
from fedfleet.tuning.journal import Journal
from fedfleet.tuning.schedules import SCHEDULES, Step, Trial

MARK = "tune.yaml"
"""What was given for a search, in its folder."""


@dataclass(frozen=True)
class Search:
    """A search that has been checked.

    Attributes:
        config: with what is searched in it.
        base: what trials share.
        rungs: in rounds.
        wanted: trials in all.
        seeds: of the runs of each.
        data: by ``data_key``.

    """

    config: Config
    base: Config
    given: Tuning
    space: Mapping[str, Distribution]
    rungs: list[int]
    wanted: int
    seeds: list[int]
    data: dict[str, Data]

    @property
    def sign(self) -> int:
        """What a metric is multiplied by, so that more is better."""
        return 1 if tuning.goal(self.given) == "max" else -1

    def trial(self, number: int, values: Mapping[str, Any], seed: int) -> Config:
        """Return the configuration of a trial's run. Raises ConfigError."""
        said = ", ".join(f"{key.split('.')[-1]}={_short(value)}" for key, value in values.items())
        return C.with_overrides(self.base, {**values, "seed": seed, "label": f"trial {number}: {said}"})

    def best(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is to be given for a run with these values, as plain data."""
        config = C.with_overrides(self.config, {**values, "tune": None})
        found = config.model_dump(mode="json", exclude_unset=True)
        return {k: v for k, v in found.items() if v is not None or k != "tune"}


def prepare(config: Config, progress: Progress, *, in_process: bool = True) -> Search:
    """Check all that can be checked before a trial is run. Raises ConfigError or DataError.

    Args:
        config: with the section ``tune``.
        progress: told what is done.
        in_process: trials train their clients in their own process, whatever ``executor.kind`` says.

    """
    given = config.tune
    if given is None:
        raise ConfigError("tune.search: not given: say what varies, such as --search algorithm.lr=loguniform(1e-3, 1)")
    for key in ("compare", "vary", "max_seconds"):
        if (value := getattr(config, key)) is not None:
            why = "trials would end where the machine has got to" if key == "max_seconds" else "one at a time is tuned"
            raise ConfigError(f"{key}={show(value)}: {why}: leave it out, or add {key}=null")
    space = tuning.checked(given, config.rounds)
    if given.searcher == "tpe":
        searchers.imported()
    seeds = config.seeds or [config.seed]
    base = C.with_overrides(config, {"tune": None, "seeds": None, **({"executor.kind": "local"} if in_process else {})})
    for key, distribution in space.items():
        for value in distribution.probes():
            typed(C.with_overrides(base, {key: value}))
    rungs, data = tuning.rungs(given, config.rounds), {}
    search = Search(config, base, given, space, rungs, searchers.wanted(given, space), seeds, data)
    progress.say("checking the first trial")
    first = search.trial(0, searchers.drawn(given, space, [], rungs), seeds[0])
    x = campaign.prepare(trials.Trial(first, first.label or "", "."), data)
    tuning.check_measured(given.metric, x.metric_names())
    return search


def again(out: Path, overrides: list[str] | None, progress: Progress, *, trust: bool = False) -> Search:
    """Return the search in a folder, prepared to go on; ``trust`` its code wherever it was written. Raises ConfigError."""
    config = C.load(out / MARK, overrides, trust=trust)
    return prepare(config, progress)


def run(search: Search, out: Path, progress: Progress, jobs: int = 1) -> list[Trial]:
    """Run a search, or go on with the one in a folder, until no trial is left to go on; return the trials.

    Raises ConfigError where another search is in ``out``, or a process is at work there. A trial that fails does not end it.
    """
    jobs = at_a_time([search.base], jobs)
    if (out / MARK).exists():
        _check_same(search, out)
    else:
        claim(out)
    with closing(locked(out)):
        write_text(out / MARK, dumped(campaign.given(search.config)))
        tuner = _Tuner(search, out, Journal(out), progress)
        for job, error in run_jobs(tuner.next_job, search.data, jobs, search.base.executor.address):
            tuner.enter(job, error)
    return tuner.journal.trials


def _check_same(search: Search, out: Path) -> None:
    """Refuse to go on with another search than was begun; more trials may be drawn where that changes no earlier step."""
    there = C.load(out / MARK, trust=True)  # it is compared, and nothing of it is called
    aside = WHERE if search.given.scheduler == "sha" else (*WHERE, "tune.trials")
    for key, was, now in differences(*(without(c.model_dump(mode="json"), aside) for c in (there, search.config))):
        raise ConfigError(f"{key}={show(now)}: the search in {out} has {show(was)}: choose another --out")
    if there.tune is not None and (there.tune.trials or 0) > search.wanted:
        raise ConfigError(f"tune.trials={search.wanted}: the search in {out} has {there.tune.trials}: give more")


class _Tuner:
    """Hands out runs as the schedule says, and enters how they did."""

    def __init__(self, search: Search, out: Path, journal: Journal, progress: Progress):
        self._search, self._out, self.journal, self._progress = search, out, journal, progress
        self._interrupted = [Step(t.number, t.begun) for t in journal.trials if t.under_way]
        self._line: list[Job] = []
        self._errors: dict[Step, dict[int, str | None]] = {}

    def next_job(self) -> Job | None:
        """Return the next run; None where others have to end before."""
        while not self._line:
            step = self._interrupted.pop(0) if self._interrupted else self._step()
            if step is None:
                return None
            try:
                self._line = [self._job(step, seed) for seed in self._search.seeds]
            except ConfigError as e:  # values that go alone, and not together
                self._measured(step, None, str(e))
        return self._line.pop(0)

    def _job(self, step: Step, seed: int) -> Job:
        s, trial = self._search, self.journal.trials[step.trial]
        run = folder(self._out, step.trial, seed)
        return Job((step, seed), s.trial(trial.number, trial.values, seed), run, s.rungs[step.rung])

    def _step(self) -> Step | None:
        """Decide what is next, and write it down."""
        s, trials = self._search, self.journal.trials
        step = SCHEDULES[s.given.scheduler](trials, s.wanted, len(s.rungs), s.given.reduction)
        if step is not None:
            new = step.trial == len(trials)
            self.journal.begin(step, searchers.drawn(s.given, s.space, trials, s.rungs) if new else None)
        return step

    def enter(self, job: Job, error: str | None) -> None:
        """Take a run that has ended; the last of a trial's seeds gives its score."""
        step, seed = job.of
        errors = self._errors.setdefault(step, {})
        errors[seed] = error
        if len(errors) < len(self._search.seeds):
            return
        del self._errors[step]
        of = self._search.given
        found = [_value(of, folder(self._out, step.trial, each), errors[each]) for each in self._search.seeds]
        wrong = next((wrong for _, wrong in found if wrong is not None), None)
        self._measured(step, None if wrong else statistics.fmean(value for value, _ in found), wrong)

    def _measured(self, step: Step, mean: float | None, error: str | None) -> None:
        s = self._search
        self.journal.measure(step, None if mean is None else s.sign * mean, error)
        said = error if mean is None else f"{s.given.metric} {mean:.4g}"
        drawn = f"{len(self.journal.trials)} of {s.wanted} trials drawn"
        self._progress.say(f"trial {step.trial}, {s.rungs[step.rung]} rounds: {said} | {drawn}")


def folder(out: Path, trial: int, seed: int) -> Path:
    """Return the run folder of a trial on a seed."""
    return out / "trials" / f"{trial:03}" / f"seed-{seed}"


def _value(given: Tuning, run: Path, error: str | None) -> tuple[float, str | None]:
    """Return what a run that has ended is compared by, and why it counts as failed, if it does."""
    summary = summary_of(run)
    error = error or summary.get("error") or summary.get("diverged")
    value = (summary.get("final" if given.of == "last" else "best") or {}).get(given.metric)
    if error is None and (value is None or not math.isfinite(value)):
        error = f"{given.metric} is not a number"
    return (math.nan if value is None else value), error


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
