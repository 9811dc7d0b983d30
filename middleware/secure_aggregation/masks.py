"""The protocol in earnest, in one process: keys agreed, parts of secrets shared, messages masked, masks rebuilt and taken off.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017, Figure 4: a client u with the
vector x_u (m,) mod R sends

    y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)  mod R

over its neighbours v that shared their keys; s_uv is what their keys agree on. Of those that were heard the server rebuilds b_u, of
those that were not the key, hence each s_uv. Keys are X25519, parts Shamir's over GF(2^128), PRG is AES-256 in counter mode, all of
pycryptodome. What the sum is does not depend on any of it. Everybody's secrets lie in one process: it shows that the sum is right,
and protects nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.fleet.secagg import Secured

Words = npt.NDArray[np.uint64]
HALF = 16
"""Bytes of a secret that Shamir's scheme of the library shares; secrets have two of them."""


def check_installed() -> None:
    """Raise ConfigError where the library is not there."""
    try:
        import Crypto.Protocol.DH  # noqa: F401
    except ImportError:
        raise ConfigError(
            "secure_aggregation.execute=true: it takes pycryptodome: pip install 'fedfleet[secagg]', or set it to false"
        ) from None


class _Secrets(NamedTuple):
    """A client's: for encryption, for masks with others, for its own mask."""

    encryption: bytes
    masking: bytes
    own: bytes


class _Parts(NamedTuple):
    """What a client holds of another: its place, and a part of the key of its masks and of its own mask."""

    place: int
    masking: bytes
    own: bytes


def unmasked(vectors: Mapping[int, Tensor], went: Secured, modulus: Tensor, key: Key) -> Tensor:
    """Return the sum, int64 (m,), as a server learns it that gets masked vectors and parts of secrets alone.

    Args:
        vectors: position in the cohort -> int64 (m,), of those whose masked message came.
        went: who got how far.
        modulus: int64 (m,), R of each number, powers of two.
        key: of the clients' secrets.

    Raises FedfleetError where fewer parts than are needed are left of a secret.

    """
    shared, masked = _positions(went.shared), _positions(went.masked)
    near = {u: _near(went, u) for u in shared}
    secrets = {u: _Secrets(*(_bytes(rng.fold(key, what, u)) for what in _Secrets._fields)) for u in shared}
    public = {u: (_public(s.encryption), _public(s.masking)) for u, s in secrets.items()}
    letters: dict[tuple[int, int], bytes] = {}  # (from, to) -> what the server passes on
    for u in shared:
        holders = sorted([u, *near[u]])
        shares = [_split(secret, went.threshold, len(holders)) for secret in (secrets[u].masking, secrets[u].own)]
        for place, v in enumerate(holders):
            text = (place + 1).to_bytes(4, "big") + shares[0][place] + shares[1][place]
            letters[u, v] = _sealed(_agreed(secrets[u].encryption, public[v][0], "letter"), u, v, text)
    mask, sums = (modulus - 1).numpy().astype(np.uint64), None
    for u in masked:
        y = vectors[u].numpy().astype(np.uint64) + _stream(secrets[u].own, len(vectors[u]))
        for v in near[u]:
            y = _with(y, _agreed(secrets[u].masking, public[v][1], "mask"), plus=u < v)
        sums = y & mask if sums is None else (sums + (y & mask)) & mask
    assert sums is not None
    parts: dict[int, list[tuple[int, bytes]]] = {u: [] for u in shared}
    for v in _positions(went.unmasking):  # each opens its letters, and tells one of the two parts of each
        for u in (w for w in shared if w == v or v in near[w]):
            opened = _opened(_agreed(secrets[v].encryption, public[u][0], "letter"), u, v, letters[u, v])
            parts[u].append((opened.place, opened.own if u in vectors else opened.masking))
    for u in shared:
        secret = _combined(parts[u], went.threshold)
        if u in vectors:
            sums = sums - _stream(secret, len(sums))
            continue
        for v in (w for w in near[u] if w in vectors):
            sums = _with(sums, _agreed(secret, public[v][1], "mask"), plus=u < v)  # the other sign than v took
    return torch.from_numpy((sums & mask).astype(np.int64))


def _positions(who: Tensor) -> list[int]:
    return who.nonzero().flatten().tolist()


def _near(went: Secured, u: int) -> list[int]:
    """Return the neighbours of a client that shared their keys."""
    ring = went.neighbours.ring
    others = _positions(went.shared) if ring is None else ring[u].tolist()
    return [v for v in sorted(others) if v != u and bool(went.shared[v])]


def _bytes(key: Key) -> bytes:
    return rng.bits(key, 4).numpy().tobytes()


def _public(secret: bytes) -> bytes:
    from Crypto.Protocol import DH

    return DH.import_x25519_private_key(secret).public_key().export_key(format="raw")


def _agreed(secret: bytes, public: bytes, purpose: str) -> bytes:
    from Crypto.Hash import SHA256
    from Crypto.Protocol import DH

    return DH.key_agreement(
        static_priv=DH.import_x25519_private_key(secret),
        static_pub=DH.import_x25519_public_key(public),
        kdf=lambda result: SHA256.new(purpose.encode() + result).digest(),
    )


def _stream(seed: bytes, numbers: int) -> Words:
    """Return PRG(seed), 64 bits a number."""
    from Crypto.Cipher import AES

    made = AES.new(seed, AES.MODE_CTR, nonce=bytes(8)).encrypt(bytes(8 * numbers))
    return np.frombuffer(made, dtype="<u8").astype(np.uint64)


def _with(y: Words, seed: bytes, *, plus: bool) -> Words:
    """Return a vector with a mask added or taken off; words wrap, as do sums mod R, which divides 2^64."""
    mask = _stream(seed, len(y))
    return y + mask if plus else y - mask


def _split(secret: bytes, needed: int, holders: int) -> list[bytes]:
    """Return a part of a secret for each place."""
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [Shamir.split(needed, holders, secret[i : i + HALF]) for i in (0, HALF)]
    return [a[1] + b[1] for a, b in zip(*halves, strict=True)]


def _combined(parts: list[tuple[int, bytes]], needed: int) -> bytes:
    """Return a secret from parts and their places."""
    from Crypto.Protocol.SecretSharing import Shamir

    if len(parts) < needed:
        raise FedfleetError(f"{len(parts)} parts of a secret are left, and it takes {needed}")
    enough = parts[:needed]
    return b"".join(Shamir.combine([(place, part[i : i + HALF]) for place, part in enough]) for i in (0, HALF))


def _sealed(key: bytes, u: int, v: int, text: bytes) -> bytes:
    from Crypto.Cipher import AES

    made = AES.new(
        key, AES.MODE_GCM, nonce=u.to_bytes(6, "big") + v.to_bytes(6, "big")
    )  # a key has one letter each way
    result, tag = made.encrypt_and_digest(text)
    return tag + result


def _opened(key: bytes, u: int, v: int, letter: bytes) -> _Parts:
    from Crypto.Cipher import AES

    made = AES.new(key, AES.MODE_GCM, nonce=u.to_bytes(6, "big") + v.to_bytes(6, "big"))
    text = made.decrypt_and_verify(letter[HALF:], letter[:HALF])
    return _Parts(int.from_bytes(text[:4], "big"), text[4 : 4 + 2 * HALF], text[4 + 2 * HALF :])
