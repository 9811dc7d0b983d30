"""Partitions under Flower's names, each held to its definition, and partitions in files."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.datasets import partition, partition_file, partition_skews
from fedfleet.datasets.files import DataError
from fedfleet.datasets.partition import Partition
from fedfleet.datasets.partition_config import File
from tests.refusals import all_say, tells

seeds = st.integers(0, 2**40)


def counts(dealt: Partition, labels: Tensor) -> np.ndarray:
    """How many examples (N, C) of each label that is there a client has; nothing is dealt twice."""
    assert dealt.indices.unique().numel() == len(dealt.indices)
    there, number = labels.unique(return_inverse=True)
    owner = torch.arange(len(dealt.sizes)).repeat_interleave(dealt.sizes)
    found = np.zeros((len(dealt.sizes), len(there)), dtype=int)
    np.add.at(found, (owner.numpy(), number[dealt.indices].numpy()), 1)
    return found


@given(clients=st.integers(1, 30), classes=st.integers(1, 6), per=st.integers(30, 45), seed=seeds, data=st.data())
def test_pathological_clients_have_so_many_labels_and_share_each_equally(clients, classes, per, seed, data):
    k = data.draw(st.integers(1, classes))
    mode = data.draw(st.sampled_from(["random", "first_deterministic", "deterministic"]))
    labels = (torch.arange(classes * per) % classes) * 3 + 1  # labels need not be 0, 1, …
    found = counts(partition_skews.pathological(labels, clients, seed, k, mode), labels)
    assert ((found > 0).sum(1) == k).all()
    for label in found.T:
        has = label[label > 0]
        assert has.sum() in (0, per)  # of a label that anybody has, all are dealt
        assert not len(has) or (has.max() - has.min() <= 1 and (np.diff(has) <= 0).all())  # the first have one more
    own = np.arange(clients) % classes
    if mode != "random":
        assert (found[np.arange(clients), own] > 0).all()
    if mode == "deterministic":
        for step in range(k):
            assert (found[np.arange(clients), (own + step) % classes] > 0).all()


def test_pathological_labels_are_drawn_alike():
    labels = torch.arange(60_000) % 10
    found = counts(partition_skews.pathological(labels, 2000, 1, 3), labels) > 0
    assert abs(found.mean(0) - 0.3).max() < 4 * math.sqrt(0.3 * 0.7 / 2000)
    first = counts(partition_skews.pathological(labels, 2000, 1, 3, "first_deterministic"), labels) > 0
    others = first[::10, 1:].mean(0)  # clients 0, 10, …: label 0, and two of the other nine
    assert abs(others - 2 / 9).max() < 4 * math.sqrt(2 / 9 * 7 / 9 / 200)


@given(clients=st.integers(1, 5), classes=st.integers(2, 5), per=st.integers(60, 90), seed=seeds, data=st.data())
def test_a_distribution_spreads_a_label_over_its_clients(clients, classes, per, seed, data):
    k, least = data.draw(st.integers(1, classes)), data.draw(st.integers(0, 2))
    n = clients * classes
    labels = torch.arange(classes * per) % classes
    weights = data.draw(
        st.lists(
            st.lists(st.integers(1, 9), min_size=k * clients, max_size=k * clients), min_size=classes, max_size=classes
        )
    )
    found = counts(partition_skews.distribution(labels, n, seed, k, least, weights=weights), labels)
    assert found.sum() == len(labels)
    for label in range(classes):
        mine = [i for i in range(n) if (label - i) % classes < k]
        assert len(mine) == k * clients
        assert found[:, label].sum() == found[mine, label].sum() == per
        share = np.array(weights[label]) / sum(weights[label]) * (per - least * len(mine))
        more = found[mine, label] - least - np.floor(share + 1e-9)
        assert (more >= -1).all()  # a floor of floats may be one below
        assert (more > 0).sum() <= 1  # what rounding leaves goes to one
    exact = [[1 + i for i in range(k * clients)] for _ in range(classes)]
    if sum(exact[0]) <= per:
        whole = counts(partition_skews.distribution(labels, n, seed, k, weights=exact, rescale=False), labels)
        for label in range(classes):
            assert [c for i, c in enumerate(whole[:, label]) if (label - i) % classes < k] == exact[label]


def test_the_distribution_of_the_paper():
    """1,000 clients of two labels, log-normal: at least five of each, a few clients with most of a label."""
    labels = torch.arange(60_000) % 10
    found = counts(partition_skews.distribution(labels, 1000, 0), labels)
    assert ((found > 0).sum(1).tolist(), found[found > 0].min()) == ([2] * 1000, 5)
    more = np.log(found[found > 200] - 5.0)
    assert found.max() > 400
    assert len(more) > 10
    narrow = counts(partition_skews.distribution(labels, 1000, 0, sigma=0.0), labels)
    assert (narrow[narrow > 0] == 30).all()


@given(clients=st.integers(1, 12), classes=st.integers(1, 5), per=st.integers(12, 30), seed=seeds, data=st.data())
def test_inner_dirichlet_fills_the_sizes(clients, classes, per, seed, data):
    labels = torch.arange(classes * per) % classes
    sizes = data.draw(st.none() | st.lists(st.integers(1, classes), min_size=clients, max_size=clients))
    alpha = data.draw(st.sampled_from([1e-3, 0.5, 100.0]))
    dealt = partition_skews.inner_dirichlet(labels, clients, seed, alpha, sizes)
    assert dealt.sizes.tolist() == (sizes or [classes * per // clients] * clients)
    assert (counts(dealt, labels).sum(0) <= per).all()


def test_inner_dirichlet_shares_are_those_of_the_distribution():
    """Few clients of many examples: a client's mix is its draw, whose variance under alpha is (1/C)(1 - 1/C) / (C alpha + 1)."""
    labels = torch.arange(400_000) % 4
    for alpha in (0.2, 2.0):
        found = counts(partition_skews.inner_dirichlet(labels, 400, 5, alpha, [100] * 400), labels) / 100
        assert abs(found.mean() - 0.25) < 1e-9
        assert abs(found.mean(0) - 0.25).max() < 0.1
        of_draw = 0.25 * 0.75 / (4 * alpha + 1)
        sampled = (0.25 * 0.75 - of_draw) / 100
        assert found.var() == pytest.approx(of_draw + sampled, rel=0.15)
    skewed = counts(partition_skews.inner_dirichlet(labels, 400, 5, [8.0, 4.0, 2.0, 2.0], [100] * 400), labels).mean(0)
    assert abs(skewed / 100 - [0.5, 0.25, 0.125, 0.125]).max() < 0.03


def test_inner_dirichlet_goes_on_when_labels_run_out():
    labels = torch.tensor([0] * 10 + [1] * 90)
    found = counts(partition_skews.inner_dirichlet(labels, 10, 0, [1e3, 1e-3]), labels)
    assert (found.sum(0).tolist(), found.sum(1).tolist()) == ([10, 90], [10] * 10)
    assert (found[:, 0] > 0).sum() > 3  # who comes first is drawn example by example, not client by client


LAWS = {"linear": lambda i: i, "square": lambda i: i * i, "exponential": lambda i: math.exp(i)}


@given(law=st.sampled_from([*LAWS]), clients=st.integers(1, 7), more=st.integers(0, 500), seed=seeds)
def test_sizes_follow_their_law(law, clients, more, seed):
    units = [LAWS[law](i) for i in range(1, clients + 1)]
    examples = math.ceil(sum(units) / units[0]) + 1 + more
    dealt = partition_skews.by_size(torch.zeros(examples, dtype=torch.int64), clients, seed, law)
    wanted = [u / sum(units) * examples for u in units]
    for size, share in zip(dealt.sizes.tolist()[:-1], wanted[:-1], strict=True):
        assert size in {math.floor(share), math.floor(share * (1 - 1e-12)), math.floor(share * (1 + 1e-12))}
    assert torch.equal(dealt.indices.sort().values, torch.arange(examples))
    assert examples < 30 or not torch.equal(dealt.indices, torch.arange(examples))


LABELS = torch.arange(240) % 6


def test_what_cannot_be_dealt_is_said(subtests):
    rows = [
        (lambda: partition_skews.pathological(LABELS, 4, 0, 7),
         "classes_per_client is 7: there are 6 labels: give 1 to 6"),
        (lambda: partition_skews.pathological(LABELS, 4, 0, 0), "classes_per_client is 0"),
        (lambda: partition_skews.pathological(LABELS, 200, 0, 6),
         "200 clients cannot share 40 examples of label 0: ask for"),
        (lambda: partition_skews.distribution(LABELS, 10, 0), "10 clients are no multiple of 6 labels: ask for 12"),
        (lambda: partition_skews.distribution(LABELS, 2, 0), "2 clients are no multiple of 6 labels: ask for 6"),
        (lambda: partition_skews.distribution(LABELS, 12, 0, least=11),
         "4 clients share 40 examples of a label: give 0 to 10"),
        (lambda: partition_skews.distribution(LABELS, 12, 0, least=-1), "least is -1"),
        (lambda: partition_skews.distribution(LABELS, 12, 0, 7), "labels_per_client is 7: there are 6"),
        (lambda: partition_skews.distribution(LABELS, 6, 0, 1, weights=[[1]] * 5), "weights are not 6 rows"),
        (lambda: partition_skews.distribution(LABELS, 6, 0, 1, weights=[[1, 2]] * 6), "of 1 numbers"),
        (lambda: partition_skews.distribution(LABELS, 6, 0, 1, weights=[[-1]] * 6), "not all finite numbers from 0"),
        (lambda: partition_skews.distribution(LABELS, 6, 0, 1, weights=[[0]] * 6), "weights of label 0 are all 0"),
        (lambda: partition_skews.distribution(LABELS, 6, 0, rescale=False),
         "rescale is false, and no weights are given"),
        (lambda: partition_skews.distribution(LABELS, 6, 0, 1, weights=[[41]] * 6, rescale=False),
         "weights ask for 41 of 40 examples of label 0: lower them"),
        (lambda: partition_skews.inner_dirichlet(LABELS, 3, 0, sizes=[1, 2]),
         "sizes are 2 numbers from 1 with the sum 3"),
        (lambda: partition_skews.inner_dirichlet(LABELS, 2, 0, sizes=[1, 240]), "240 in all at most"),
        (lambda: partition_skews.inner_dirichlet(LABELS, 2, 0, sizes=[0, 2]), "give one from 1"),
        (lambda: partition_skews.inner_dirichlet(LABELS, 2, 0, [0.5] * 5), "or one for each of 6 labels"),
        (lambda: partition_skews.inner_dirichlet(LABELS, 2, 0, 0.0), "alpha is 0.0: give a finite number above 0"),
        (lambda: partition_skews.by_size(LABELS, 100, 0, "linear"),
         "the first of 100 clients would have none of 240 examples"),
        (lambda: partition_skews.by_size(LABELS, 100, 0, "linear"), "ask for at most 21"),
        (lambda: partition_skews.by_size(LABELS, 100, 0, "exponential"), "ask for at most 6"),
        (lambda: partition_skews.by_size(LABELS, 100, 0, "square"), "ask for at most 8"),
    ]  # fmt: skip
    all_say(subtests, lambda make: make(), rows, ValueError)


def test_too_many_clients_are_refused_soon():
    started = time.perf_counter()
    with pytest.raises(ValueError, match="ask for at most 632"):  # 632 * 633 / 2 is 200,028, and 633 * 634 / 2 more
        partition_skews.by_size(torch.zeros(200_028, dtype=torch.int64), 200_000, 0, "linear")
    assert time.perf_counter() - started < 5


def test_a_thousand_clients_are_filled_soon():
    started = time.perf_counter()
    partition_skews.inner_dirichlet(torch.arange(60_000) % 10, 1000, 0, 0.1)
    assert time.perf_counter() - started < 5


# Partitions in files
@pytest.mark.parametrize("home", [False, True])
def test_a_file_gives_back_the_partition(tmp_path: Path, home: bool):
    dealt = partition.by_domain(LABELS, 12, 3, heterogeneity=0.5) if home else partition.iid(LABELS, 12, 3)
    assert (dealt.home is not None) == home
    path = tmp_path / "p.parquet"
    partition_file.write(path, dealt, LABELS, {"kind": "by_domain"})
    again = partition_file.read(path, LABELS)
    assert torch.equal(again.indices, dealt.indices)  # in the clients' order, too: batches are drawn by it
    assert torch.equal(again.offsets, dealt.offsets)
    assert (again.home is None) == (not home)
    assert not home or torch.equal(again.home, dealt.home)
    assert torch.equal(File(path=str(path)).split(LABELS, None, 7, 99).indices, dealt.indices)
    assert File(path=str(path)).clients(7) == 12
    assert pd.read_parquet(path).columns.tolist() == ["client", "index", "home"][: 2 + home]


def test_a_file_of_others_needs_no_more_than_two_columns(tmp_path: Path):
    path = tmp_path / "p.parquet"
    pd.DataFrame({"index": [5, 0, 7, 2], "client": ["b", "a", "b", "a"]}).to_parquet(path)
    found = partition_file.read(path, LABELS)
    assert (found.indices.tolist(), found.offsets.tolist(), found.home) == ([0, 2, 5, 7], [0, 2, 4], None)
    assert File(path=str(path)).digest() == partition_file.digest(path)
    pd.DataFrame({"index": [5, 0, 7, 2], "client": [10, 9, 10, 9]}).to_parquet(path)
    assert partition_file.read(path).indices.tolist() == [0, 2, 5, 7]  # 9 before 10


def test_other_data_than_it_was_made_for_are_refused(tmp_path: Path):
    path = tmp_path / "p.parquet"
    partition_file.write(path, partition.iid(LABELS, 4, 0), LABELS, {})
    tells(lambda: partition_file.read(path, LABELS[:-1]), "deals 240 training examples, and there are 239", DataError)
    tells(lambda: partition_file.read(path, LABELS.flip(0)), "other labels than these data's", DataError)
    tells(lambda: File(path=str(path), sha256="0").split(LABELS, None, 4, 0), "now deals otherwise", DataError)
    assert File(path=str(path), sha256=partition_file.digest(path)).split(LABELS, None, 4, 0)
    with pytest.raises(DataError, match="cannot be written"):
        partition_file.write(Path("/proc/none/p.parquet"), partition.iid(LABELS, 4, 0), LABELS, {})


def test_a_home_is_a_domain_of_the_data(tmp_path: Path):
    path = tmp_path / "p.parquet"
    pd.DataFrame({"client": [0, 1], "index": [0, 1], "home": [0, 6]}).to_parquet(path)
    assert File(path=str(path)).split(LABELS, LABELS + 1, 2, 0).home.tolist() == [0, 6]
    with pytest.raises(DataError, match="at home in the domain 6, and the last of these data is 5: give the partition"):
        File(path=str(path)).split(LABELS, LABELS, 2, 0)


def test_bad_files_are_refused(subtests, tmp_path):
    def call(columns):
        pd.DataFrame(columns).to_parquet(tmp_path / "p.parquet")
        partition_file.read(tmp_path / "p.parquet", LABELS)

    rows = [
        ({"client": [0, 1], "index": [0, 240]}, "row 1: index 240, and there are 240 training examples"),
        ({"client": [0, 1], "index": [0, -1]}, "row 1: index -1: give the number of an example, from 0"),
        ({"client": [0, 1], "index": [0, 0.5]}, "row 1: index 0.5: give the number of an example, from 0"),
        ({"client": [0, 1, 1], "index": [3, 4, 3]}, "row 2: example 3 is dealt twice"),
        ({"client": [0, 0], "index": [0, 1], "home": [0, 1]}, "a client has two homes: give all its rows the same"),
        ({"client": [0, 1], "index": [0, 1], "home": [0, 0.5]}, "row 1: home 0.5: give the number of a domain, from 0"),
        ({"client": [0, 1], "index": [0, 1], "home": [0, -1]}, "row 1: home -1: give the number of a domain, from 0"),
        ({"client": [0, 0]}, "no column 'index'"),
        ({"client": [0.5], "index": [0]}, "column 'client' is double: make it integers or text"),
        ({"client": ["a", None], "index": [0, 1]}, "column 'client', row 1: is null"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)
