"""Uploads in a file: who writes it, what is read, and that nothing is left behind."""

import fcntl
import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedfleet.simulator.arithmetic import spill, upload_matrix
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.spill import Spilled, SpillFile, whole
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.block.uploads import put_down
from fedfleet.simulator.errors import ClientError

VALUES = {
    "a": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16), "b": (torch.tensor([True, False]), None),
    "c": torch.tensor([2**60, 7]), "d": torch.arange(24.0, dtype=torch.float64).view(2, 3, 4).transpose(1, 2),
    "e": torch.zeros(2, 0),
}  # fmt: skip


def uploads(*sizes: int) -> UploadMatrix:
    g = torch.Generator().manual_seed(0)
    blocks = tuple(
        {
            "w": torch.randn(n, 7, 11, generator=g),
            "b": (torch.randn(n, 5, generator=g).double(), None),
            "e": torch.zeros(n, 0),
        }
        for n in sizes
    )
    return UploadMatrix(blocks, tuple(torch.ones(n, dtype=torch.float64) for n in sizes))


def length(file: SpillFile) -> int:
    return Path(file.address).stat().st_size


def test_what_is_kept_comes_back_in_its_type_and_shape():
    kept = SpillFile(0).keep(VALUES)
    assert all(isinstance(leaf, Spilled) for leaf in T.leaves(kept))
    for found, given in zip(T.leaves(T.map(whole, kept)), T.leaves(VALUES), strict=True):
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        assert torch.equal(found, given)


def test_a_file_may_take_and_give_less_at_a_time_than_was_asked(monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [into[0][:5]], at))
    given = torch.arange(40.0)
    assert torch.equal(SpillFile(0).keep(given).tensor(), given)


def test_a_small_tree_stays_and_what_lies_in_the_file_is_not_written_again():
    size = T.num_bytes(VALUES)
    assert SpillFile(size + 1).keep(VALUES) is VALUES
    file = SpillFile(size)
    kept = file.keep(VALUES)
    before = length(file)
    assert file.keep(kept) is kept
    assert length(file) == before == spill.SECRET_BYTES + size


@pytest.mark.parametrize("floats", [1, 15, 40, 1 << 20])
@pytest.mark.parametrize("places", ["file", "both"])
def test_the_file_changes_no_bit(monkeypatch, floats, places):
    monkeypatch.setattr(upload_matrix, "_TILE", floats)
    memory = uploads(2, 3)
    file = memory.spilled(SpillFile(0))
    if places == "both":
        file = file._replace(blocks=(memory.blocks[0], file.blocks[1]))
    origin, weights = (
        {"w": torch.ones(7, 11), "b": (torch.full((5,), 0.3).double(), None), "e": torch.zeros(0)},
        torch.arange(5.0).double(),
    )
    found, expected = (
        [
            s.gram(), s.gram(origin), s.combine(weights), s.combine(weights, origin), s.mean(), s.median(),
            s.trimmed_mean(0.2), s.krum(1), s.stacked(), s.of(lambda z: z["b"]).gram(origin["b"]),
        ]
        for s in (file, memory)
    )  # fmt: skip
    for a, b in zip(T.leaves(tuple(found)), T.leaves(tuple(expected)), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_blocks_may_be_written_in_any_order():
    memory, file = uploads(2, 3, 1), SpillFile(0)
    later = [file.keep(b) for b in reversed(memory.blocks)]
    assert torch.equal(memory._replace(blocks=tuple(reversed(later))).gram(), memory.gram())


def test_one_tile_of_all_is_in_memory_at_a_time(monkeypatch):
    monkeypatch.setattr(upload_matrix, "_TILE", 4096)
    seen = []
    monkeypatch.setattr(Spilled, "rows", lambda self, into, first: seen.append(into.shape) or into.zero_())
    block = {"w": torch.zeros(8, 30_000)}
    UploadMatrix((SpillFile(0).keep(block),), (torch.ones(8),)).combine(torch.ones(8))
    assert {rows * n for rows, n in seen} == {4096, 8 * (30_000 % 512)}
    assert len(seen) == 59


WRITER = """
import pickle, sys, torch
spill = pickle.load(sys.stdin.buffer)
kept = [spill.keep(torch.full((3, 5000), float(number))) for number in eval(sys.argv[1])]
sys.stdout.buffer.write(pickle.dumps(kept))
"""


@pytest.mark.slow
def test_other_processes_write_side_by_side():
    file = SpillFile(0)
    command = [sys.executable, "-c", WRITER]
    writers = [
        subprocess.Popen([*command, str(numbers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for numbers in (list(range(20)), list(range(20, 40)))
    ]
    for w in writers:
        assert w.stdin is not None
        w.stdin.write(pickle.dumps(file))
        w.stdin.close()
    kept = []
    for w in writers:
        assert w.stdout is not None
        kept += pickle.loads(w.stdout.read())
        w.stdout.close()
        assert w.wait() == 0
    assert all(leaf.spill is file for leaf in kept)  # and not a second way to the same file
    assert [float(leaf.tensor().mean()) for leaf in kept] == list(range(40))
    assert all(bool((leaf.tensor() == leaf.tensor()[0, 0]).all()) for leaf in kept)


def test_room_in_the_file_is_given_to_one_process_at_a_time():
    file = SpillFile(0)
    with Path(file.address).open("r+b") as other:
        descriptor = other.fileno()
        assert [spill._reserved(descriptor, size) for size in (10, 5)] == [spill.SECRET_BYTES, spill.SECRET_BYTES + 10]
        assert length(file) == spill.SECRET_BYTES + 15
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(file.keep, torch.ones(3))
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            assert waiting.result(30).start == spill.SECRET_BYTES + 15


def test_threads_change_no_bit(monkeypatch):
    wide = uploads(3, 40, 7).spilled(SpillFile(0))
    origin = {"w": torch.ones(7, 11), "b": (torch.ones(5).double(), None), "e": torch.zeros(0)}
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(upload_matrix, "_THREADS", threads)
        found.append((wide.gram(origin), wide.median(), wide.combine(torch.arange(50.0).double(), origin)))
    assert all(torch.equal(a, b) for a, b in zip(*map(T.leaves, found), strict=True))
    assert torch.equal(found[0][0], found[0][0].T)


@pytest.mark.parametrize("there", ["nothing", "another spill file", "a file with a name", "a folder"])
def test_where_the_file_cannot_be_reached_a_tree_stays(tmp_path, there, monkeypatch):
    """As on another machine, where the same address leads elsewhere."""
    other, named = SpillFile(0), (tmp_path / "named").open("w+b")
    address = {
        "nothing": "/proc/self/fd/9999",
        "another spill file": other.address,
        "a file with a name": spill.address(named.fileno()),
        "a folder": str(tmp_path),
    }[there]
    away = pickle.dumps(SpillFile(0))
    monkeypatch.setattr(spill, "_OWN", {})
    found = pickle.loads(away)
    found.address = address
    assert found.keep(VALUES) is VALUES
    assert length(other) == spill.SECRET_BYTES
    assert (tmp_path / "named").stat().st_size == 0
    with pytest.raises(OSError, match="no 4 bytes from 0 on"):
        found.read(torch.zeros(1), [0])
    named.close()


def files() -> set[str]:
    return {str(d.readlink()) for d in Path("/proc/self/fd").iterdir() if d.is_symlink()}


def test_the_file_has_no_name_and_goes_with_the_last_upload(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = uploads(2, 3).spilled(SpillFile(0))
    assert list(tmp_path.iterdir()) == []
    assert any(str(tmp_path) in d for d in files())
    median = kept.median()
    del kept
    assert not any(str(tmp_path) in d for d in files())
    assert median["w"].shape == (7, 11)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    script = (
        "import os, signal, torch\nfrom fedfleet.simulator.arithmetic.spill import SpillFile\n"
        "kept = SpillFile(0).keep(torch.ones(1000, 1000))\nprint(len(os.listdir(os.environ['TMPDIR'])), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=-1)
    assert (done.returncode, done.stdout) == (-9, b"0\n")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_in_one_line(monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    file = SpillFile(0)
    monkeypatch.setattr(spill, "write_at", full)
    says = r"^phase 'train': uploads are kept in a file, .*No space left on device\): free .* set TMPDIR .*lower cohort.size$"
    with pytest.raises(ClientError, match=says):
        put_down("train", file, {"z": uploads(2)})


def test_only_what_is_kept_whole_is_put_down():
    sums = {"w": torch.ones(100)}
    found = put_down("train", SpillFile(0), {"sum": sums, "none": None, "z": uploads(2)})
    assert found["sum"] is sums
    assert found["none"] is None
    assert isinstance(found["z"].blocks[0]["w"], Spilled)


def test_a_file_that_was_cut_is_an_error():
    file = SpillFile(0)
    kept = file.keep(torch.ones(4, 10))
    os.truncate(file.address, 100)
    with pytest.raises(OSError, match=r"no 76 bytes from 100 on"):
        kept.tensor()
