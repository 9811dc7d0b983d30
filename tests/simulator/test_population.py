import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.data import from_arrays
from fedfleet.datasets.examples import Examples
from fedfleet.simulator.population import InMemoryPopulation, Summary, decode, gather, in_rows, padded_rows

SIZES = (3, 1, 4, 2)
INDICES = torch.tensor([9, 2, 5, 0, 8, 7, 6, 1, 4, 3])


def population() -> InMemoryPopulation:
    data = {"x": torch.arange(20).reshape(10, 2), "y": torch.arange(10)}
    return InMemoryPopulation(data, INDICES, torch.tensor([0, *SIZES]).cumsum(0), torch.tensor([0, 1, 0, 2]))


def test_size_and_numbers_of_examples():
    assert population().size == 4
    assert population().num_examples(torch.arange(4)).tolist() == list(SIZES)
    assert population().num_examples(torch.tensor([[2, 0], [3, 3]])).tolist() == [[4, 3], [2, 2]]
    assert population().summary() == Summary(min_examples=1, max_examples=4, mean_examples=2.5, domains=3)


def test_rows_are_padded_with_the_first():
    rows = padded_rows(torch.tensor([4, 0, 7]), torch.tensor([2, 3, 1]))
    assert rows.tolist() == [[4, 5, 4], [0, 1, 2], [7, 7, 7]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_block_lists_each_clients_rows_in_order_and_pads_with_its_first(ids):
    local = population().local_data(torch.tensor(ids))
    width = max(SIZES[c] for c in ids)
    assert local.rows.shape == (len(ids), width)
    assert local.counts.tolist() == [SIZES[c] for c in ids]
    assert local.domain.tolist() == [(0, 1, 0, 2)[c] for c in ids]
    for rows, c in zip(local.rows.tolist(), ids, strict=True):
        start = sum(SIZES[:c])
        own = INDICES[start : start + SIZES[c]].tolist()
        assert rows == own + [own[0]] * (width - len(own))


def test_clients_cover_the_partition_exactly_once():
    local = population().local_data(torch.arange(4))
    real = [r for rows, n in zip(local.rows.tolist(), local.counts.tolist(), strict=True) for r in rows[:n]]
    assert real == INDICES.tolist()
    assert local.data["x"] is population().data["x"] or torch.equal(local.data["x"], population().data["x"])


def test_moving_to_a_device_keeps_everything():
    moved = population().to(torch.device("cpu"))
    ids = torch.tensor([2, 1])
    before, after = population().local_data(ids), moved.local_data(ids)
    for field in ("rows", "counts", "domain"):
        assert torch.equal(getattr(before, field), getattr(after, field))
    assert {k: v.device.type for k, v in moved.data.items()} == {"x": "cpu", "y": "cpu"}


def test_gather_takes_rows_of_every_tensor():
    data = {
        "x": torch.arange(12.0).reshape(6, 2),
        "pixels": torch.tensor([0, 51, 102, 153, 204, 255], dtype=torch.uint8),
    }
    found = gather(data, torch.tensor([5, 0, 5]))
    assert found["x"].tolist() == [[10, 11], [0, 1], [10, 11]]
    assert found["pixels"].tolist() == [1.0, -1.0, 1.0]
    assert gather(data, torch.tensor([[0, 1], [2, 3]]))["x"].shape == (2, 2, 2)


def test_gather_inside_vmap_is_gather_outside():
    data = {"x": torch.arange(12.0).reshape(6, 2), "p": torch.arange(6, dtype=torch.uint8)}
    rows = torch.tensor([[0, 5], [3, 3]])
    mapped = torch.func.vmap(lambda r: gather(data, r))(rows)
    for name, expected in gather(data, rows).items():
        assert torch.equal(mapped[name], expected)


def test_pixels_are_decoded_to_minus_one_to_one_and_all_else_passes_through():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    found = decode(pixels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.arange(256.0).reshape(16, 16) / 127.5 - 1)
    assert (float(found.min()), float(found.max())) == (-1.0, 1.0)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool, torch.int8):
        x = torch.tensor([0, 1, 1]).to(dtype)
        assert decode(x) is x


@pytest.mark.parametrize("channels", [1, 3])
def test_images_that_were_read_with_their_channels_last_are_laid_out_row_by_row(channels):
    """Torch's gradient of a 1x1 convolution with a stride writes beyond its memory otherwise, also for one channel."""
    x = torch.rand(4, 6, 5, channels).permute(0, 3, 1, 2)
    plain = (30 * channels, 30, 5, 1)
    assert x.stride() != plain
    assert in_rows(x).stride() == plain
    assert torch.equal(in_rows(x), x)
    again = in_rows(x)
    assert in_rows(again) is again
    assert Examples(x, torch.zeros(4).long(), 2).x.stride() == plain
    arrays = from_arrays(x.numpy(), [0, 1, 0, 1], client=[0, 0, 1, 2], test=0.4)
    assert arrays.test.x.stride() == plain
    assert gather({"x": x}, torch.tensor([[2, 1], [0, 0]]))["x"].stride() == (2 * plain[0], *plain)
    assert in_rows(torch.zeros(0, 3).T).shape == (3, 0)
