"""Masks from keys, taken off with parts of secrets: the sum to the bit, whoever goes when, or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfleet.middleware.secure_aggregation import masks
from fedfleet.middleware.secure_aggregation.masks import unmasked
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.fleet.secagg import Secured, needed, neighbours

pytest.importorskip("Crypto", reason="pycryptodome is not installed")
EVERYBODY = (True,) * 6


def went(advertised, shared, masked, unmasking, k: int | None, threshold: float) -> Secured:
    stages = [torch.tensor(advertised)]
    for who in (shared, masked, unmasking):
        stages.append(stages[-1] & torch.tensor(who))
    near = neighbours(stages[0], k, rng.key(1))
    return Secured(*stages, near, needed(threshold, near.size), None, 0, 0, 0)


def vectors(who: torch.Tensor, bits: int, numbers: int = 5) -> dict[int, torch.Tensor]:
    mask = (1 << bits) - 1
    return {u: rng.bits(rng.fold(rng.key(7), u), numbers) & mask for u in who.nonzero().flatten().tolist()}


stage = st.lists(st.booleans(), min_size=9, max_size=9)


@settings(max_examples=40, deadline=None)
@given(stage, stage, stage, stage, st.sampled_from([None, 2, 4]), st.floats(0.2, 1), st.sampled_from([9, 20, 52]))
def test_the_sum_is_that_of_the_plain_integers_or_there_is_none(a, s, m, u, k, threshold, bits):
    found = went(a, s, m, u, k, threshold)
    if not found.masked.any():
        return
    given = vectors(found.masked, bits)
    left = found.neighbours.among(found.unmasking)
    if bool((left[found.shared] < found.threshold).any()):
        with pytest.raises(FedfleetError, match="parts of a secret are left"):
            unmasked(given, found, torch.full((5,), 1 << bits), rng.key(2))
        return
    plain = torch.stack(list(given.values())).sum(0) & ((1 << bits) - 1)
    assert torch.equal(unmasked(given, found, torch.full((5,), 1 << bits), rng.key(2)), plain)


def test_every_way_to_go_by_hand():
    gone = (True, True, True, True, True, False)
    for late in range(3):
        shared, masked, unmasking = (gone if late == i else EVERYBODY for i in range(3))
        found = went(EVERYBODY, shared, masked, unmasking, None, 0.6)
        given = {u: torch.tensor([u, 10 * u]) for u in found.masked.nonzero().flatten().tolist()}
        there = sum(given)
        assert unmasked(given, found, torch.tensor([4, 1 << 12]), rng.key(5)).tolist() == [there % 4, 10 * there]


def test_a_message_is_masked_and_the_masks_are_others_each_time(monkeypatch):
    """What the server adds up has nothing of the vectors in it, but for the sum."""
    seen: list[int] = []
    stream = masks._stream

    def counted(seed, numbers):
        seen.append(numbers)
        return stream(seed, numbers)

    monkeypatch.setattr(masks, "_stream", counted)
    found = went(EVERYBODY, EVERYBODY, (True,) * 5 + (False,), EVERYBODY, None, 0.6)
    unmasked(vectors(found.masked, 20), found, torch.full((5,), 1 << 20), rng.key(5))
    # five clients with a mask of their own and five with others; taken off: five of their own, five with the one that has gone
    assert len(seen) == 5 * 6 + 5 + 5


def test_parts_below_the_threshold_tell_nothing_and_letters_are_for_one_alone():
    secret = bytes(range(32))
    parts = list(enumerate(masks._split(secret, 4, 7), start=1))
    assert masks._combined(parts[2:6], 4) == secret
    assert masks._combined([*parts[:3], (4, parts[3][1])], 4) == secret
    assert masks._combined([*parts[:3], (4, parts[4][1])], 4) != secret
    with pytest.raises(FedfleetError, match="3 parts"):
        masks._combined(parts[:3], 4)
    key = bytes(32)
    letter = masks._sealed(key, 1, 2, (3).to_bytes(4, "big") + secret + secret)
    assert masks._opened(key, 1, 2, letter) == (3, secret, secret)
    with pytest.raises(ValueError, match="MAC"):
        masks._opened(key, 2, 1, letter)


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch):
    import builtins

    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("Crypto"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match="pip install 'fedfleet\\[secagg\\]'"):
        masks.check_installed()
