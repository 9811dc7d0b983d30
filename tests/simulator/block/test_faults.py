"""Clients at fault in one block: who is named, who is dropped, and that the others are run as a block of their own."""

import math

import pytest
import torch

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads, Mean
from fedfleet.simulator.block.faults import Dropped, Faults, finite, not_finite
from fedfleet.simulator.errors import ClientError
from fedfleet.simulator.work import Message

CLIENTS = [4, 1, 5]
"""Of 4, 2 and 7 examples."""
DROP = Faults(on_client_error="drop_client", non_finite="drop_client")
KEEP = Faults(non_finite="keep")
DIVERGED = (
    "training diverged, so lower the learning rates, or clip gradients, as by algorithm.client_optimizer.clip_norm"
)


def equal(a, b):
    """Every field but ``dropped``, to the bit."""
    for name in a._fields:
        if name not in ("dropped", "splits"):
            mine, its = getattr(a, name), getattr(b, name)
            T.map(
                lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True),
                *map(as_tree, (mine, its)),
            )


def as_tree(value):
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, int | float) else value


def look_up(ops, shared, z, batch, at, key):
    """A gradient step, and a look into a table that is too short for clients of more than four examples."""
    entry = torch.zeros(5).index_select(0, at.num_examples[None])
    return T.map(lambda w: w + entry.sum(), ops.step("train", z, 0.1, ops.grad("train", z, batch, key)[0]))


def poisoned(value, k=1, examples=2):
    """A gradient step that goes wrong at local step ``k`` for clients of so many examples."""

    def step(ops, shared, z, batch, at, key):
        moved = ops.step("train", z, 0.1, ops.grad("train", z, batch, key)[0])
        wrong = (at.num_examples == examples) & torch.tensor(at.k == k)
        return T.map(lambda w: torch.where(wrong, value, w), moved)

    return step


@pytest.mark.parametrize("reduction", [Mean(), CollectUploads()])
def test_a_client_that_raises_is_dropped_and_the_others_are_run_without_it(federation, inner, reduction):
    given = {"step": look_up, "reduce": {"z": reduction}, "weight": "num_examples"}
    found = federation.run(inner, CLIENTS, **given, faults=DROP)
    (dropped,) = found.dropped
    why = "stage 0, step 0: IndexError: index out of range in self"
    assert dropped._replace(traceback=None) == Dropped(2, 5, why, bit_exact=False)
    assert dropped.traceback.startswith("Traceback (most recent call last)")
    assert "in look_up" in dropped.traceback
    equal(found, federation.run(inner, CLIENTS[:2], **given))
    with pytest.raises(ClientError) as e:
        federation.run(inner, CLIENTS, **given)
    assert str(e.value) == f"client 5, phase 'train', {why}"
    assert isinstance(e.value.__cause__, IndexError)


def test_a_client_at_fault_is_dropped_once_from_a_block_that_is_filled_with_it(federation, inner):
    given = {"step": poisoned(math.inf), "reduce": {"z": Mean()}, "buckets": (2, 6)}
    found = federation.run(inner, [1, 4, 5], **given, faults=DROP)
    why = "it sends a value that is not finite in 'z', first seen after stage 0, step 1"
    assert found.dropped == (Dropped(0, 1, why, bit_exact=True),)
    equal(found, federation.run(inner, [4, 5], **given))
    given["step"] = look_up
    assert [d.row for d in federation.run(inner, [5, 1, 4], **given, faults=DROP).dropped] == [0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_client_that_sends_what_is_not_finite_is_dropped(federation, inner, value):
    given = {"step": poisoned(value), "reduce": {"z": Mean()}}
    found = federation.run(inner, CLIENTS, **given, faults=DROP)
    why = "it sends a value that is not finite in 'z', first seen after stage 0, step 1"
    assert found.dropped == (Dropped(1, 1, why, bit_exact=True),)
    equal(found, federation.run(inner, [4, 5], **given))
    with pytest.raises(ClientError) as e:
        federation.run(inner, CLIENTS, **given)
    assert str(e.value) == f"client 1, phase 'train': {why}: {DIVERGED}"
    kept = federation.run(inner, CLIENTS, step=poisoned(value), faults=KEEP)
    sent = T.concat(kept.partials["z"].blocks)["x"]["w"]
    assert (~sent.isfinite()).all(1).tolist() == [False, True, False]
    assert kept.dropped == ()


def keep_count(value):
    """Clients of two examples keep ``value``, others the number of their examples; all send their point."""

    def client_final(shared, client_state, client_input, z):
        seen = client_state["seen"] + 1
        return Message(send={"z": z}, config={"seen": seen}), {
            "seen": torch.where(client_state["seen"] == 2, value, seen)
        }

    return client_final


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_state_that_is_not_finite_counts_though_all_that_is_sent_is_finite(federation, inner, value):
    client_state = {"seen": torch.tensor([4.0, 2.0, 7.0])}
    found = federation.run(inner, CLIENTS, client_final=keep_count(value), client_state=client_state, faults=DROP)
    assert found.dropped == (Dropped(1, 1, "its state is not finite in 'seen'", bit_exact=True),)
    assert found.client_state["seen"].tolist() == [5.0, 8.0] == found.config["seen"].tolist()
    assert client_state["seen"].tolist() == [4.0, 2.0, 7.0]
    with pytest.raises(ClientError) as e:
        federation.run(inner, CLIENTS, client_final=keep_count(value), client_state=client_state)
    assert str(e.value) == f"client 1, phase 'train': its state is not finite in 'seen': {DIVERGED}"
    kept = federation.run(inner, CLIENTS, client_final=keep_count(value), client_state=client_state, faults=KEEP)
    assert kept.client_state["seen"].isfinite().tolist() == [True, False, True]


def test_one_kind_of_fault_can_be_dropped_and_the_other_not(federation, inner):
    raising, diverging = Faults(on_client_error="drop_client"), Faults(non_finite="drop_client")
    with pytest.raises(ClientError, match=r"client 1.*not finite"):
        federation.run(inner, CLIENTS, step=poisoned(math.nan), faults=raising)
    with pytest.raises(ClientError, match=r"client 5.*IndexError"):
        federation.run(inner, CLIENTS, step=look_up, faults=diverging)

    def both(ops, shared, z, batch, at, key):
        return poisoned(math.nan)(ops, shared, look_up(ops, shared, z, batch, at, key), batch, at, key)

    found = federation.run(inner, CLIENTS, step=both, faults=DROP)
    assert [(d.row, d.client, d.traceback is None) for d in found.dropped] == [(1, 1, True), (2, 5, False)]
    equal(found, federation.run(inner, [4], step=both))


def test_where_all_are_dropped_nothing_comes_back(federation, inner):
    def step(ops, shared, z, batch, at, key):
        raise ValueError("what\nthe author did")

    found = federation.run(inner, CLIENTS, step=step, faults=DROP)
    assert [(d.row, d.client, d.why) for d in found.dropped] == [
        (i, c, "stage 0, step 0: ValueError: what the author did") for i, c in enumerate(CLIENTS)
    ]
    assert (found.partials, found.config, found.client_state, len(found.losses)) == ({"z": None}, {}, None, 0)
    assert found.steps == found.measured == found.floats_up == found.bytes_up == 0


def test_a_sum_that_overflows_is_nobodys_fault(federation, inner):
    def step(ops, shared, z, batch, at, key):
        return T.map(lambda w: torch.full_like(w, 3e38), z)

    for faults in (Faults(), DROP):
        with pytest.raises(ClientError) as e:
            federation.run(inner, CLIENTS, step=step, reduce={"z": Mean()}, faults=faults)
        assert str(e.value) == (
            "phase 'train': the sum of what clients send overflows, though each is finite: lower the learning rates"
        )


@pytest.mark.parametrize("where", ["shared", "client_state"])
def test_who_writes_in_place_before_it_raises_is_not_dropped(federation, inner, where):
    def client_final(shared, client_state, client_input, z):
        if int(client_state["seen"]) == 7:
            (shared["z"]["x"]["w"] if where == "shared" else client_state["seen"]).add_(1.0)
            raise ValueError("after the harm is done")
        return Message(send={"z": z}), client_state

    client_state = {"seen": torch.tensor([4.0, 2.0, 7.0])}
    named = {
        "shared": "'z.x.w', which all clients share",
        "client_state": "'client_state.seen', so the block could not be run a second time",
    }
    with pytest.raises(ClientError, match=rf"phase 'train': client code wrote in place into {named[where]}"):
        federation.run(inner, CLIENTS, client_final=client_final, client_state=client_state, faults=DROP)


def test_rows_are_those_of_the_block_though_memory_halved_it(federation, inner):
    class Tight:
        def local_data(self, clients):
            if len(clients) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return federation.population.local_data(clients)

        data = federation.population.data

    clients, given = [4, 0, 1, 5, 3], {"step": look_up, "reduce": {"z": Mean()}}
    found = federation.with_(population=Tight()).run(inner, clients, **given, faults=DROP)
    assert found.splits == 2
    assert [(d.row, d.client) for d in found.dropped] == [(1, 0), (3, 5)]
    whole = federation.run(inner, clients, **given, faults=DROP)
    assert [d[:3] for d in whole.dropped] == [d[:3] for d in found.dropped]
    torch.testing.assert_close(found.partials["z"].total, whole.partials["z"].total)
    assert found.losses.tolist() == pytest.approx(whole.losses.tolist())
    none_left = federation.with_(population=Tight()).run(inner, [5, 2, 4, 1], **given, faults=DROP)
    assert [(d.row, d.client) for d in none_left.dropped] == [(0, 5), (1, 2)]  # the first half, whole


def test_finite_values_are_found_without_looking_at_each():
    assert finite({"a": torch.full((4,), 3e38), "b": torch.arange(3)})  # the sum overflows
    assert not finite({"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])})
    sent = {"none": None, "empty": torch.zeros(3, 0), "z": (torch.zeros(3, 2, 2), torch.tensor([0.0, 0.0, math.inf]))}
    assert not_finite(sent, {"own": torch.tensor([[0.0], [math.nan], [math.nan]])}) == {
        1: "its state is not finite in 'own'",
        2: "it sends a value that is not finite in 'z'",
    }
