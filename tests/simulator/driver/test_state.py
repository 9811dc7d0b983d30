import tracemalloc
from typing import Any

import pytest
import torch

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver import state
from fedfleet.simulator.driver.state import ClientStore, StateError


def ids(*clients: int) -> torch.Tensor:
    return torch.tensor(clients)


def fresh() -> Any:
    return {"h": torch.zeros(2), "n": torch.tensor(-1.0)}


def states(*values: float) -> Any:
    v = torch.tensor(values)
    return {"h": torch.stack([v, 10 * v], 1), "n": v}


def read(store: ClientStore, *clients: int) -> list[float]:
    found = store.get(ids(*clients), fresh)
    assert found["h"].shape == (len(clients), 2)
    return found["n"].tolist()


def test_unknown_clients_get_a_fresh_state_and_leave_no_trace():
    store = ClientStore()
    assert read(store, 3, 10**12) == [-1, -1]
    store.commit()
    assert len(store) == 0


def test_fresh_is_called_once_and_only_if_needed():
    store, calls = ClientStore(), []
    store.stage(ids(1), states(4.0))
    store.get(ids(1), lambda: calls.append(1) or fresh())
    assert not calls
    store.get(ids(1, 2, 3), lambda: calls.append(1) or fresh())
    assert len(calls) == 1


def test_staged_writes_are_visible_at_once_and_kept_by_commit():
    store = ClientStore()
    store.stage(ids(2, 5), states(2.0, 5.0))
    assert read(store, 5, 1, 2) == [5, -1, 2]
    assert len(store) == 0
    store.commit()
    assert read(store, 5, 1, 2) == [5, -1, 2]
    assert len(store) == 2
    assert store.get(ids(5), fresh)["h"].tolist() == [[5, 50]]


def test_discard_goes_back_to_the_last_commit():
    store = ClientStore()
    store.stage(ids(2), states(2.0))
    store.commit()
    store.stage(ids(2, 3), states(7.0, 8.0))
    assert read(store, 2, 3) == [7, 8]
    store.discard()
    assert read(store, 2, 3) == [2, -1]
    store.commit()
    assert read(store, 2, 3) == [2, -1]


def test_a_later_write_of_the_round_replaces_an_earlier_one():
    store = ClientStore()
    store.stage(ids(1, 2), states(1.0, 2.0))
    store.stage(ids(2), states(9.0))
    store.commit()
    assert read(store, 1, 2) == [1, 9]


def test_the_store_keeps_copies():
    store, written = ClientStore(), states(1.0, 2.0)
    store.stage(ids(1, 2), written)
    written["h"].zero_()
    read_back = store.get(ids(1), fresh)
    read_back["h"].fill_(99.0)
    assert store.get(ids(1, 2), fresh)["h"].tolist() == [[1, 10], [2, 20]]
    shared = fresh()
    store.get(ids(3, 4), lambda: shared)["h"].add_(1.0)
    assert float(shared["h"].sum()) == 0


def test_states_are_in_the_file_and_not_in_memory(tmp_path):
    store = ClientStore(tmp_path / "states")
    for start in range(0, 10_000, 1000):
        c = torch.arange(start, start + 1000)
        store.stage(c, {"h": c[:, None] * torch.ones(2), "n": c.float()})
        store.commit()
    assert (tmp_path / "states").stat().st_size == 10_000 * 12
    tracemalloc.start()
    store.stage(c, {"h": torch.ones(1000, 2), "n": torch.ones(1000)})
    store.commit()
    assert tracemalloc.get_traced_memory()[0] < 300 * 1000  # a place and a checksum a client
    tracemalloc.stop()
    for _ in range(3):
        store.stage(c, {"h": torch.ones(1000, 2), "n": torch.ones(1000)})
        store.commit()
    assert (tmp_path / "states").stat().st_size == 11_000 * 12  # all, and one cohort's old ones
    assert read(store, 8999, 0, 9000) == [8999, 0, 1]


def test_dtypes_survive():
    values = {
        "a": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16), "b": torch.tensor([True, False]),
        "c": torch.tensor([2**60, 7]), "d": (torch.tensor([0.1, 0.2], dtype=torch.float64), None),
    }  # fmt: skip
    store = ClientStore()
    store.stage(ids(4, 2), values)
    store.commit()
    found = store.get(ids(2, 4), dict)
    for mine, given in zip(T.leaves(found), T.leaves(values), strict=True):
        assert mine.dtype == given.dtype
        assert torch.equal(mine, given.flip(0))


@pytest.mark.parametrize("clients", [1, 2])
def test_numbers_of_other_widths_may_follow_one_another(clients):
    """A double after a single float or a flag begins anywhere among the bytes."""
    like = {"flag": torch.tensor(True), "f": torch.tensor(0.5), "d": torch.tensor([2.0, 3.0]).double()}
    store = ClientStore()
    store.stage(torch.arange(clients), T.stack([like] * clients))
    found = store.get(torch.arange(clients), lambda: like)
    assert all(torch.equal(a, b) for a, b in zip(T.leaves(found), T.leaves(T.stack([like] * clients)), strict=True))


def test_a_checkpoint_is_never_written_over(tmp_path):
    path = tmp_path / "states"
    store = ClientStore(path)
    store.stage(ids(1, 2, 3), states(1.0, 2.0, 3.0))
    store.commit()
    kept = [store.slots()]
    store.keep(kept)
    for n in range(10):
        store.stage(ids(1, 2, n + 4), states(10.0 + n, 20.0 + n, 0.0))
        store.commit()
    size = path.stat().st_size
    assert size == (3 + 2 * 2 + 10) * 12  # two clients go to and fro between two slots each
    again = ClientStore(path)
    again.restore(kept[0])
    assert read(again, 1, 2, 3, 4) == [1, 2, 3, -1]
    assert read(store, 1, 2, 3, 4) == [19, 29, 3, 0]
    store.keep([])
    store.stage(ids(20, 21), states(5.0, 6.0))
    store.commit()
    assert path.stat().st_size == size  # in the places of what the checkpoint needed


def test_damage_is_found(tmp_path):
    path = tmp_path / "states"
    store = ClientStore(path)
    store.stage(ids(1, 2), states(1.0, 2.0))
    store.commit()
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    assert read(store, 1) == [1]
    with pytest.raises(StateError, match="the state of client 2 is damaged"):
        read(store, 2)
    path.write_bytes(data[:20])
    with pytest.raises(StateError, match="cut short: 1 states, and the checkpoint needs 2"):
        ClientStore(path).restore(store.slots())


@pytest.mark.parametrize("written", range(4))
def test_a_commit_that_fails_changes_nothing(tmp_path, monkeypatch, written):
    store = ClientStore(tmp_path / "states")
    store.stage(ids(1, 2, 3), states(1.0, 2.0, 3.0))
    store.commit()
    write, calls = state.write_at, []

    def full(*args: Any) -> None:
        calls.append(args)
        if len(calls) > written:
            raise OSError(28, "No space left on device")
        write(*args)

    store.stage(ids(1, 2, 3, 4), states(7.0, 8.0, 9.0, 10.0))
    monkeypatch.setattr(state, "write_at", full)
    with pytest.raises(OSError, match="No space"):
        store.commit()
    again = ClientStore(tmp_path / "states")
    again.restore(store.slots())
    assert read(again, 1, 2, 3, 4) == [1, 2, 3, -1]


def test_its_file_is_closed_with_it(tmp_path):
    store = ClientStore(tmp_path / "states.bin")
    store.stage(ids(1), states(4.0))
    store.commit()
    file = store._file
    assert file is not None
    assert not file.closed
    del store
    assert file.closed
