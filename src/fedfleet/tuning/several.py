"""Several searches of one configuration: one for each label of ``compare`` at each point of ``vary``.

All have the same distributions, trials, seeds and metric. A label may have distributions of its own, as overrides of
``tune.search``. Each search lies in a folder of its own, and is there what it would be alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from fedfleet.config import schema as C
from fedfleet.config import tuning
from fedfleet.config.population import Data
from fedfleet.config.schema import SECTIONS, SHORT, Config
from fedfleet.config.search import space
from fedfleet.config.trust import check as check_trusted
from fedfleet.config.trust import dumped
from fedfleet.experiments import campaign
from fedfleet.experiments import sweep as grids
from fedfleet.experiments.progress import Progress
from fedfleet.experiments.runfolder import claim, locked
from fedfleet.files.documents import leaves
from fedfleet.files.writing import write_text
from fedfleet.report.words import joined
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.tuning import search as searching
from fedfleet.tuning.schedules import Trial
from fedfleet.tuning.search import MARK, Search

SEARCH = "tune.search."
TAKEN = (MARK, "best.yaml", "winners.parquet", "report.html", "figures")
"""Names in the folder of several searches that no search's folder can have."""


class Cell(NamedTuple):
    """A search, and the label and point that it is of."""

    point: grids.Trial
    search: Search


@dataclass(frozen=True)
class Searches:
    """Searches that have been checked; without ``compare`` and ``vary`` one alone, with the place "."."""

    config: Config
    """As it was given."""
    cells: Sequence[Cell]

    @property
    def several(self) -> bool:
        """Whether there are labels or points."""
        return _several(self.config)


def _several(config: Config) -> bool:
    return config.compare is not None or config.vary is not None


def prepare(config: Config, progress: Progress, *, in_process: bool = True) -> Searches:
    """Check all searches of a configuration before a trial is run, as ``search.prepare`` does. Raises as it does."""
    if config.tune is None:
        raise ConfigError(f"tune.search: not given: {tuning.VARIES}")
    if not _several(config):
        alone = searching.prepare(config, progress, in_process=in_process)
        return Searches(config, [Cell(grids.Trial(config, "", "."), alone)])
    plan = [_without(point, _unwanted(config, point)) for point in grids.points(config)]
    for point in plan:
        _check_apart(config, point)
    plan = _fitted(config, plan)
    for line in [f"checking {len(plan)} searches", *grids.left_out(plan)]:
        progress.say(line)
    cells, data = [], dict[str, Data]()
    for point in plan:
        with grids.naming(point.name):
            search = searching.prepare(point.config, progress, in_process=in_process, name=point.name, data=data)
        cells.append(Cell(point, search))
    return Searches(config, cells)


def again(out: Path, overrides: list[str] | None, progress: Progress, *, trust: bool = False) -> Searches:
    """Return what is in a folder, prepared to go on; ``trust`` its code wherever it was written. Raises ConfigError."""
    keys = [key for text in overrides or [] for key in C.override(text)]
    check_trusted(out / MARK, keys, trust=trust)
    return prepare(C.load(out / MARK, overrides, trust=True), progress)


def run(searches: Searches, out: Path, progress: Progress, jobs: int = 1) -> Iterator[tuple[Cell, Path, list[Trial]]]:
    """Run all searches, or go on with those in a folder; yield each with its folder and trials as it ends.

    Raises ConfigError, before any begins, where the folder has other searches, or a process is at work there.
    """
    cells = {out / cell.point.place: cell for cell in searches.cells}
    every = {folder: cell.search for folder, cell in cells.items()}
    if not searches.several:
        for folder, trials in searching.run_all(every, progress, jobs):
            yield cells[folder], folder, trials
        return
    if (out / MARK).exists():
        _check_all_there(searches, out)
    elif not searching.begun(out):
        claim(out)
    searching.check_same(every)
    with closing(locked(out)):
        write_text(out / MARK, dumped(campaign.given(searches.config), several=True))
        for folder, trials in searching.run_all(every, progress, jobs):
            yield cells[folder], folder, trials


def _check_all_there(searches: Searches, out: Path) -> None:
    """Refuse a plan without one of the searches that a folder was made for; more labels and values may be added."""
    before = C.load(out / MARK, trust=True)  # it is compared, and nothing of it is called
    if not _several(before):
        key = "compare" if searches.config.compare is not None else "vary"
        value = getattr(searches.config, key)
        raise ConfigError(f"{key}={show(value)}: the search in {out} has none: choose another folder")
    now = {cell.point.place for cell in searches.cells}
    for point in grids.points(before):
        if point.place not in now:
            raise ConfigError(
                f"compare or vary: {point.name!r} is searched in {out}, too: ask for all of them and more, or choose another folder"
            )


def _check_apart(config: Config, point: grids.Trial) -> None:
    """Refuse to search what tells labels and points apart, and labels that are called as a file. Raises ConfigError."""
    assert point.config.tune is not None
    if point.place in TAKEN:
        raise ConfigError(f"compare or vary: {point.name!r}: a file of the search is called so: give another label")
    naming = {f"{section}.{of.registry.key}" for section, of in SECTIONS.items() if not of.listed}
    said, varied = own(config, point), [(first, key) for first, v in point.point.items() for key, _ in leaves(v, first)]
    for key in point.config.tune.search:
        for first, below in varied:
            if f"{below}.".startswith(f"{key}."):
                values = show((config.vary or {}).get(first))
                raise ConfigError(f"vary.{first}={values}: tune.search.{key} would replace it: leave one of them out")
        if key in naming and key in said:
            raise ConfigError(
                f"compare.{point.label}.{key}={show(said[key])}: tune.search.{key} would replace it, and labels would be alike: "
                f"leave one of them out"
            )


def own(config: Config, point: grids.Trial) -> dict[str, Any]:
    """Return what a point's label sets, by dotted keys; a name that stands for a mapping has the key of the name."""
    said = (config.compare or {}).get(point.label) or {}
    result = dict(leaves(said)) if said else {}
    return {f"{k}.{SHORT[k]}" if k in SHORT and isinstance(v, str) else k: v for k, v in result.items()}


def _fitted(config: Config, plan: Sequence[grids.Trial]) -> list[grids.Trial]:
    """Leave out distributions that were given to all, where what they are of has no such option.

    So does ``compare`` with what is given at the top. One that nothing takes is refused, as is a label's own. Raises ConfigError.
    """
    lacking: dict[str, dict[str, ConfigError]] = {}
    for point in plan:
        for key, error in _lacking(config, point).items():
            lacking.setdefault(key, {})[point.place] = error
    for errors in lacking.values():
        if len(errors) == len(plan):
            raise next(iter(errors.values()))
    return [_told(point, [key for key, errors in lacking.items() if point.place in errors]) for point in plan]


def _lacking(config: Config, point: grids.Trial) -> dict[str, ConfigError]:
    """Return the keys searched by all that a point has no option for, and what is said of each."""
    assert point.config.tune is not None
    mine = {key.removeprefix(SEARCH) for key in own(config, point)}
    base, result = searching.shared(point.config), {}
    for key, distribution in space(point.config.tune.search).items():
        if key not in mine and not _has(base, key):
            try:
                searching.with_value(base, key, distribution.probes()[0])
            except ConfigError as e:
                result[key] = e
    return result


def _has(node: Any, key: str) -> bool:
    """Say whether there is an option at a dotted key; of what is no section, whatever is written there may be one."""
    first, _, rest = key.partition(".")
    if not isinstance(node, BaseModel):
        return True
    return first in type(node).model_fields and (not rest or _has(getattr(node, first), rest))


def _unwanted(config: Config, point: grids.Trial) -> list[str]:
    """Return the keys that a label does not search, since it says null of them."""
    said = own(config, point).items()
    return [key.removeprefix(SEARCH) for key, value in said if key.startswith(SEARCH) and value is None]


def _without(point: grids.Trial, keys: Sequence[str]) -> grids.Trial:
    """Return a point that does not search some keys."""
    assert point.config.tune is not None
    search = {key: value for key, value in point.config.tune.search.items() if key not in keys}
    return replace(point, config=C.with_overrides(point.config, {"tune.search": search})) if keys else point


def _told(point: grids.Trial, keys: Sequence[str]) -> grids.Trial:
    """Return a point that does not search some keys, and says so. Raises ConfigError where nothing is left."""
    result = _without(point, keys)
    assert result.config.tune is not None
    if keys and not result.config.tune.search:
        what = joined([f"{SEARCH}{key}" for key in keys])
        raise ConfigError(
            f"run {point.name!r}: {what}: it has no such option, and nothing else is searched: give its label a distribution, such "
            f"as tune.search.algorithm.lr, or leave it out"
        )
    lost = [f"{SEARCH}{key}: {_owner(point.config, key)} has no such option" for key in keys]
    return replace(result, lost=(*point.lost, *lost))


def _owner(config: Config, key: str) -> str:
    """Return the name of the part that has no option at a dotted key."""
    above = [
        name for name, of in SECTIONS.items() if not of.listed and key.startswith(f"{name}.") and _has(config, name)
    ]
    section = max(above, key=len, default=None)
    return key.rpartition(".")[0] if section is None else SECTIONS[section].registry.name_of(C.at(config, section))
