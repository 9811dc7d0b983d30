"""Client code that misbehaves, run as one phase of a made-up federation."""

import asyncio
import math
import pickle
from dataclasses import replace

import pytest
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import Mean
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.errors import INEXACT, INEXACT_MEND, ClientError
from fedfleet.simulator.signals import put_off
from fedfleet.simulator.work import BatchPlan, Message, Objective

CLIENTS = [4, 1, 5]
"""Of 4, 2 and 7 examples."""


def points(result):
    return T.concat(result.partials["z"].blocks)["x"]["w"]


def test_serial_and_batched_agree_when_nothing_is_wrong(federation):
    serial, batched = (federation.run(inner, CLIENTS) for inner in ("serial", "batched"))
    torch.testing.assert_close(points(serial), points(batched))
    assert serial.loss == pytest.approx(batched.loss)
    assert len({tuple(w) for w in points(serial).tolist()}) == 3
    assert serial.steps == batched.steps == 9


def raise_at(k):
    def step(ops, shared, z, batch, at, key):
        if at.k == k:
            raise ZeroDivisionError("what the author did")
        return z

    return step


@pytest.mark.parametrize("k", [0, 2])
def test_an_exception_names_client_phase_and_step(federation, inner, k):
    with pytest.raises(ClientError, match=rf"client 4, phase 'train', stage 0, step {k}: ZeroDivisionError: what") as e:
        federation.run(inner, CLIENTS, step=raise_at(k))
    assert isinstance(e.value.__cause__, ZeroDivisionError)


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


class EndingMute(Exception):
    """An error whose words would end the program."""

    def __str__(self) -> str:
        raise SystemExit(0)


class Ending(BaseException):
    """An author's own way to end a program."""


ERRORS = [
    *(ZeroDivisionError(), SystemExit(0), SystemExit("done"), KeyboardInterrupt(), GeneratorExit(), Ending("mine")),
    *(
        asyncio.CancelledError(),
        BaseExceptionGroup("several", [KeyboardInterrupt()]),
        MemoryError(),
        Mute(),
        EndingMute(),
    ),
    *(ValueError("two\nlines \x1b[31m"), ValueError("long " * 100_000), ValueError("half \ud83d")),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_client_code_raises_is_its_fault(federation, inner, error):
    """Also where it is what ends a program, and would be taken for an interruption, or for success."""

    def fine(ops, shared, z, batch, at, key):
        return T.map(lambda w: w + 1.0, z)

    def step(ops, shared, z, batch, at, key):
        count = at.num_examples
        if torch._C._functorch.is_batchedtensor(count):  # of all clients of the block
            count = torch._C._functorch.get_unwrapped(count)
        if (count == 2).any():
            raise error
        return fine(ops, shared, z, batch, at, key)

    with put_off(), pytest.raises(ClientError, match=r"client 1, phase 'train', stage 0, step 0: \w+:") as e:
        federation.run(inner, CLIENTS, step=step)
    assert type(error).__name__ in str(e.value)
    assert "\n" not in str(e.value)
    assert len(e.value.told().encode()) < 100_000
    with put_off():
        dropped = federation.run(inner, CLIENTS, step=step, faults=Faults(on_client_error="drop_client"))
    assert [d.client for d in dropped.dropped] == [1]
    assert torch.equal(points(dropped), points(federation.run(inner, [4, 5], step=fine)))


def test_where_a_replay_fails_the_client_is_named(federation):
    def step(ops, shared, z, batch, at, key):
        return T.scale(torch.linspace(0, 1, 28).gather(0, batch.data["id"]).mean(), z)

    captures = Captures(after=0)
    for _ in range(3):
        federation.run("batched", CLIENTS, step=step, captures=captures)
    assert captures.ready == 1
    clients = federation.population
    wrong = clients.data["id"].clone()
    wrong[clients.indices[clients.offsets[1] : clients.offsets[2]]] = 99
    broken = federation.with_(population=replace(clients, data={**clients.data, "id": wrong}))
    with pytest.raises(ClientError, match=r"client 1, phase 'train', stage 0, step 0: .*index"):
        broken.run("batched", CLIENTS, step=step, captures=captures)


def test_an_exception_at_the_end_or_in_the_objective_is_named_too(federation, inner):
    def client_final(shared, client_state, client_input, z):
        raise RuntimeError("no message")

    with pytest.raises(ClientError, match="client 4, phase 'train', client_final: RuntimeError: no message"):
        federation.run(inner, CLIENTS, client_final=client_final)

    def loss(z, batch, ctx, key):
        raise ValueError("no loss")

    broken = federation.with_(objective=Objective(loss=loss, sign={"x": 1}))
    with pytest.raises(ClientError, match="client 4, phase 'train', stage 0, step 0: ValueError: no loss"):
        broken.run(inner, CLIENTS)


def test_a_weight_that_is_not_finite_names_its_client(federation, inner):
    def client_final(shared, client_state, client_input, z):
        return Message(send={"z": z}, config={"trust": z["x"]["w"].sum()}), client_state

    def step(ops, shared, z, batch, at, key):
        return {"x": {"w": z["x"]["w"] + at.num_examples}}

    fine = federation.run(inner, CLIENTS, step=step, client_final=client_final, weight="trust", reduce={"z": Mean()})
    assert fine.config["trust"].tolist() == [3 * 3 * n for n in (4, 2, 7)]

    def poisoned(shared, client_state, client_input, z):
        message, client_state = client_final(shared, client_state, client_input, z)
        trust = message.config["trust"]
        return Message(
            send=message.send, config={"trust": torch.where(trust == 3 * 3 * 2, math.nan, trust)}
        ), client_state

    with pytest.raises(ClientError, match=r"client 1, phase 'train'.*not finite in 'trust'"):
        federation.run(inner, CLIENTS, step=step, client_final=poisoned, weight="trust", reduce={"z": Mean()})


def test_a_tree_in_config_would_travel_uncounted_and_is_refused(federation, inner):
    def client_final(shared, client_state, client_input, z):
        return Message(send={"z": z}, config={"more": z["x"]["w"]}), client_state

    with pytest.raises(
        ClientError, match=r"client \d, phase 'train', client_final: .*config has 'more', a tensor of shape"
    ):
        federation.run(inner, CLIENTS, client_final=client_final)
    for value in ({"x": {"w": torch.ones(1)}}, {"x": torch.ones(2)}, torch.ones(3), [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"its config has 'lr', a t.*: put it into send"):
            Message(config={"lr": value})
    Message(config={"lr": {"x": 0.1, "y": torch.tensor(0.2)}, "mu": torch.ones(1)})


def test_draws_from_torch_are_refused_and_the_replacement_is_named(federation, inner):
    def step(ops, shared, z, batch, at, key):
        return T.map(lambda w: w + torch.rand(w.shape), z)

    with pytest.raises(ClientError, match=r"phase 'train'.*global generator.*fedfleet\.author") as e:
        federation.run(inner, CLIENTS, step=step)
    assert "executor.inner=serial" not in str(e.value)  # which would not help


def test_draws_from_the_key_are_welcome_and_equal_in_both(federation):
    def step(ops, shared, z, batch, at, key):
        return T.map(lambda w: w + rng.normal(key, w.shape), z)

    serial, batched = (points(federation.run(inner, CLIENTS, step=step)) for inner in ("serial", "batched"))
    torch.testing.assert_close(serial, batched)
    assert len(serial.unique()) == serial.numel()


def test_writing_into_what_the_server_sent_is_refused(federation, inner):
    def step(ops, shared, z, batch, at, key):
        shared["z"]["x"]["w"].add_(1.0)  # seen by the clients that come later
        return T.map(torch.clone, z)

    with pytest.raises(ClientError, match=r"phase 'train'.*wrote in place into 'z\.x\.w'"):
        federation.run(inner, CLIENTS, step=step)


BRANCH = r"phase 'train', stage 0, step 1: client code runs alone but not under vmap.*executor\.inner=serial"


def test_code_that_cannot_be_mapped_runs_serially_and_gets_a_hint_in_batches(federation):
    def step(ops, shared, z, batch, at, key):
        if at.k == 1 and batch.x.sum() > 0:
            return T.scale(5.0, z)
        return T.map(lambda w: w + 1.0, z)

    assert points(federation.run("serial", CLIENTS, step=step))[:, 0].tolist() == [6.0, 6.0, 3.0]
    for faults in (Faults(), Faults(on_client_error="drop_client", non_finite="drop_client")):  # nobody's fault
        with pytest.raises(ClientError, match=BRANCH) as e:
            federation.run("batched", CLIENTS, step=step, faults=faults)
        assert e.value.__cause__ is not None


def test_a_client_with_fewer_steps_keeps_its_last_point(federation):
    def count(ops, shared, z, batch, at, key):
        return T.map(lambda w: w + 1.0, z)

    by_epoch = federation.with_(plan=BatchPlan(size=2, epochs=1))
    for inner in ("serial", "batched"):
        found = by_epoch.run(inner, CLIENTS, step=count)
        assert found.steps == 7
        assert points(found)[:, 0].tolist() == [2, 1, 4]
        assert found.measured == 0  # no step took a gradient


def test_an_error_travels_between_processes_as_its_message():
    error = ClientError.at(3, "train", "stage 0, step 1", ValueError("bad"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ClientError
    assert str(copy) == str(error) == "client 3, phase 'train', stage 0, step 1: ValueError: bad"
    inexact = RuntimeError(f"pool {INEXACT}, but you set it")
    assert str(ClientError.at(3, "train", "step 1", inexact)).endswith(INEXACT_MEND)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda state: None, "nothing"),
        (lambda state: {"other": state["m"]}, "other"),
        (lambda state: {"m": state["m"][:1]}, r"m is \(1, 3\)"),
        (lambda state: {"m": state["m"].T}, r"m is \(3, 2\)"),
        (lambda state: {"m": state["m"].double()}, "torch.float64"),
    ],
)
def test_a_next_state_that_is_made_otherwise_is_a_fault(federation, inner, wrong, told):
    def client_final(shared, client_state, client_input, z):
        return Message(send={"z": z}), wrong(client_state)

    client_state = {"m": torch.ones(len(CLIENTS), 2, 3)}
    with pytest.raises(ClientError, match=f"client_final: ValueError: the next state.*{told}"):
        federation.run(inner, CLIENTS, client_final=client_final, client_state=client_state)


@pytest.mark.parametrize(
    ("sent", "weight", "told"),
    [
        ({}, "uniform", "Phase.reduce has z, and it sends nothing"),
        ({"z": 1}, "share", "Phase.weight is 'share'"),
        ({"z": 1, "loss": 1}, "uniform", "it sends loss, which Phase.reduce has not"),
    ],
)
def test_what_is_sent_is_what_the_phase_reduces(federation, inner, sent, weight, told):
    def client_final(shared, client_state, client_input, z):
        return Message(send=dict.fromkeys(sent, z)), client_state

    with pytest.raises(ClientError, match=f"client_final: ValueError: {told}"):
        federation.run(inner, CLIENTS, client_final=client_final, weight=weight, reduce={"z": Mean()})
