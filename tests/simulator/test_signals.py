"""An interruption of this process finds a block of clients done, or not begun."""

import asyncio
import importlib
import signal
import sys
import time

import pytest
import torch
import torch._functorch.vmap as functorch

from fedfleet.simulator import signals
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.signals import EndsProgram, after_imports, contained, put_off


class Placed:
    def placed(self):
        return self


@pytest.fixture
def executor():
    executor = LocalExecutor()
    executor.start(Placed())
    yield executor
    executor.close()


def test_a_block_comes_to_its_end_before_an_interruption(executor, monkeypatch):
    """As ``vmap`` begins, where the exception would leave the process under it for ever."""
    increment = functorch._vmap_increment_nesting
    done = []

    def interrupted(*args):
        level = increment(*args)
        signal.raise_signal(signal.SIGINT)
        return level

    monkeypatch.setattr(functorch, "_vmap_increment_nesting", interrupted)

    def job(setup, shared, task):
        done.append(torch.func.vmap(torch.square)(torch.arange(task + 1.0)))

    with pytest.raises(KeyboardInterrupt):
        list(executor.map(job, None, [3, 4]))
    assert [found.tolist() for found in done] == [[0, 1, 4, 9]]
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    torch.rand(2)  # refused under vmap


def test_a_second_interruption_does_not_wait(executor):
    began = []

    def job(setup, shared, task):
        began.append("first")
        signal.raise_signal(signal.SIGINT)
        began.append("second")
        signal.raise_signal(signal.SIGINT)
        began.append("after")

    with pytest.raises(KeyboardInterrupt):
        list(executor.map(job, None, [0]))
    assert began == ["first", "second"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the handler is what it was


def test_what_must_not_be_torn_apart_waits_for_any_number_of_them():
    done = []

    def critical():
        with put_off():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        critical()
    assert done == ["all"]


def test_an_interruption_while_handlers_are_put_back_loses_no_other(monkeypatch):
    """SIGINT is put back first; when it strikes then, SIGTERM is still the collector's."""
    put, times, terms = signal.signal, [], []
    before = put(signal.SIGTERM, lambda *_: terms.append(1))

    def interrupted(number, handler):
        found = put(number, handler)
        times.append(number)
        if len(times) == 3:  # two are taken over, one is back
            signal.raise_signal(signal.SIGINT)
        return found

    def critical():
        with put_off():
            pass

    try:
        monkeypatch.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            critical()
        signal.raise_signal(signal.SIGTERM)
    finally:
        put(signal.SIGTERM, before)
    assert terms == [1]


def test_a_signal_that_is_ignored_is_no_interruption(executor):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        (done,) = executor.map(lambda *_: [signal.raise_signal(signal.SIGINT) for _ in range(3)], None, [0])
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(done) == 3


def test_a_torn_block_leaves_no_transform_behind(executor):
    def job(setup, shared, task):
        def twice(x):
            torch._C._functorch._vmap_increment_nesting(3, "error")  # as if torn before it could be undone
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            return x

        torch.func.vmap(twice)(torch.zeros(2))

    with pytest.raises(KeyboardInterrupt):
        list(executor.map(job, None, [0]))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    torch.rand(2)


def test_what_looks_like_an_interruption_is_one_where_a_signal_has_come(executor, subtests):
    def leave(*_):
        raise SystemExit(3)

    def user1():
        signal.raise_signal(signal.SIGUSR1)

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGUSR1, lambda *_: leave())
    try:
        for name, code, wanted in (
            ("sys.exit", leave, EndsProgram),
            ("a generator that ends", lambda: (_ for _ in ()).throw(GeneratorExit), EndsProgram),
            ("what ends a task", lambda: (_ for _ in ()).throw(asyncio.CancelledError), EndsProgram),
            ("a handler of a signal", user1, SystemExit),
            ("two interruptions", twice, KeyboardInterrupt),
        ):
            with subtests.test(name), pytest.raises(wanted), put_off(insist=True), contained():
                code()
    finally:
        signal.signal(signal.SIGUSR1, before)


def _imported_and_then(module):
    assert importlib.import_module(module).whole
    time.sleep(60)


def test_an_import_under_way_comes_to_its_end_before_an_interruption(tmp_path, monkeypatch):
    module = f"torn_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(
        "import signal\nfor _ in range(3): signal.raise_signal(signal.SIGINT)\nwhole = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, after_imports(signal.default_int_handler))
    try:
        with pytest.raises(KeyboardInterrupt):
            _imported_and_then(module)
        assert sys.modules[module].whole
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # with no import under way, at once
        monkeypatch.setattr(signals, "IMPORT_S", 0.0)
        (tmp_path / f"{module}_long.py").write_text((tmp_path / f"{module}.py").read_text())
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module(f"{module}_long")
        assert f"{module}_long" not in sys.modules
    finally:
        time.sleep(2 * signals.AGAIN_S)  # those that are still to come
        signal.signal(signal.SIGINT, before)
