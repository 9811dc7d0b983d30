"""A search for hyper-parameters: checked, run, and gone on with where it was interrupted.

Each trial is a run in a folder of its own, `trials/<number>/seed-<n>`. At a rung it pauses, and one that is promoted goes on in
that folder from its checkpoint, so that its files are those of a run that was never paused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfleet.config import schema as C
from fedfleet.config import tuning
from fedfleet.config.executor import IN_PROCESS
from fedfleet.config.plugins import typed
from fedfleet.config.population import Data
from fedfleet.config.schema import Config
from fedfleet.config.search import Distribution
from fedfleet.config.trust import dumped
from fedfleet.config.tuning import Tuning
from fedfleet.experiments import campaign, sweep
from fedfleet.experiments.progress import Progress
from fedfleet.experiments.runfolder import LOCK, claim, locked
from fedfleet.experiments.same_run import WHERE, differences, without
from fedfleet.experiments.side_by_side import Job, at_a_time, run_jobs
from fedfleet.files.summary import summary_of
from fedfleet.files.writing import write_text
from fedfleet.report.words import count
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
        name: its label and point, where there are several.

    """

    config: Config
    base: Config
    given: Tuning
    space: Mapping[str, Distribution]
    rungs: list[int]
    wanted: int
    seeds: list[int]
    data: dict[str, Data]
    name: str = ""

    @property
    def sign(self) -> int:
        """What a metric is multiplied by, so that more is better."""
        return 1 if tuning.goal(self.given) == "max" else -1

    def trial(self, number: int, values: Mapping[str, Any], seed: int) -> Config:
        """Return the configuration of a trial's run. Raises ConfigError."""
        said = ", ".join(f"{key.split('.')[-1]}={_short(value)}" for key, value in values.items())
        label = f"{self.told}trial {number}: {said}"
        return C.with_overrides(self.base, {**values, "seed": seed, "label": label})

    @property
    def told(self) -> str:
        """The beginning of lines about it."""
        return f"{self.name}: " if self.name else ""

    def best(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is to be given for a run with these values, as plain data."""
        config = C.with_overrides(self.config, {**values, "tune": None})
        result = config.model_dump(mode="json", exclude_unset=True)
        return {k: v for k, v in result.items() if v is not None or k != "tune"}


def prepare(
    config: Config, progress: Progress, *, in_process: bool = True, name: str = "", data: dict[str, Data] | None = None
) -> Search:
    """Check all that can be checked before a trial is run. Raises ConfigError or DataError.

    Args:
        config: with the section ``tune``, and without ``compare`` and ``vary``.
        progress: told what is done.
        in_process: trials train their clients in their own process, whatever ``executor.kind`` says.
        name: of the search, where there are several.
        data: data sets that are loaded already, by ``data_key``; what this search needs is added.

    """
    given = config.tune
    if given is None:
        raise ConfigError(f"tune.search: not given: {tuning.VARIES}")
    if config.max_seconds is not None:
        raise ConfigError(
            f"max_seconds={show(config.max_seconds)}: trials would end where the machine has got to: leave it out, or add "
            f"max_seconds=null"
        )
    space = tuning.checked(given, config.rounds)
    if given.searcher == "tpe":
        searchers.imported()
    seeds = config.seeds or [config.seed]
    base = shared(config, in_process=in_process)
    for key, distribution in space.items():
        for value in distribution.probes():
            with_value(base, key, value)
    rungs, data = tuning.rungs(given, config.rounds), {} if data is None else data
    search = Search(config, base, given, space, rungs, searchers.wanted(given, space), seeds, data, name)
    progress.say(f"{search.told}checking the first trial")
    first = search.trial(0, searchers.drawn(given, space, [], rungs), seeds[0])
    x = campaign.prepare(sweep.Trial(first, "" if name else first.label or "", "."), data)
    tuning.check_measured(given, x.metric_names())
    return search


def with_value(base: Config, key: str, value: Any) -> Config:
    """Return a configuration with a value of the distribution of a key. Raises ConfigError, which names the distribution."""
    try:
        return typed(C.with_overrides(base, {key: value}))
    except ConfigError as e:
        raise ConfigError(f"tune.search.{key}: {e}") from None


def shared(config: Config, *, in_process: bool = True) -> Config:
    """Return what all trials of a search share."""
    return C.with_overrides(config, {"tune": None, "seeds": None, **(IN_PROCESS if in_process else {})})


def run(search: Search, out: Path, progress: Progress, jobs: int = 1) -> list[Trial]:
    """Run a search, or go on with the one in a folder, until no trial is left to go on; return the trials.

    Raises as ``run_all`` does.
    """
    return dict(run_all({out: search}, progress, jobs))[out]


def run_all(searches: Mapping[Path, Search], progress: Progress, jobs: int = 1) -> Iterator[tuple[Path, list[Trial]]]:
    """Run searches in folders of their own, or go on with those there; yield each folder and its trials as the search ends.

    Runs of all of them are made side by side: where one waits for a rung, the next goes on. Raises ConfigError, before any
    begins, where another search is in a folder, or a process is at work there. A trial that fails ends none.
    """
    jobs = at_a_time([search.base for search in searches.values()], jobs)
    check_same(searches)
    for out in searches:
        if not begun(out):
            claim(out)
    with ExitStack() as stack:
        for out in searches:
            stack.enter_context(closing(locked(out)))
        tuners = []
        for out, search in searches.items():
            write_text(out / MARK, dumped(campaign.given(search.config), several=True))
            tuners.append(_Tuner(search, out, Journal(out), progress))
        yield from _ended(tuners)
        first = next(iter(searches.values()))
        every = tuple(tuners)
        try:
            for job, error in run_jobs(lambda: _next_job(tuners), first.data, jobs, first.config.executor.address):
                tuner, step, seed = job.of
                tuner.enter(step, seed, error)
                yield from _ended(tuners)
        except (KeyboardInterrupt, SystemExit) as e:
            drawn = sum(len(tuner.journal.trials) for tuner in every)
            wanted = sum(search.wanted for search in searches.values())
            e.__notes__ = [f"after {drawn:,} of {count(wanted, 'trial')} were drawn"]  # of which several are under way
            raise
        yield from _ended(tuners)


def _next_job(tuners: Iterable[_Tuner]) -> Job | None:
    """Return the next run of the first search that has one; None where others have to end before."""
    return next(filter(None, (tuner.next_job() for tuner in tuners)), None)


def _ended(tuners: list[_Tuner]) -> Iterator[tuple[Path, list[Trial]]]:
    """Take out the searches that have come to their end, and yield their folders and trials."""
    for tuner in [tuner for tuner in tuners if tuner.ended]:
        tuners.remove(tuner)
        yield tuner.out, tuner.journal.trials


def begun(out: Path) -> bool:
    """Say whether a search has begun in a folder, if only by locking it."""
    return (out / MARK).exists() or (out.is_dir() and [path.name for path in out.iterdir()] == [LOCK])


def check_same(searches: Mapping[Path, Search]) -> None:
    """Refuse to go on with other searches than were begun in their folders. Raises ConfigError."""
    for out, search in searches.items():
        if (out / MARK).exists():
            _check_same(search, out)


def _check_same(search: Search, out: Path) -> None:
    """Refuse to go on with another search than was begun; more trials may be drawn where that changes no earlier step."""
    there = C.load(out / MARK, trust=True)  # it is compared, and nothing of it is called
    aside = WHERE if search.given.scheduler == "sha" else (*WHERE, "tune.trials")
    for key, was, now in differences(*(without(c.model_dump(mode="json"), aside) for c in (there, search.config))):
        raise ConfigError(f"{key}={show(now)}: the search in {out} has {show(was)}: choose another folder")
    if there.tune is not None and (there.tune.trials or 0) > search.wanted:
        raise ConfigError(f"tune.trials={search.wanted}: the search in {out} has {there.tune.trials}: give more")


class _Tuner:
    """Hands out runs as the schedule says, and enters how they did."""

    def __init__(self, search: Search, out: Path, journal: Journal, progress: Progress):
        self._search, self.out, self.journal, self._progress = search, out, journal, progress
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
        run = folder(self.out, step.trial, seed)
        return Job((self, step, seed), s.trial(trial.number, trial.values, seed), run, s.rungs[step.rung])

    def _step(self) -> Step | None:
        """Decide what is next, and write it down."""
        s, trials, step = self._search, self.journal.trials, self._next()
        if step is not None:
            new = step.trial == len(trials)
            self.journal.begin(step, searchers.drawn(s.given, s.space, trials, s.rungs) if new else None)
        return step

    def _next(self) -> Step | None:
        s = self._search
        return SCHEDULES[s.given.scheduler](self.journal.trials, s.wanted, len(s.rungs), s.given.reduction)

    @property
    def ended(self) -> bool:
        """Whether no trial is under way, and none goes on."""
        return not any(trial.under_way for trial in self.journal.trials) and self._next() is None

    def enter(self, step: Step, seed: int, error: str | None) -> None:
        """Take a run that has ended; the last of a trial's seeds gives its score."""
        errors = self._errors.setdefault(step, {})
        errors[seed] = error
        if len(errors) < len(self._search.seeds):
            return
        del self._errors[step]
        of = self._search.given
        result = [_value(of, folder(self.out, step.trial, each), errors[each]) for each in self._search.seeds]
        wrong = next((wrong for _, wrong in result if wrong is not None), None)
        self._measured(step, None if wrong else statistics.fmean(value for value, _ in result), wrong)

    def _measured(self, step: Step, mean: float | None, error: str | None) -> None:
        s = self._search
        self.journal.measure(step, None if mean is None else s.sign * mean, error)
        said = error if mean is None else f"{s.given.metric} {mean:.4g}"
        drawn = f"{len(self.journal.trials)} of {s.wanted} trials drawn"
        self._progress.say(f"{s.told}trial {step.trial}, {s.rungs[step.rung]} rounds: {said} | {drawn}")


def folder(out: Path, trial: int, seed: int) -> Path:
    """Return the run folder of a trial on a seed."""
    return out / "trials" / f"{trial:03}" / f"seed-{seed}"


def _value(options: Tuning, run: Path, error: str | None) -> tuple[float, str | None]:
    """Return what a run that has ended is compared by, and why it counts as failed, if it does."""
    summary = summary_of(run)
    error = error or summary.get("error") or summary.get("diverged")
    value = (summary.get("final" if options.of == "last" else "best") or {}).get(options.metric)
    if error is None and (value is None or not math.isfinite(value)):
        error = f"{options.metric} is not a number"
    return (math.nan if value is None else value), error


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
