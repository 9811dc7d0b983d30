"""Files of tensors tell by themselves of whatever befell them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedfleet.files import tensors
from fedfleet.simulator.arithmetic import tree as T

HELD = {"x.0.weight": torch.arange(6.0).reshape(2, 3).T, "b.n": torch.tensor(3), "none": torch.zeros(0, 2)}
SAYS = {"vocabulary": "sha256 ä", "z": "1"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensors") / "model.safetensors"
    tensors.write(path, HELD, SAYS)
    return path


def same(path):
    found = tensors.read(path)
    return found.keys() == HELD.keys() and all(
        found[n].dtype == HELD[n].dtype and found[n].equal(HELD[n]) and T.as_new(found[n]) is found[n] for n in HELD
    )


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_file_that_a_bit_was_flipped_in_or_that_was_cut_is_refused_or_the_same(whole, at, bit, cut):
    content, path = bytearray(whole.read_bytes()), whole.with_name("damaged.safetensors")
    where = int(at * len(content))
    content[where] ^= 1 << bit
    path.write_bytes(content[:where] if cut else content)
    try:
        assert same(path)
        assert not cut
    except tensors.UNREADABLE:
        pass


def test_the_bytes_of_tensors_are_told_whatever_they_are(whole):
    content, path = bytearray(whole.read_bytes()), whole.with_name("damaged.safetensors")
    for where in range(len(content) - 6 * 4 - 8, len(content)):
        path.write_bytes(content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :])
        with pytest.raises(ValueError, match=r"^damaged: "):
            tensors.read(path)


def test_one_content_is_one_file_and_files_of_others_are_read(tmp_path, whole):
    again = tmp_path / "again.safetensors"
    tensors.write(again, HELD, dict(reversed(SAYS.items())))
    assert again.read_bytes() == whole.read_bytes()
    assert {k: v for k, v in tensors.about(again).items() if k != tensors.SEAL} == SAYS
    save_file({"a": torch.ones(2)}, again, {"sha256": "of others"})
    assert tensors.read(again)["a"].equal(torch.ones(2))
    assert tensors.about(again) == {"sha256": "of others"}
