from typing import Any

import torch

from fedfleet.simulator.state import ClientStore


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


def test_a_stored_state_does_not_hold_its_block_in_memory():
    store = ClientStore()
    store.stage(ids(*range(100)), {"h": torch.zeros(100, 2), "n": torch.zeros(100)})
    store.commit()
    kept = store._committed[0]["h"]
    assert kept.untyped_storage().nbytes() == 2 * kept.element_size()
