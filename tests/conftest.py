"""Setup of the suite: tests on Ray share one cluster and its workers, since starting them takes seconds.

The other tests run beside them.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the tests share the cores among them
os.environ["RAY_ENABLE_AUTO_CONNECT"] = (
    "0"  # or what asks Ray for something would join the Ray of another process of the tests
)

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fedfleet.assembly.prepared import Prepared
from fedfleet.datasets.files import data_dir
from fedfleet.files import writing
from fedfleet.simulator.executors.base import Executor
from tests.budget import Budget
from tests.parts import SLOW, TESTS, in_part, is_slow, may_be_quick, slow_asked

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and so would what it starts

settings.register_profile("suite", deadline=None, max_examples=16)
settings.register_profile("thorough", deadline=None, max_examples=256)  # pytest --hypothesis-profile=thorough
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite's parts and of its budget."""
    group = parser.getgroup("fedfleet")
    group.addoption("--all", action="store_true", help="with -m slow: the whole slow part, not the commit's third")
    group.addoption("--budget", action="store_true", help="print what every folder took, not only those above budget")


def pytest_configure(config: pytest.Config) -> None:
    """Count seconds where results come together."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Budget(bool(config.getoption("budget"))), "budget")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no folder of slow tests, and with ``-m quick`` no file without a quick one, where none of them is asked for."""
    slow = collection_path.parent == TESTS and collection_path.name in SLOW and not slow_asked(config)
    other = config.getoption("markexpr") == "quick" and not may_be_quick(collection_path)
    return True if slow or other else None


@pytest.hookimpl(tryfirst=True)  # xdist is to read the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the part asked for has not, and put into groups what shares a Ray or a file's fixtures."""
    for item in items:
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
        if "data_folder" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.data)
    asked = [(item, in_part(config, item)) for item in items]
    config.hook.pytest_deselected(items=[item for item, inside in asked if not inside])
    items[:] = [item for item, inside in asked if inside]

    def on_ray(item: pytest.Item) -> bool:
        return item.get_closest_marker("ray") is not None and item.get_closest_marker("own_ray") is None

    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if on_ray(item) else group(item)))
    items.sort(key=lambda item: not on_ray(item))  # the others are done in less time


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of the collector's later rounds."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give it back to the collector, or libraries say at the end that it leaks."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of packages that the extra ``test`` does not bring, and of real data, where these are not there."""
    for name in (name for marker in item.iter_markers("extras") for name in marker.args):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    for name in (name for marker in item.iter_markers("data") for name in marker.args):
        if not (data_dir() / name).exists():
            pytest.skip(f"no real data: {data_dir() / name} is not there: set FEDFLEET_DATA")


def group(item: pytest.Item) -> str:
    """Return what a test shares fixtures with: its file, or, where each algorithm has its own histories, the algorithm."""
    case = getattr(item, "callspec", None)
    if item.path.name == "test_contract.py" and case is not None:
        return f"contract of {case.params['name']}"
    return item.path.name + str(item.path.parent.name)


class Kept:
    """A started executor that outlives the run: the next one renews it."""

    def __init__(self, executor: Executor):
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head node, which this process has joined; a test may add others, and takes them away."""
    from ray.cluster_utils import Cluster

    from fedfleet.simulator.executors.cluster import ray

    # Room for all that ``kept`` keeps, and for what a test brings.
    head = {"num_cpus": 16, "num_gpus": 1, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=found.address, log_to_driver=False, configure_logging=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="session")
def kept(cluster: Any) -> Iterator[Callable[[Prepared], Executor]]:
    """Return the workers a run asks for, those of an earlier test that asked for the same."""
    made: dict[Any, Executor] = {}
    fresh = Prepared.executor

    def executor(x: Prepared) -> Any:
        if x.asked_of_executor[0] == "local":
            return fresh(x)
        return Kept(made.setdefault(x.asked_of_executor, fresh(x)))

    yield executor
    for one in made.values():
        one.close()


@pytest.fixture(autouse=True, scope="session")
def _files_need_not_outlive_the_machine() -> Iterator[None]:
    """Leave files to the system: a run waits for the disk some forty times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "sync", lambda path: None)
        yield


@pytest.fixture(autouse=True)
def _runs_share_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests on Ray share it, but for those that start a process with a Ray of its own."""
    if request.node.get_closest_marker("ray") and not request.node.get_closest_marker("own_ray"):
        monkeypatch.setattr(Prepared, "executor", request.getfixturevalue("kept"))


def chi_square_p(counts: Any, expected: Any = None) -> float:
    """The p value of the counts against the expected ones, equal if not given."""
    from scipy.stats import chisquare

    return float(chisquare(counts, expected).pvalue)


@pytest.fixture(scope="session")
def p_value() -> Callable[..., float]:
    """The chi-square test of goodness of fit."""
    return chi_square_p
