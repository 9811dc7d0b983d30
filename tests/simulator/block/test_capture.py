"""Captures of blocks: what is captured, what is refused, and that nothing is trusted before it was compared."""

import pickle
import threading

import pytest
import torch

from fedfleet.simulator.block import capture
from fedfleet.simulator.block.capture import Captures


def played(compute, blocks, after=0):
    """Run blocks, each replayed where that is possible; return results, how many were replayed, and whether all was refused."""
    captures, found, replayed = Captures(after), [], 0
    for given in blocks:
        key = captures.key("kind", given)
        result = captures.replay(key, given)
        replayed += result is not None
        if result is None:
            result = compute(given)
            captures.ran(key, compute, given, result)
        found.append(result)
    refused = [k.refused for k in captures._kinds.values()]
    return found, replayed, any(refused)


def numbers(n=6, **more):
    return [{"x": torch.arange(3.0) + i, **more} for i in range(n)]


def test_blocks_are_replayed_once_two_agree():
    compute = lambda given: {"y": given["x"] * 2 + 1, "rows": 3}  # noqa: E731
    found, replayed, refused = played(compute, numbers())
    assert replayed == 4
    assert not refused
    for i, result in enumerate(found):
        assert torch.equal(result["y"], (torch.arange(3.0) + i) * 2 + 1)
        assert result["rows"] == 3


def test_views_with_gaps_are_captured():
    blocks = [{"x": torch.arange(6.0).view(3, 2)[:, 0] + i, "y": torch.ones(3, 2)[:, 1]} for i in range(5)]
    assert played(lambda given: given["x"] + given["y"], blocks)[1] == 3


def test_only_what_comes_often_is_captured():
    assert played(lambda given: given["x"] + 1, numbers(9), after=5)[1] == 2
    assert played(lambda given: given["x"] + 1, numbers(9), after=None)[1] == 0


def test_what_depends_on_values_is_refused():
    for compute in (
        lambda given: given["x"] * float(given["x"].sum()),
        lambda given: given["x"] * given["x"].sum().item(),
        lambda given: torch.tensor(given["x"].tolist()) + 1,
        lambda given: torch.from_numpy(given["x"].numpy()) + 1,
        lambda given: given["x"] + 1 if given["x"][0] < 100 else given["x"],
        lambda given: given["x"].unique(),
        lambda given: given["x"][given["x"] > 0],
        lambda given: given["x"] + torch.rand(3) * 0,
    ):
        found, replayed, refused = played(compute, numbers())
        assert (replayed, refused) == (0, True)
        for result, given in zip(found, numbers(), strict=True):
            assert torch.equal(result, compute(given))


def test_what_python_remembers_is_refused():
    calls = []

    def compute(given):
        calls.append(1)
        return given["x"] * len(calls)

    assert played(compute, numbers())[1:] == (0, True)


def test_numbers_taken_for_constants_show_though_they_stay_the_same_for_long():
    blocks = [{"x": torch.arange(3.0) + i, "w": torch.ones(3) * (1 + i // 8)} for i in range(16)]
    for constant in (
        lambda w: torch.nn.Parameter(w, requires_grad=False),
        lambda w: torch.tensor([w[0], w[1], w[2]]),
        torch.from_dlpack,
    ):
        found, _, _ = played(lambda given, constant=constant: given["x"] * constant(given["w"]), blocks)
        for result, given in zip(found, blocks, strict=True):
            assert torch.equal(result, given["x"] * given["w"])


def test_what_fails_on_some_values_fails_as_ever():
    blocks = numbers(6, at=torch.tensor([0, 1]))
    for compute in (
        lambda given: given["x"].gather(0, given["at"]),
        lambda given: (given["x"].gather(0, given["at"]), given["x"] + 1)[1],
        lambda given: (torch._assert_async((given["at"] < 3).all()), given["x"] + 1)[1],
    ):
        assert played(compute, blocks)[1] == 4
        with pytest.raises(RuntimeError, match=r"index|nonzero"):
            played(compute, [*blocks, {"x": torch.ones(3), "at": torch.tensor([0, 7])}])


def test_what_writes_into_its_inputs_writes_once():
    found, _, _ = played(lambda given: given["x"].add_(1), numbers())
    for i, result in enumerate(found):
        assert torch.equal(result, torch.arange(3.0) + i + 1)


def test_numbers_of_different_types_make_kinds_of_their_own():
    compute = lambda given: torch.arange(3) * given["m"] + given["x"].long()  # noqa: E731
    blocks = numbers(4, m=1) + numbers(4, m=1.0) + numbers(4, m=True)
    for result, given in zip(played(compute, blocks)[0], blocks, strict=True):
        assert result.dtype == compute(given).dtype
    zeros = numbers(4, m=0.0) + numbers(4, m=-0.0)
    for result, given in zip(played(lambda given: given["x"] / given["m"], zeros)[0], zeros, strict=True):
        assert torch.equal(result.nan_to_num(7), (given["x"] / given["m"]).nan_to_num(7))


def test_a_capture_in_use_is_kept():
    captures, compute = Captures(after=0), lambda given: given["x"] + given["lr"]
    replayed = 0
    for i in range(100):
        for given in ({"x": torch.ones(3), "lr": 0.5}, {"x": torch.ones(3), "lr": float(i)}):
            key = captures.key("kind", given)
            found = captures.replay(key, given)
            replayed += found is not None
            captures.ran(key, compute, given, compute(given)) if found is None else None
    assert replayed == 98


def test_few_captures_are_kept_and_few_kinds_are_counted(monkeypatch):
    monkeypatch.setattr(capture, "GRAPHS", 2)
    compute = lambda given: given["x"] * given["lr"]  # noqa: E731
    thrice = [given for lr in (0.1, 0.2, 0.3) for given in numbers(3, lr=lr)]
    assert played(compute, [*thrice, *numbers(1, lr=0.3), *numbers(1, lr=0.2)])[1] == 5  # the last two are there
    assert played(compute, [*thrice, *numbers(3, lr=0.1)])[1] == 4  # the first must be captured anew
    monkeypatch.setattr(capture, "KINDS", 2)
    captures = Captures(after=5)
    for lr in (0.1, 0.2, 0.3):
        (given,) = numbers(1, lr=lr)
        captures.ran(captures.key("kind", given), compute, given, compute(given))
    assert len(captures._kinds) == 2


def test_what_raises_while_it_is_captured_is_computed_as_before():
    calls = []

    def compute(given):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not twice")
        return given["x"] + 1

    found, replayed, refused = played(compute, numbers(3))
    assert (len(found), replayed, refused) == (3, 0, True)


def test_numbers_and_shapes_make_kinds_of_their_own():
    blocks = numbers(4, lr=0.1) + numbers(4, lr=0.2) + [{"x": torch.zeros(i), "lr": 0.1} for i in (1, 2)]
    found, replayed, _ = played(lambda given: given["x"] * given["lr"], blocks)
    assert replayed == 4
    for result, given in zip(found, blocks, strict=True):
        assert torch.equal(result, given["x"] * given["lr"])


def test_one_tensor_in_two_places_is_another_kind():
    x, y = torch.ones(3), torch.ones(3) * 2
    same = [{"a": x, "b": x}, {"a": y, "b": y}]
    compute = lambda given: given["a"] + 2 * given["b"] if given["a"] is given["b"] else given["a"] - given["b"]  # noqa: E731
    found, _, _ = played(compute, [*same, *same, {"a": x, "b": y}, *same])
    expected = [x * 3, y * 3, x * 3, y * 3, x - y, x * 3, y * 3]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_not_a_number_is_compared_as_such():
    compute = lambda given: given["x"] / 0 * 0  # noqa: E731
    assert played(compute, numbers())[1] == 4


def test_while_one_thread_captures_others_may_read_values():
    read = []

    def compute(given):
        thread = threading.Thread(target=lambda: read.append(torch.ones(2).tolist() + torch.ones(1).numpy().tolist()))
        thread.start()
        thread.join()
        return given["x"] + 1

    assert played(compute, numbers(3))[1:] == (1, False)
    assert len(read) >= 3  # two blocks, and the capture
    assert set(map(tuple, read)) == {(1.0, 1.0, 1.0)}
    assert "numpy" not in vars(torch.Tensor)


def test_captures_stay_in_their_process():
    captures = Captures(7)
    captures.ran(captures.key("kind", numbers(1)[0]), lambda given: given["x"], numbers(1)[0], torch.zeros(3))
    other = pickle.loads(pickle.dumps(captures))
    assert other.after == 7
    assert not other._kinds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_what_is_captured_becomes_a_cuda_graph_until_memory_is_short():
    def compute(given):
        return {"y": given["x"] @ given["x"].mT + torch.ones(3).to(given["x"].device), "rows": 3}

    blocks = [{"x": torch.arange(9.0, device="cuda").view(3, 3) + i} for i in range(9)]
    captures = Captures(after=0)
    for i, given in enumerate(blocks):
        key = captures.key("kind", given)
        result = captures.replay(key, given)
        assert (result is None) == (i < 2)
        if result is None:
            captures.ran(key, compute, given, compute(given))
        else:
            assert torch.equal(result["y"], compute(given)["y"])
        if i == 5:
            assert captures.release()
            assert not captures.release()
