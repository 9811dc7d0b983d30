"""Several runs from one configuration: every label of ``compare``, every point of ``vary``, every seed; then one report."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfleet.assembly.user_parts import check_same, parts
from fedfleet.config.population import Data, data_key, load_data
from fedfleet.config.resolve import parse_until
from fedfleet.config.schema import Config, load
from fedfleet.config.trust import dumped
from fedfleet.datasets.names import some
from fedfleet.experiments.child import child
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.progress import Progress
from fedfleet.experiments.resume import at_its_end, changed, check_rounds, cut_off, run_or_go_on
from fedfleet.experiments.resume import resume as go_on
from fedfleet.experiments.run import Run
from fedfleet.experiments.runfolder import check_free, claim, locked
from fedfleet.experiments.runs import Runs
from fedfleet.experiments.sweep import Trial, distinct, left_out, naming, planned, to_check
from fedfleet.experiments.workers import Workers
from fedfleet.files.documents import YAML_BYTES, dump, is_there, json_of, text_of
from fedfleet.files.summary import SUMMARY, checked_summary, summary_of
from fedfleet.files.writing import write_text
from fedfleet.report import finals, told, write_report
from fedfleet.report.words import count
from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.errors import ConfigError, FedfleetError, show
from fedfleet.tracking.callback import Callback, Callbacks

if TYPE_CHECKING:
    from fedfleet.report.study_tables import Tables, Target

CAMPAIGN, TRIALS = "campaign.yaml", "trials.json"
NO_PARTS: Mapping[str, Any] = {}


def prepare(trial: Trial, loaded: dict[str, Data], own: Mapping[str, Any] = NO_PARTS) -> Experiment:
    """Make a trial ready to run; ``loaded`` keeps the data sets, ``own`` are parts made in Python.

    Raises ConfigError or DataError naming the trial.
    """
    with naming(trial.name):
        if own.get("data") is not None or own.get("population") is not None:
            return Experiment(trial.config, **own)
        which = data_key(trial.config)
        if which not in loaded:
            loaded[which] = load_data(trial.config)
        return Experiment(trial.config, loaded=loaded[which], **own)


def only(config: Config, command: str) -> Experiment:
    """Make the one run that a configuration asks for ready, of several seeds the first. Raises ConfigError, DataError."""
    first, *others = distinct(planned(config))
    if others:
        key = "compare" if config.compare is not None else "vary"
        raise ConfigError(
            f"{key}={show(getattr(config, key))}: {len(others) + 1} different runs, and {command} takes one: add "
            f"compare=null vary=null, and what that one sets"
        )
    return prepare(first, {})


def run(config: Config, out: Path, progress: Progress, jobs: int = 1, *, report: bool = True) -> list[Run]:
    """Run every trial (``jobs`` at a time, each in a process of its own if more than one) and write the report.

    All trials are checked before the first one starts. One that fails does not stop the others; FedfleetError is raised at
    the end.
    """
    plan = planned(config)
    check_free(out)
    loaded: dict[str, Data] = {}
    if len(plan) == 1 and plan[0].place == ".":
        progress.wait(f"loading {config.population.dataset.name}")
        runs, failures = [prepare(plan[0], loaded).run(out, progress)], []
    else:
        progress.wait(f"checking {len(plan)} runs")
        checked = [(trial.name, prepare(trial, loaded)) for trial in to_check(plan)]
        advice = (
            [(name, x.advice()) for name, x in checked] if jobs > 1 else []
        )  # one at a time, each run tells its own
        for line in [*left_out(plan), *advised(advice)]:
            progress.say(line)
        with _alone(config, plan, claim(out)):
            done = _in_processes(plan, out, progress, jobs) if jobs > 1 else _in_turn(plan, out, [progress], loaded)
        runs, failures = _parted(done)
        _tell(plan, out, progress.result)
    if [run.folder for run in runs] == [out]:
        _say(out, progress)
    return _reported(runs, failures, progress.result, partial(page, out) if report else None)


def advised(checked: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return every line of the advice on runs, by their names, once: before it the runs that it is for, unless it is for all."""
    names: dict[str, None] = {}
    told: dict[str, dict[str, None]] = {}
    for name, lines in checked:
        names[name] = None
        for line in lines:
            told.setdefault(line, {})[name] = None
    return [line if len(whose) == len(names) else f"{some([*whose])}: {line}" for line, whose in told.items()]


def resume(
    out: Path, overrides: list[str] | None, progress: Progress, *, report: bool = True, trust: bool = False
) -> list[Run]:
    """Go on with the run, or one after the other with the runs, in a folder; those at their end are left as they are.

    Raises as ``run`` does, and ConfigError where there is nothing to go on from.
    """
    if not (out / CAMPAIGN).exists():
        run = go_on(out, overrides, progress, trust=trust)
        if report:  # which tells of a run that had come to its end, too
            _say(out, progress)
        return _reported([run], [], progress.result, partial(write_report, [out], out) if report else None)
    config = changed(out / CAMPAIGN, overrides, trust=trust)
    plan = planned(config)
    with _alone(config, plan, out):
        runs, failures = _parted(_rest(plan, out, progress))
    _tell(plan, out, progress.result)
    return _reported(runs, failures, progress.result, partial(page, out) if report else None)


def _rest(plan: Sequence[Trial], out: Path, progress: Progress) -> list[Run | FedfleetError]:
    ended = {trial.place: at_its_end(out / trial.place, trial.config) for trial in plan}
    left = [trial for trial in plan if ended[trial.place] is None]
    cut = cut_off(summary for summary in ended.values() if summary is not None)
    progress.say(f"{len(plan) - len(left)} of {len(plan)} runs are at their end{cut}")
    return _in_turn(left, out, [progress], {})


def run_all(config: Config, out: Path, callbacks: Sequence[Callback], own: Mapping[str, Any]) -> Runs:
    """Run every trial, one after another, and write the report; ``own`` are parts made in Python, of all of them.

    Those that have come to their end in ``out`` are left as they are, others go on, and there may be more than before. Raises as
    ``run`` does, and ConfigError where ``out`` has runs of other configurations, or where there is one run alone.
    """
    plan = planned(config, own.get("data"))
    if plan[0].place == ".":
        raise ConfigError("seeds, compare, vary: none is given, and there is one run: give one, or take fedfleet.run")
    if goes_on := (out / CAMPAIGN).exists():
        _check_all_there(out, config, plan, own.get("data"))
    say, loaded = Callbacks(callbacks).say, dict[str, Data]()
    ended = dict[str, Run]()
    if not goes_on:
        check_free(out)
    for line in left_out(plan):
        say(line)
    for trial in to_check(plan):
        prepare(trial, loaded, own)
    now = parts(**own).describe()
    with _alone(config, plan, out if goes_on else claim(out)):
        for trial in plan:
            if (summary := at_its_end(out / trial.place, trial.config)) is not None:
                check_same(out / trial.place, summary.get("own") or {}, now)
                ended[trial.place] = Run(out / trial.place, summary, own.get("task"))
        if ended:
            say(f"{len(ended)} of {len(plan)} runs are at their end{cut_off(run.summary for run in ended.values())}")
        left = [trial for trial in plan if trial.place not in ended]
        done, failures = _parted(_in_turn(left, out, callbacks, loaded, own))
    ended |= {str(run.folder.relative_to(out)): run for run in done}
    _tell(plan, out, say)
    there = [trial for trial in plan if trial.place in ended]
    _reported(list(ended.values()), failures, say, partial(page, out))
    return Runs(out, [ended[trial.place] for trial in there], [_keys(trial, config) for trial in there])


def _keys(trial: Trial, config: Config) -> dict[str, Any]:
    """Return what tells a trial from the others."""
    label = {"label": trial.label} if config.compare is not None else {}
    return {**label, **trial.point, **({"seed": trial.config.seed} if config.seeds is not None else {})}


def _check_all_there(out: Path, config: Config, plan: Sequence[Trial], data: Data | None) -> None:
    """Refuse a plan without one of the runs that a folder was made for. Raises ConfigError."""
    before, now = load(out / CAMPAIGN), {trial.place: trial.config for trial in plan}
    if all(now.get(trial.place) == trial.config for trial in planned(before, data)):
        return
    key = next((key for key in type(config).model_fields if getattr(before, key) != getattr(config, key)), "data")
    raise ConfigError(
        f"{out}: runs of another configuration are there ({key}): ask for all of them and more, choose another folder, or remove it"
    )


def open_runs(folder: Path | str, task: Task | None = None, data: Data | None = None, *, trust: bool = False) -> Runs:
    """Return the runs in a folder that have ended, as ``fedfleet.run_all`` returned them; nothing is computed.

    Args:
        folder: what was given as ``out`` to it, or to ``fedfleet run`` of several labels, values or seeds.
        task, data: those made in Python that the runs had, if any: the task for ``model()``, data for ``domains.target: [each]``.
        trust: call code that the folder names also where no run of this user's on this machine wrote that.

    Raises ConfigError where no such runs are.

    """
    out = Path(folder)
    if not is_there(out):
        raise ConfigError(f"{out}: no such folder: give what was given as out")
    if not is_there(out / CAMPAIGN):
        from fedfleet.report.study_tables import MARK

        fix = "give the folder of several runs"
        if is_there(out / SUMMARY):
            fix = "it is one run: take fedfleet.open_run"
        elif is_there(out / MARK):
            fix = "it is a study: read its Parquet tables, and open each trial by fedfleet.open_run"
        raise ConfigError(f"{out}: no {CAMPAIGN} there: {fix}")
    config = load(out / CAMPAIGN, trust=trust)
    read = [(trial, checked_summary(out / trial.place)) for trial in planned(config, data)]
    ended = [(trial, summary) for trial, summary in read if summary]
    runs = [Run(out / trial.place, summary, task, trust) for trial, summary in ended]
    return Runs(out, runs, [_keys(trial, config) for trial, _ in ended])


@contextmanager
def _alone(config: Config, plan: Sequence[Trial], out: Path) -> Iterator[None]:
    """Have a folder of runs alone, and write down what they are. Raises ConfigError where another has it.

    ``resume`` takes that from the configuration; reports take it from a table, for the other may name code nobody has looked at.
    """
    with closing(locked(out)):
        for trial in plan:
            folder = out / trial.place
            check_rounds(trial.config, summary_of(folder).get("rounds") or 0, f"the run in {folder}")
        write_text(out / CAMPAIGN, dumped(given(config), several=True))
        told = [{"place": trial.place, "keys": tells(trial)} for trial in plan]
        varied = list(plan[0].point)
        write_text(out / TRIALS, json.dumps({"varied": varied, "until": config.until, "trials": told}, indent=2) + "\n")
        yield


def as_given(config: Config) -> str:
    """Return in YAML what was given for a configuration, defaults left out."""
    return dump(given(config))


def given(config: Config) -> dict[str, Any]:
    """Return as plain data what was given for a configuration, defaults left out."""
    return config.model_dump(mode="json", exclude_unset=True)


def _parted(done: list[Run | FedfleetError]) -> tuple[list[Run], list[FedfleetError]]:
    return [r for r in done if isinstance(r, Run)], [e for e in done if isinstance(e, FedfleetError)]


def _tell(plan: list[Trial], out: Path, say: Callable[[str], None]) -> None:
    """Say what came of each label, over the seeds that ended."""
    for line in finals([folder for t in plan if summary_of(folder := out / t.place).get("final")]):
        say(line)


def _say(out: Path, progress: Progress) -> None:
    """Say what happened in a run, and its last metrics."""
    for line in [*told(out), *finals([out])]:
        progress.result(line)


def tells(trial: Trial) -> dict[str, Any]:
    """Return the columns of tables that tell a trial from the others."""
    name = trial.config.algorithm.name
    return {"label": trial.label or name, "algorithm": name, **trial.point, "seed": trial.config.seed}


def tables(folder: Path, target: Target | None = None) -> Tables | None:
    """Return the tables of the runs in a folder, if something of them varies; None otherwise.

    The target is ``until`` if not given. Raises ConfigError for a file that cannot be read.
    """
    from fedfleet.report.study_tables import Entry, Target, collect

    if not is_there(folder / TRIALS):
        return None
    told = json_of(folder / TRIALS, {"varied": list, "trials": list})
    entries, varied = list[Entry](), dict[str, list[Any]]()
    try:
        entries = [Entry(dict(trial["keys"]), folder / trial["place"]) for trial in told["trials"]]
        for key in told["varied"]:
            for entry in entries:
                values = varied.setdefault(key, [])
                values += [entry.keys[key]] if entry.keys[key] not in values else []
        inside = all(entry.folder.resolve().is_relative_to(folder.resolve()) for entry in entries)
        known = all({"label", "algorithm", "seed"} <= entry.keys.keys() for entry in entries)
    except (KeyError, TypeError, ValueError):
        inside = known = False
    if not (inside and known):
        raise ConfigError(
            f"{folder / TRIALS}: not as fedfleet wrote it: remove it, and labels are compared side by side"
        )
    goal = target or (None if told.get("until") is None else Target(*parse_until(told["until"])))
    return collect(entries, varied, goal) if varied else None


def page(out: Path) -> Path:
    """Write the page on the runs in a folder: where something varies that of a study, else of labels side by side."""
    if (found := tables(out)) is None:
        return write_report([out], out)
    from fedfleet.report.study_page import write_study_report

    return write_study_report(found, out, text_of(out / CAMPAIGN, YAML_BYTES))


def _reported(
    runs: list[Run], failures: list[FedfleetError], say: Callable[[str], None], write: Callable[[], Path] | None
) -> list[Run]:
    if write is not None:
        say(f"report: {write()}")
    if failures:
        raise FedfleetError(f"{len(failures)} of {len(runs) + len(failures)} runs: {failures[0]}")
    return runs


def _in_turn(
    plan: list[Trial],
    out: Path,
    callbacks: Sequence[Callback],
    loaded: dict[str, Data],
    own: Mapping[str, Any] = NO_PARTS,
) -> list[Run | FedfleetError]:
    say = Callbacks(callbacks).say
    done: list[Run | FedfleetError] = []
    with closing(Workers()) as workers:
        for i, trial in enumerate(plan):
            say(f"run {i + 1}/{len(plan)}: {trial.place}")
            try:
                done.append(run_or_go_on(prepare(trial, loaded, own), out / trial.place, callbacks, workers))
            except FedfleetError as e:
                done.append(FedfleetError(f"{trial.place}: {e}"))
                say(f"failed: {done[-1]}")
            except (KeyboardInterrupt, SystemExit) as e:
                e.add_note(f"after {i} of {count(len(plan), 'run')}")
                raise
    return done


def _in_processes(plan: list[Trial], out: Path, progress: Progress, jobs: int) -> list[Run | FedfleetError]:
    under_way: set[subprocess.Popen[str]] = set()

    def one(trial: Trial) -> Run | FedfleetError:
        folder = out / trial.place
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "config.yaml"
            path.write_text(as_given(trial.config), encoding="utf-8")
            with child("fedfleet", "run", str(path), "--out", str(folder), "--no-report") as process:
                under_way.add(process)
                progress.say(f"started: {trial.place}")
                lines = process.communicate()[0].strip().splitlines() or ["no output"]
                under_way.remove(process)
        said = next((line for line in lines if line.startswith("failed: ")), lines[-1])  # a traceback may follow
        progress.say(f"{trial.place}: {said}")
        if process.returncode:
            return FedfleetError(f"{trial.place}: {said.removeprefix('failed: ')}")
        return Run(folder, summary_of(folder))

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(one, plan))
        except BaseException:  # interrupted: let the runs under way write what they have, and start no other
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(under_way):
                process.terminate()
            raise
