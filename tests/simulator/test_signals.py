"""An interruption of this process finds a block of clients done, or not begun."""

import signal

import pytest
import torch
import torch._functorch.vmap as functorch

from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.signals import put_off


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
