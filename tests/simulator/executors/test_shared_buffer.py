"""Trees reach processes of the same machine through shared memory, bit by bit."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.executors import shared_buffer

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files")


class Pair(NamedTuple):
    name: str
    value: object


TREE = {
    "float": torch.randn(3, 5),
    "double": torch.randn(7, dtype=torch.float64),
    "brain": torch.randn(4, 2).to(torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(12.0).reshape(3, 4).T,
    "spread": torch.ones(1).expand(6),
    "signs": torch.tensor([0.0, -0.0, float("nan")]),
    "pair": Pair("a", (torch.arange(3), None, 1.5)),
    "list": [1, 2],
}


def equal(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))


def test_what_is_packed_comes_out_as_it_was():
    (mine,) = shared_buffer.own(1)
    packed = mine.pack(TREE)
    assert not any(isinstance(leaf, torch.Tensor) for leaf in T.leaves(packed))
    found = mine.unpack(packed)
    assert T.structure(found) == T.structure(TREE)
    assert isinstance(found["pair"], Pair)
    assert all(equal(a, b) for a, b in zip(T.leaves(found), T.leaves(TREE), strict=True))


def test_a_copy_comes_out_and_lies_where_torch_would_put_it():
    (mine,) = shared_buffer.own(1)
    found = mine.unpack(mine.pack(TREE))
    mine.pack(T.map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, TREE))
    assert equal(found["float"], TREE["float"])
    assert found["double"].data_ptr() % T.ALIGNED == 0


def test_one_tensor_in_two_places_stays_one_on_its_way():
    (mine,) = shared_buffer.own(1)
    x = torch.randn(3)
    packed = pickle.loads(pickle.dumps(mine.pack({"z": x, "anchor": {"z": x}, "other": x.clone()})))
    found = mine.unpack(packed)
    assert found["z"] is found["anchor"]["z"]
    assert found["z"] is not found["other"]


def test_strides_are_kept_where_torch_keeps_them():
    (mine,) = shared_buffer.own(1)
    filters = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tree = {"filters": filters, "turned": torch.randn(3, 4).T, "gaps": torch.randn(4, 6)[:, ::2]}
    found = mine.unpack(mine.pack(tree))
    assert {k: v.stride() for k, v in found.items()} == {k: v.clone().stride() for k, v in tree.items()}
    assert found["filters"].stride() == filters.stride()
    assert all(equal(found[k], tree[k]) for k in tree)


def test_what_finds_no_room_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(shared_buffer, "BUFFER_BYTES", 4096)
    (mine,) = shared_buffer.own(1)
    large, small = torch.randn(1024), torch.randn(16)
    packed = mine.pack({"large": large, "small": small})
    assert packed["large"] is large
    assert isinstance(packed["small"], shared_buffer.Place)
    assert equal(mine.unpack(packed)["small"], small)


def test_another_process_reads_it_and_writes_its_answer():
    (mine,) = shared_buffer.own(1)
    place = mine.pack(torch.arange(5.0))
    code = (
        "import sys, torch\n"
        "from fedfleet.simulator.executors import shared_buffer\n"
        "at = shared_buffer.joined(sys.argv[1])\n"
        "x = at.unpack(shared_buffer.Place(int(sys.argv[2]), torch.Size([5]), (1,), torch.float32))\n"
        "assert at.pack(x * 2).start == int(sys.argv[2])\n"
        "print(at.secret.hex())"
    )
    given = [sys.executable, "-c", code, mine.address, str(place.start)]
    out = subprocess.run(given, capture_output=True, text=True, check=True).stdout
    assert out.strip() == mine.secret.hex()
    assert mine.unpack(place).tolist() == [0, 2, 4, 6, 8]


def test_other_files_are_not_taken_for_a_slab(tmp_path):
    ours, theirs = shared_buffer.own(2)
    assert ours.secret != theirs.secret
    reading, writing = os.pipe()
    (tmp_path / "short").write_bytes(b"x")
    for address in (f"/proc/self/fd/{reading}", "/proc/self/fd/100000", tmp_path / "short", tmp_path):
        with pytest.raises((OSError, ValueError)):
            shared_buffer.joined(address)
    os.close(reading)
    os.close(writing)


def test_the_file_goes_with_the_slab():
    (mine,) = shared_buffer.own(1)
    address = mine.address
    assert Path(address).exists()
    del mine
    assert not Path(address).exists()


def test_without_anonymous_files_there_are_no_slabs(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert shared_buffer.own(2) == []
