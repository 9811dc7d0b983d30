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
