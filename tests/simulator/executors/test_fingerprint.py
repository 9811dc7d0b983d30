"""Workers that are not like the driver, or read other data, are refused in a line that names their node, or go on record."""

import importlib
import json
import py_compile
import sys
import sysconfig
import zipfile
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

import fedfleet
from fedfleet.assembly.user_parts import read_by_workers
from fedfleet.datasets.convert import convert
from fedfleet.datasets.disk import EXAMPLES, DiskPopulation
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors import actor, fingerprint, pool, pool_spec
from fedfleet.simulator.executors import ray as executor
from fedfleet.simulator.executors.actor import ClientActor, Ready
from fedfleet.simulator.executors.fingerprint import (
    DATA,
    Fingerprint,
    LoadedModules,
    Place,
    of_modules,
    of_process,
    on_path,
    source,
)
from fedfleet.simulator.executors.pool import Pool, Unlike
from fedfleet.simulator.executors.ray import RayExecutor
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import Message
from tests.refusals import refused
from tests.simulator.executors.threads import reducer, threaded

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import tests

MINE = {"torch": "2.0", "numpy": "2.0", DATA: "/d sha256 aa"}
OTHER = Place("10.0.0.3", {**MINE, "torch": "1.0"})
REFUSED = (
    "executor: node 10.0.0.3 is not like the driver's (torch: 1.0, here 2.0): bits may differ: give both the same, or set "
    "executor.allow_differences=true"
)
FIX = "copy the driver's there, or give a path that all nodes share"


def test_a_node_with_other_versions_is_refused_and_one_with_the_same_is_not():
    events = []
    mine = Fingerprint(MINE, events, allow=False)
    assert mine.fault(Place("10.0.0.2", dict(MINE))) is None
    assert mine.fault(OTHER) == REFUSED
    assert events == []


def test_a_node_with_other_versions_is_allowed_by_a_key_and_said_once():
    events = []
    mine = Fingerprint(MINE, events, allow=True)
    assert [mine.fault(OTHER) for _ in range(2)] == [None, None]
    assert mine.fault(OTHER._replace(node="10.0.0.4")) is None
    said = [{"event": "unlike_node", "node": node, "differs": {"torch": ["2.0", "1.0"]}} for node in ("3", "4")]
    assert events == [{**one, "node": f"10.0.0.{one['node']}", "bit_exact": False} for one in said]


@pytest.mark.parametrize("allow", [False, True])
def test_other_data_and_what_cannot_be_read_are_never_allowed(allow):
    mine = Fingerprint(MINE, [], allow=allow)
    data = Place("10.0.0.3", {**MINE, DATA: "/d sha256 bb"})
    assert mine.fault(data) == (
        f"executor: node 10.0.0.3 has other data than the driver (/d sha256 bb, here /d sha256 aa): {FIX}"
    )
    assert mine.fault(Place("10.0.0.3", {}, "no")) == "executor: node 10.0.0.3 cannot take part: no"


def test_what_the_driver_has_not_is_compared_between_workers():
    mine = Fingerprint(MINE, [], allow=False)
    assert mine.fault(Place("a", {**MINE, "GPU": "one"})) is None
    assert mine.fault(Place("b", {**MINE, "GPU": "one"})) is None
    assert "node c is not like the driver's (GPU: two, here one)" in (
        mine.fault(Place("c", {**MINE, "GPU": "two"})) or ""
    )


def test_a_process_tells_what_bits_depend_on():
    found = of_process()
    assert found["torch"] == version("torch")
    assert found["Python"] == sys.version.split()[0]
    assert found["processor"].endswith(torch.backends.cpu.get_cpu_capability())
    assert {*fingerprint.PACKAGES, "source of fedfleet"} <= set(found)


def test_modules_of_authors_are_told_by_what_they_hold_and_no_others(tmp_path, monkeypatch):
    path = tmp_path / "a_net_of_mine.py"
    path.write_text("WIDTH = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("a_net_of_mine")
    try:
        found = of_modules()
        name = "module a_net_of_mine"
        assert found[name].startswith("sha256 ")
        assert not [
            k for k in found if k.split()[1].partition(".")[0] in ("fedfleet", "torch", "json", "ray", "__main__")
        ]
        path.write_text("WIDTH = 4  # since it was loaded\n")
        assert of_modules()[name] == found[name]
        importlib.reload(module)
        assert {k for k, v in of_modules().items() if found.get(k) != v} == {name}
        mine = Fingerprint(MINE, [], allow=False)
        assert mine.fault(Place("a", {**MINE, **of_modules()})) is None
        said = mine.fault(Place("b", {**MINE, **found}))
        assert said is not None
        assert f"node b is not like the driver's ({name}: {found[name]}, here {of_modules()[name]})" in said
    finally:
        del sys.modules["a_net_of_mine"]


def test_what_pip_puts_into_a_folder_of_its_own_is_installed(tmp_path, monkeypatch):
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    fingerprint._installed.cache_clear()
    try:
        assert not fingerprint._is_authors(str(tmp_path / "theirs" / "a.py"))
        assert fingerprint._is_authors(str(tmp_path.parent / "mine.py"))
    finally:
        fingerprint._installed.cache_clear()
    assert not [k for k in of_modules() if "__mp_main__" in k]


LAZY, HELPER = "a_helper_of_mine", "WIDTH = 3\n"


@pytest.fixture
def lazy(tmp_path, monkeypatch):
    """The file of a module, and of one in a package, that nothing has loaded yet."""
    (tmp_path / f"{LAZY}s").mkdir()
    for name in (f"{LAZY}.py", f"{LAZY}s/__init__.py", f"{LAZY}s/inner.py"):
        (tmp_path / name).write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / f"{LAZY}.py"
    for name in (LAZY, f"{LAZY}s", f"{LAZY}s.inner"):
        sys.modules.pop(name, None)


def without_ray(monkeypatch):
    """Let an actor be made outside of Ray, which would join another process's Ray to tell where it is."""
    monkeypatch.setattr(actor.ray, "get", lambda given: given)
    monkeypatch.setattr(actor.ray.util, "get_node_ip_address", lambda: "10.0.0.3")
    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a" * 56))


def test_a_module_that_client_code_imports_as_it_is_called_is_told_once(tmp_path, lazy, monkeypatch):
    def job(setup, shared, task):
        importlib.import_module(task)

    one = object.__new__(ClientActor)
    without_ray(monkeypatch)
    one._take([on_disk(disk(tmp_path))])
    told = [set(one.run(job, None, name).modules) for name in (LAZY, LAZY, f"{LAZY}s.inner", "json")]
    assert told == [{f"module {LAZY}"}, set(), {f"module {LAZY}s", f"module {LAZY}s.inner"}, set()]


COMPILED = "xxlimited"  # which Python is built with as an example, and nothing loads
KINDS = (LAZY, f"{LAZY}s.inner", f"{LAZY}_bare.inner", f"{LAZY}_pyc", f"{LAZY}_zip", COMPILED, "library")


def written(folder, width):
    """Write code of every kind that Python loads: a file, in a package, in a mere folder, bytecode, in an archive, compiled."""
    text = f"WIDTH = {width}\n"
    for name in (f"{LAZY}.py", f"{LAZY}s/__init__.py", f"{LAZY}s/inner.py", f"{LAZY}_bare/inner.py", "source.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(folder / "source.py"), str(folder / f"{LAZY}_pyc.pyc"), "source.py", invalidation_mode=mode)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr(f"{LAZY}_zip.py", text)
    name = f"{COMPILED}{EXTENSION_SUFFIXES[0]}"
    found = Path(sysconfig.get_config_var("DESTSHARED") or ".") / name
    for copy in (name, "library.so") if found.exists() else ():
        (folder / copy).write_bytes(found.read_bytes() + bytes(width))  # which loads all the same
    return folder


@contextmanager
def in_place_of(folder):
    """Have Python look into a folder first, as on a node where others are; forget what was loaded from there."""
    before, libraries = sys.path[:], {*torch.ops.loaded_libraries}
    sys.path[:0] = [str(folder), str(folder / "archive.zip")]
    try:
        yield
    finally:
        sys.path[:] = before
        torch.ops.loaded_libraries &= libraries
        for name in [n for n in sys.modules if n.partition(".")[0].startswith((LAZY, COMPILED))]:
            del sys.modules[name]
        fingerprint._first_seen.pop("library library.so", None)


def load(name):
    """Do as an author's code does that needs some other only once it is called."""
    if name == "library":
        torch.ops.load_library(Path(sys.path[0]) / "library.so")
    else:
        importlib.import_module(name)


class Loading:
    """Sharing of a task that loads something as its parts are joined."""

    def join(self, parts, results):
        load(*parts)


def by_an_actor(name):
    one = object.__new__(ClientActor)
    one._setup, one._loaded = None, LoadedModules()
    one._loaded.new()
    return one.run(lambda setup, shared, task: load(task), None, name).modules


def by_a_reducer(name):
    return reducer().join(Loading(), [name]).place.has


@pytest.mark.parametrize("place", [by_an_actor, by_a_reducer])
def test_code_of_any_kind_that_any_place_loads_late_is_compared(tmp_path, subtests, place):
    folders = {at: written(tmp_path / at, 3 + (at == "other")) for at in ("driver", "same", "other")}
    for name, at in product(KINDS, ("same", "other")):
        if name in (COMPILED, "library") and not (folders[at] / "library.so").exists():
            continue  # this Python has all of its own built in
        with subtests.test(name, at=at):
            with in_place_of(folders[at]):
                told = place(name)
            mine = Fingerprint(MINE, [], allow=False)
            with in_place_of(folders["driver"]):
                if name == "library":  # which no path tells of
                    load(name)
                fault = mine.fault(Place("10.0.0.3", told))
            key = "library library.so" if name == "library" else f"module {name}"
            assert key in told
            if at == "same":
                assert fault is None
            else:
                assert str(fault).startswith("executor: node 10.0.0.3 is not like the driver's (")
                assert f"{key}: {told[key]}, here sha256 " in str(fault)


def test_what_the_driver_loads_after_workers_did_is_compared_with_theirs(lazy, monkeypatch):
    with threaded(1, monkeypatch) as executor:
        mine = executor._likeness
        assert mine.fault(Place("10.0.0.3", {f"module {LAZY}": str(before := on_path(LAZY))})) is None
        assert list(executor.map(lambda *given: given[2], Message(), ["a"])) == ["a"]
        lazy.write_text("WIDTH = 4  # edited meanwhile\n")
        importlib.import_module(LAZY)
        with pytest.raises(Unlike, match=r"node 10\.0\.0\.3 is not like the driver's") as told:
            executor.map(lambda *given: given[2], Message(), ["a"])
        assert f"(module {LAZY}: {before}, here {on_path(LAZY)})" in str(told.value)


def test_what_torch_compiles_is_nobodys_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert not fingerprint._is_authors(str(tmp_path / "ab" / f"kernel{EXTENSION_SUFFIXES[0]}"))


def test_what_no_process_of_the_drivers_has_loaded_is_compared_with_its_file(lazy):
    for name in (LAZY, f"{LAZY}s.inner"):
        known = on_path(name)
        mine = Fingerprint(MINE, [], allow=False)
        assert mine.fault(Place("a", {f"module {name}": str(known)})) is None
        assert f"(module {name}: sha256 other, here {known})" in str(
            mine.fault(Place("b", {f"module {name}": "sha256 other"}))
        )
        assert name not in sys.modules
    assert on_path(f"{LAZY}.inner") is on_path("nobody_has_it") is None
    between = Fingerprint(MINE, [], allow=False)  # of workers, where the driver has none
    assert between.fault(Place("a", {"module nobody_has_it": "sha256 one"})) is None
    assert "here sha256 one" in str(between.fault(Place("b", {"module nobody_has_it": "sha256 other"})))


def test_a_worker_that_comes_tells_what_it_would_load_of_modules_that_others_have(tmp_path, lazy, monkeypatch):
    inner = f"{LAZY}s.inner"
    mine = Fingerprint(MINE, [], allow=False)
    assert f"module {LAZY}" not in mine.modules()
    importlib.import_module(LAZY)
    mine.fault(Place("a", {**MINE, f"module {inner}": "sha256 other", "module nobody_has_it": "sha256 one"}))
    names = mine.modules()
    assert {f"module {LAZY}", f"module {inner}", "module nobody_has_it"} <= {*names}
    here = on_path(LAZY)
    lazy.write_text("WIDTH = 4  # on that node\n")
    del sys.modules[LAZY]
    without_ray(monkeypatch)
    place = object.__new__(ClientActor)._take([on_disk(disk(tmp_path)), *names])
    assert place.has[f"module {LAZY}"] == on_path(LAZY) != here
    assert place.has[f"module {inner}"] == on_path(inner)
    assert "module nobody_has_it" not in place.has
    assert f"module {LAZY}: {on_path(LAZY)}, here {here}" in str(mine.fault(place))


def test_a_module_of_folders_that_are_no_packages_is_found(tmp_path, monkeypatch):
    (tmp_path / "a_folder_of_mine" / "below").mkdir(parents=True)
    (tmp_path / "a_folder_of_mine" / "below" / "net.py").write_text("WIDTH = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(on_path("a_folder_of_mine.below.net")).startswith("sha256 ")
    assert {*map(on_path, ("a_folder_of_mine", "a_folder_of_mine.net", "a_folder_of_mine.below.net.x"))} == {None}


def test_a_digest_of_source_tells_files_their_names_and_what_they_hold(tmp_path):
    package, linked = tmp_path / "package", tmp_path / "elsewhere"
    package.mkdir()
    linked.mkdir()
    (package / "a.py").write_text("x = 1\n")
    (linked / "b.py").write_text("y = 1\n")
    (package / "below").symlink_to(linked)
    seen = [source(package)]
    (package / "notes.txt").write_text("no module")
    assert source(package) == seen[0]
    (linked / "b.py").write_text("y = 2\n")
    seen.append(source(package))
    (package / "a.py").rename(package / "c.py")
    seen.append(source(package))
    assert len(set(seen)) == 3


def on_places(fault, monkeypatch, size=2):
    """Return a pool on actors made up, and what happens to them."""
    monkeypatch.setattr(pool.ray, "kill", lambda actor: None)
    up, events = Future(), []
    up.set_result(Ready(False, Place("10.0.0.3", {})))
    ready = SimpleNamespace(remote=lambda offer: SimpleNamespace(future=lambda: up))
    return Pool(size, lambda: SimpleNamespace(ready=ready), events, fault), events


def come(found):
    while found.starting:
        found.event_queue.answer()


def test_an_actor_that_is_not_like_the_driver_ends_the_start(monkeypatch):
    with pytest.raises(Unlike, match="not like"):
        on_places(lambda place: f"{place.node} is not like", monkeypatch)[0].start()


def test_one_that_comes_later_is_given_up_and_the_others_go_on(monkeypatch):
    like = [None]
    found, events = on_places(lambda place: like[0], monkeypatch)
    found.start()
    like[0] = "node 10.0.0.3 is not like"
    found.replace(found.slots[0])
    come(found)
    assert [(e["event"], e.get("why")) for e in events] == [
        *[("worker_died", "node 10.0.0.3 is not like")] * 3,
        ("worker_retired", None),
    ]
    assert found.idlest() is found.slots[1]
    found.replace(found.slots[1])
    with pytest.raises(Unlike, match=r"^node 10\.0\.0\.3 is not like$"):
        come(found)


def taken(setup, monkeypatch):
    """Return what an actor without Ray tells of itself."""
    without_ray(monkeypatch)
    return object.__new__(ClientActor)._take([setup])


def disk(tmp_path, seed=0):
    """Return a folder of ten clients of six examples."""
    x = np.random.default_rng(seed).normal(size=(60, 4))
    columns = {f"f{i}": x[:, i] for i in range(4)}
    owners = np.arange(60) // 6
    pq.write_table(pa.table({"client": owners, "y": (x.sum(1) > 0).astype(int), **columns}), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / f"clients-{seed}")
    return tmp_path / f"clients-{seed}"


def on_disk(folder):
    empty = {name: {} for name in ("phases", "objectives", "functions", "evaluation")}
    return Setup(population=DiskPopulation(folder), **empty, inner="serial", reads=read_by_workers)


def test_a_node_without_the_folder_says_so(tmp_path, monkeypatch):
    setup = on_disk(disk(tmp_path))
    assert taken(setup, monkeypatch).fault is None
    setup.population.folder.rename(tmp_path / "gone")
    fault = taken(setup, monkeypatch).fault
    assert fault == (
        "it cannot read the clients' data (No such file or directory: "
        f"'{setup.population.folder}/population.json'): {FIX}"
    )


def test_a_module_that_a_node_lacks_is_named(monkeypatch):
    def lacking(given):
        raise ray.exceptions.RaySystemError(
            "System error: No module named 'mine'\ntraceback: …\nModuleNotFoundError: x"
        )

    place = taken(None, monkeypatch)
    monkeypatch.setattr(actor.ray, "get", lacking)
    has = {k: v for k, v in place.has.items() if not k.startswith("module ")}  # which is told once they are loaded
    assert object.__new__(ClientActor)._take([None]) == Place(place.node, has, "ModuleNotFoundError: x", place.id)


@pytest.mark.parametrize("at", [0, 1 << 19, -1])
def test_a_byte_of_a_folder_that_differs_is_seen(tmp_path, at):
    folder = disk(tmp_path)
    with (folder / EXAMPLES).open("ab") as file:  # over several pieces
        file.write(bytes(1 << 20))
    before, content = DiskPopulation(folder).content(), bytearray((folder / EXAMPLES).read_bytes())
    assert DiskPopulation(folder).content() == before
    content[at] ^= 1
    (folder / EXAMPLES).write_bytes(content)
    assert DiskPopulation(folder).content() != before


def test_what_workers_read_for_themselves(tmp_path):
    one, other = (DiskPopulation(disk(tmp_path, seed)) for seed in (0, 1))
    assert read_by_workers(HeldOut(one, 0.5, 0)) == read_by_workers(one) == {DATA: one.content()}
    assert one.content().rpartition(" ")[2] != other.content().rpartition(" ")[2]
    travels = fedfleet.Experiment(fedfleet.load({"executor": {"kind": "local"}})).population
    assert isinstance(travels, InMemoryPopulation)
    assert read_by_workers(travels) == {}

    class Own:
        """Clients as of a folder, which does not say what tells it."""

        def __init__(self, whole):
            self.size, self.local_data = whole.size, whole.local_data

    assert len({*read_by_workers(Own(one)).values(), *read_by_workers(Own(other)).values()}) == 2
    assert DATA not in read_by_workers(Own(one))


def test_no_differences_are_allowed_where_there_is_one_process():
    given = {"executor": {"kind": "local", "allow_differences": True}}
    refused(lambda: fedfleet.Experiment(fedfleet.load(given)), "executor.allow_differences=True")


class Older(ClientActor):
    """An actor of a node with another torch."""

    def _has(self):
        return {**super()._has(), "torch": "0.1"}


def experiment(folder, monkeypatch=None, **how):
    config = {
        "rounds": 2,
        "population": {"dataset": {"name": "disk", "path": str(folder)}},
        "task": {"model": "logistic"},
        "cohort": {"size": 4},
        "algorithm": {"batch_size": 2},
        "executor": {"kind": "local", "block_size": 2, "inner": "batched"},
    }
    x = fedfleet.Experiment(fedfleet.load(config))
    if monkeypatch is not None:
        monkeypatch.setattr(x, "executor", lambda: RayExecutor(1, cpus_per_actor=0.1, **how))
    return x


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_with_an_unlike_node_says_that_its_bits_may_be_others(tmp_path, cluster, monkeypatch):
    folder = disk(tmp_path)
    monkeypatch.setattr(pool_spec, "ClientActor", Older)
    run = experiment(folder, monkeypatch, allow_differences=True).run(tmp_path / "ray")
    events = [json.loads(line) for line in (tmp_path / "ray" / "events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["differs"]) for e in events] == [("unlike_node", {"torch": [of_process()["torch"], "0.1"]})]
    assert run.summary["bit_exact"] is False
    assert experiment(folder).run(tmp_path / "local").summary["bit_exact"] is True


class Lazily(ClientActor):
    """An actor of a node with another copy of a module that client code imports as it is called."""

    def run(self, job, shared, task):
        return super().run(job, shared, task)._replace(modules={f"module {LAZY}": "sha256 other"})


@pytest.mark.ray
@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.slow
def test_a_module_that_is_another_on_a_node_is_seen_though_it_comes_late(tmp_path, cluster, monkeypatch, lazy, allow):
    monkeypatch.setattr(pool_spec, "ClientActor", Lazily)
    x, out = experiment(disk(tmp_path), monkeypatch, allow_differences=allow), tmp_path / "run"
    if not allow:
        text = refused(lambda: x.run(out), "executor: node ", FedfleetError)
        assert f"(module {LAZY}: sha256 other, here {on_path(LAZY)})" in text
        assert json.loads((out / "summary.json").read_text())["status"] == "failed"
        return
    assert x.run(out).summary["bit_exact"] is False
    (event,) = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert event["differs"] == {f"module {LAZY}": [on_path(LAZY), "sha256 other"]}


class Whole:
    """Sharing of the two halves of a task, which needs a module, that of another node, as they are joined."""

    def __init__(self, folder):
        self.folder = folder

    def split(self, task):
        return [*task]

    def bare(self, part):
        return part

    def join(self, parts, results):
        sys.path.insert(0, self.folder)
        return "".join(results) + str(importlib.import_module(LAZY).WIDTH)


@pytest.mark.ray
@pytest.mark.slow
def test_a_module_that_is_another_where_answers_are_reduced_is_seen_in_every_run(tmp_path, cluster, monkeypatch, lazy):
    monkeypatch.setattr(pool, "offered", lambda slabs: None)  # as on another machine
    (tmp_path / "elsewhere").mkdir()
    setup, words = on_disk(disk(tmp_path)), ["ab"]
    for text, wanted in ((HELPER, ["ab3"]), ("WIDTH = 4\n", None)):
        (tmp_path / "elsewhere" / f"{LAZY}.py").write_text(text)
        executor = RayExecutor(1, cpus_per_actor=0.1)
        try:
            for _ in range(2):  # another run is told again
                executor.start(setup)
                joined = executor.map(
                    lambda *given: given[2], Message(), words, sharding=Whole(str(tmp_path / "elsewhere"))
                )
                if wanted is not None:
                    assert list(joined) == wanted
                    continue
                with pytest.raises(Unlike, match=f"module {LAZY}: sha256 "):
                    list(joined)
        finally:
            executor.close()


@pytest.mark.ray
@pytest.mark.slow
def test_an_actor_that_joins_after_the_driver_loaded_another_module_is_not_taken(tmp_path, cluster, monkeypatch, lazy):
    folder, elsewhere = disk(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{LAZY}.py").write_text("WIDTH = 4\n")

    class Behind(ClientActor):
        def _take(self, setup):
            sys.path.insert(0, str(elsewhere))
            return super()._take(setup)

    class Joining(fedfleet.Callback):
        def start(self, run):
            importlib.import_module(LAZY)
            made[0]._pool.replace(made[0]._pool.slots[0])

    made = []
    monkeypatch.setattr(pool_spec, "ClientActor", Behind)
    x = experiment(folder, monkeypatch)
    make = x.executor
    monkeypatch.setattr(x, "executor", lambda: made.append(make()) or made[-1])
    text = refused(lambda: x.run(tmp_path / "run", Joining()), "executor: node ", FedfleetError)
    assert f"module {LAZY}: " in text
    assert f", here {on_path(LAZY)}" in text


@pytest.mark.ray
def test_a_node_whose_folder_has_other_content_ends_the_run(tmp_path, cluster, monkeypatch):
    folder = disk(tmp_path)

    def then_changed(*given, **named):
        content = bytearray((folder / EXAMPLES).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / EXAMPLES).write_bytes(content)
        return Fingerprint(*given, **named)

    x = experiment(folder, monkeypatch)
    here, make = x.setup().read_here()[DATA], x.executor

    def made():
        found = make()
        monkeypatch.setattr(executor, "Fingerprint", then_changed)
        return found

    monkeypatch.setattr(x, "executor", made)
    text = refused(lambda: x.run(tmp_path / "run"), "executor: node ", FedfleetError)
    assert f", here {here}): {FIX}" in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["rounds"]) == ("failed", text, 0)
