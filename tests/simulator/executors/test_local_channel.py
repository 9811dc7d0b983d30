"""An actor of the driver's machine is called by a line, and only by one that is the driver's."""

import os
import threading
from multiprocessing.connection import wait

import pytest
import torch

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.errors import ClientError, FedfleetError
from fedfleet.simulator.executors import local_channel, shared_buffer
from fedfleet.simulator.executors.actor import ClientActor
from fedfleet.simulator.executors.cluster import dumps
from fedfleet.simulator.executors.fingerprint import Place
from fedfleet.simulator.work import Message


def bare() -> ClientActor:
    """An actor without Ray, which has nothing to run yet."""
    made = object.__new__(ClientActor)
    made._place = Place("here", {})
    return made


pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files")


class Odd(Exception):
    """An error that does not survive pickling."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def job(setup, shared, task):
    if task == "odd":
        raise Odd(1, 2)
    if task == "wrong":
        raise ValueError("no such thing")
    if task == "client":
        raise ClientError("client 3: it broke")
    if task == "lambda":
        return (i for i in range(3))
    return shared.send["z"] * task


@pytest.fixture
def served():
    """The driver's side of an actor that serves, in a thread."""
    mine = local_channel.offered(2)
    actor = bare()
    actor._setup = None
    assert actor.ready(mine.offer).near
    mine.taken()
    thread = threading.Thread(target=actor.serve)
    thread.start()
    yield mine
    mine.close()
    thread.join(10)
    assert not thread.is_alive()


def asked(mine, task):
    (message,) = shared_buffer.own(1)
    of_all = dumps((job, Message(send=message.pack({"z": torch.arange(3.0)})), message.address))
    mine.send(mine.call(7, of_all, task))
    order, found = heard(mine)
    assert order == 7
    return found


def heard(mine):
    """The next answer."""
    while not (found := mine.hear()):
        wait([mine], 10)
    return found[0]


def test_a_call_brings_an_answer(served):
    result, fault, seconds, _ = asked(served, torch.tensor(2.0)).result()
    assert seconds > 0
    assert fault is None
    assert not any(isinstance(leaf, torch.Tensor) for leaf in T.leaves(result))
    assert served.free[-1].unpack(result).tolist() == [0, 2, 4]


def test_client_code_at_fault_is_told(served):
    assert asked(served, "client").result()[:2] == (None, "client 3: it broke")


def test_errors_come_with_their_traceback_and_the_line_stays_open(served):
    for task, kind, says in (
        ("wrong", ValueError, "no such thing"),
        ("odd", FedfleetError, "Odd: 1 and 2"),
        ("lambda", TypeError, "cannot pickle 'generator' object"),
    ):
        error = asked(served, task).exception()
        assert (type(error), str(error)) == (kind, says)
        assert "Traceback" in error.__notes__[0]
        assert asked(served, torch.tensor(0.0)).exception() is None


def test_what_is_too_long_for_a_line_is_not_sent_by_it(served):
    assert served.call(0, b"x" * local_channel.LINE_BYTES, None) is None


def test_two_calls_find_room_before_anyone_listens():
    mine = local_channel.offered(2)
    for _ in range(2):
        mine.send(local_channel.STOP)
        mine.send(b"x" * local_channel.LINE_BYTES)
    mine.close()


def test_a_stop_ends_serving_and_a_call_after_it_waits_for_the_next():
    mine, actor = local_channel.offered(1), bare()
    actor._setup = None
    assert actor.ready(mine.offer).near
    mine.send(local_channel.STOP)
    mine.send(mine.call(1, dumps((job, Message(), mine.free[0].address)), "client"))
    actor.serve()
    threading.Thread(target=actor.serve, daemon=True).start()
    assert heard(mine)[1].result()[:2] == (None, "client 3: it broke")
    mine.close()


def test_an_actor_takes_no_other_line_than_the_drivers():
    actor = bare()
    mine = local_channel.offered(1)
    ((address, secret),) = mine.offer.slabs
    assert actor.ready(mine.offer).near
    assert not actor.ready(None).near
    assert not actor.ready(mine.offer._replace(slabs=((address, b"x" * shared_buffer.SECRET_BYTES),))).near
    assert not actor.ready(mine.offer._replace(slabs=(("/proc/self/fd/100000", secret),))).near
    assert not actor.ready(mine.offer._replace(asks=address)).near
    assert not actor.ready(mine.offer._replace(answers="/proc/self/fd/100000")).near
    mine.close()


def test_an_actor_that_is_gone_is_told_by_the_end_of_the_line():
    mine = local_channel.offered(1)
    mine.taken()
    mine.send(b"x")
    with pytest.raises(EOFError):
        mine.hear()
    mine.close()


def test_without_anonymous_files_there_is_no_line(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert local_channel.offered(2) is None
