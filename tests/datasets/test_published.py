"""Options of published data sets, and Adult, from files of its layout made here."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.datasets import adult, registry
from fedfleet.datasets.examples import Column, Dataset, Examples
from fedfleet.datasets.files import DataError
from fedfleet.datasets.published import Published, chosen
from tests.refusals import all_say

ROW = (
    "39, State-gov, 77516, {education}, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "{country}, {income}\n"
)
TRAIN = (
    ROW.format(education="Bachelors", country="United-States", income="<=50K")
    + ROW.format(education="Doctorate", country="?", income=">50K")
    + "\n"
)
TEST = "|1x3 Cross validator\n" + ROW.format(education="Doctorate", country="Hong", income=">50K.") + "\n"


def write(folder: Path, train: str = TRAIN, test: str = TEST) -> Path:
    (folder / "adult").mkdir()
    (folder / "adult" / "adult.data").write_text(train)
    (folder / "adult" / "adult.test").write_text(test)
    return folder


def domain(examples: Examples) -> Tensor:
    assert examples.domain is not None
    return examples.domain


def test_adult(tmp_path):
    data = adult.load(write(tmp_path))
    assert (data.domains, data.train.x.shape) == (("doctorate", "others"), (2, 99))
    assert data.train.x.sum(1).tolist() == [8, 7]  # a missing value is zeros
    assert (data.train.y.tolist(), domain(data.train).tolist()) == ([0, 1], [1, 0])
    assert (data.test.y.tolist(), domain(data.test).tolist()) == ([1], [0])
    names = [f"{column}={value}" for column, text in adult.CATEGORIES.items() for value in text.split(", ")]
    wanted = "workclass=State-gov education=Doctorate marital-status=Never-married occupation=Adm-clerical"
    wanted += " relationship=Not-in-family race=White sex=Male native-country=Hong"
    assert [names[i] for i in data.test.x[0].nonzero().flatten()] == wanted.split()


def test_any_column_of_adult_makes_domains(tmp_path):
    rows = [("Doctorate", "Black"), ("Masters", "White"), ("Doctorate", "Asian-Pac-Islander"), ("10th", "White")]
    row = ROW.replace("White", "{race}")
    train = "".join(row.format(education=e, race=r, country="?", income=">50K") for e, r in rows)
    test = "".join(row.format(education=e, race=r, country="?", income="<=50K.") for e, r in rows[::-2])
    folder = write(tmp_path, train, test)
    data = registry.load("adult", folder, Published(domain="race"))
    assert data.domains == ("White", "Asian-Pac-Islander", "Black")
    assert (domain(data.train).tolist(), domain(data.test).tolist()) == ([2, 0, 1, 0], [0, 0])
    data = registry.load("adult", folder, Published(domain="education"))
    assert data.domains == ("Masters", "10th", "Doctorate")
    assert (domain(data.train).tolist(), domain(data.test).tolist()) == ([2, 0, 2, 1], [1, 0])
    assert registry.load("adult", folder, Published(domain="native-country")).domains == ("?",)
    assert registry.load("adult", folder).domains == adult.DOMAINS


def test_columns_that_make_no_domains(subtests, tmp_path):
    folder = write(tmp_path)
    rows = [
        (("adult", {"domain": "sexx"}), "population.dataset.domain='sexx' … workclass, education"),
        (("adult", {"domain": "sex", "label_domains": True}), "label_domains"),
        (("adult", {"domain": "native-country"}), "domain 'Hong'"), (("digits", {"domain": "sex"}), "digits has none"),
    ]  # fmt: skip
    all_say(subtests, lambda row: registry.load(row[0], folder, Published(**row[1])), rows, DataError)


def test_a_damaged_adult(subtests, tmp_path_factory):
    def call(train):
        tmp_path = tmp_path_factory.mktemp("row")
        adult.load(write(tmp_path, train))

    rows = [
        (TRAIN.replace("Bachelors", "Bachelor"), "has the education 'Bachelor', which is none of those published"),
        (TRAIN.replace(">50K", ">60K"), "has the income '>60K', expected <=50K or >50K"), ("", "has no row"),
        ("a, b\n1\n", "has the income"),
    ]  # fmt: skip
    all_say(subtests, call, [(row, f"adult/adult.data … {says}") for row, says in rows], DataError)


def examples(count: int) -> Examples:
    y = torch.arange(count) % 4
    return Examples((torch.arange(count * 3).reshape(count, 3) % 251).to(torch.uint8), y, 4, torch.arange(count) % 3)


DATA = Dataset("made", examples(60), examples(24), ("a", "b", "c"))


def test_classes_are_renumbered_in_their_order():
    data = chosen(DATA, Published(classes=[2, 0], label_domains=True))
    rows = torch.isin(DATA.train.y, torch.tensor([0, 2]))
    assert torch.equal(data.train.x, DATA.train.x[rows])
    assert data.train.y.tolist() == [0 if y == 2 else 1 for y in DATA.train.y[rows].tolist()]
    assert data.train.classes == 2
    assert torch.equal(domain(data.test), data.test.y)
    assert data.domains == ("2", "0")
    columns = {"parity": Column(("even", "odd", "neither"), DATA.train.y % 2, DATA.test.y % 2)}
    data = chosen(replace(DATA, columns=columns), Published(classes=[1, 3], domain="parity"))
    assert (data.domains, domain(data.train).unique().tolist()) == (("odd",), [0])
    assert domain(chosen(DATA, Published(classes=[3, 1])).train).tolist() == domain(DATA.train)[~rows].tolist()
    for wrong in ([0, 4], [1, 1]):
        with pytest.raises(DataError, match="give different labels from 0 to 3"):
            chosen(DATA, Published(classes=wrong))


def test_standardised_by_all_training_examples():
    data = chosen(DATA, Published(standardise=True, classes=[1, 3]))
    raw = DATA.train.x.float()
    wanted = (DATA.test.x.float() - raw.mean(0)) / (raw.std(0, correction=0) + 1e-3)
    torch.testing.assert_close(data.test.x, wanted[torch.isin(DATA.test.y, torch.tensor([1, 3]))])


def test_held_out_examples_are_a_share_of_each_domain_and_not_trained_on():
    data = chosen(DATA, Published(hold_out=0.2))
    assert (domain(data.test).bincount().tolist(), domain(data.train).bincount().tolist()) == ([4, 4, 4], [16, 16, 16])
    both = torch.cat([data.train.x, data.test.x])
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, DATA.train.x.tolist()))
    assert torch.equal(chosen(DATA, Published(hold_out=0.2)).test.x, data.test.x)


def test_options_reach_the_loader():
    data = registry.load("digits", Path("none"), Published(classes=[3, 8]))
    assert (data.train.classes, len(data.train) + len(data.test)) == (2, 183 + 174)


@given(wanted=st.permutations(["a", "b", "c"]), count=st.integers(1, 3))
def test_domains_are_chosen_by_name_and_numbered_in_the_order_given(wanted: list[str], count: int):
    data = chosen(DATA, Published(domains=wanted[:count]))
    assert data.domains == tuple(wanted[:count])
    for part, whole in ((data.train, DATA.train), (data.test, DATA.test)):
        rows = torch.isin(domain(whole), torch.tensor(["abc".index(name) for name in wanted[:count]]))
        assert all(map(torch.equal, (part.x, part.y), (whole.x[rows], whole.y[rows])))
        names = [data.domains[k] for k in domain(part).tolist()]
        assert names == ["abc"[k] for k in domain(whole)[rows].tolist()]


def test_any_domains_may_be_chosen(tmp_path):
    columns = {"parity": Column(("even", "odd"), DATA.train.y % 2, DATA.test.y % 2)}
    data = chosen(replace(DATA, columns=columns), Published(domain="parity", domains=["odd"]))
    assert (data.domains, data.train.y.unique().tolist()) == (("odd",), [1, 3])
    data = chosen(DATA, Published(label_domains=True, domains=["3", "0"]))
    assert (data.domains, data.train.y[domain(data.train) == 0].unique().tolist()) == (("3", "0"), [3])
    data = registry.load("adult", write(tmp_path), Published(domains=["others"], per_domain=1))
    assert (len(data.train), domain(data.test).tolist()) == (1, [])


def test_domains_that_cannot_be_chosen(subtests):
    def call(row):
        data, options = row
        chosen(data, Published(**options))

    rows = [
        ((DATA, {"domains": ["a", "bb"]}), "domains=['a', 'bb']: made has no domain 'bb': did you mean 'b'? Known"),
        ((DATA, {"domains": ["zzz"]}), "made has no domain 'zzz': choose among a, b, c"),
        ((DATA, {"domains": ["a", "b", "a"]}), "a domain is there twice: give each once"),
        ((Dataset("plain", DATA.train, DATA.test), {"domains": ["a"]}), "plain has no domains: leave it out"),
        ((Dataset("made", DATA.train, DATA.test, (*"abcd",)), {"domains": ["a", "d"]}),
         "of the domain 'd': leave it out"),
    ]  # fmt: skip
    all_say(subtests, call, [(row, f"^population.dataset.domains= … {says}") for row, says in rows], DataError)


@given(most=st.integers(1, 25))
def test_training_examples_of_a_domain_are_limited(most: int):
    data = chosen(DATA, Published(per_domain=most))
    assert domain(data.train).bincount().tolist() == [min(most, 20)] * 3
    rows = [int(x[0]) // 3 for x in data.train.x]
    assert rows == sorted(set(rows))  # in their order, none twice
    assert data.train.y.tolist() == [row % 4 for row in rows]
    assert torch.equal(data.test.x, DATA.test.x)
    assert torch.equal(chosen(DATA, Published(per_domain=most)).train.x, data.train.x)
    fewer = chosen(DATA, Published(per_domain=most, hold_out=0.5))
    assert len(fewer.train) + len(fewer.test) == 3 * min(most, 20)


def test_without_domains_all_examples_are_limited_by_a_draw():
    plain = Dataset("plain", replace(DATA.train, domain=None), DATA.test)
    rows = [int(x[0]) // 3 for x in chosen(plain, Published(per_domain=10)).train.x]
    assert len(set(rows)) == 10
    assert max(rows) >= 10
