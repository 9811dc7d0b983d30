"""AFL's three data sets as published, and the paper's order on one of them."""

from pathlib import Path

import pytest

import fedfleet
from fedfleet.datasets import adult, text
from fedfleet.datasets.published import Published, chosen


def needs(folder: Path, name: str) -> Path:
    if not (folder / name).exists():
        pytest.skip(f"no real data: {name} is not in {folder}")
    return folder


def test_adult(data_folder):
    data = adult.load(needs(data_folder, "adult/adult.data"))
    assert (len(data.train), len(data.test), data.train.x.shape[1]) == (32_561, 16_281, 99)
    assert (data.train.domain.bincount().tolist(), data.test.domain.bincount().tolist()) == (
        [413, 32_148],
        [181, 16_100],
    )
    assert float(data.train.y.double().mean()) == pytest.approx(0.2408, abs=1e-4)


@pytest.mark.parametrize(
    ("column", "sizes"), [("sex", [10_771, 21_790]), ("education", None), ("native-country", None)]
)
def test_adult_by_other_columns(data_folder, column, sizes):
    data = chosen(adult.load(needs(data_folder, "adult/adult.data")), Published(domain=column))
    found = data.train.domain.bincount().tolist()
    assert sizes in (None, found)
    assert min(found) > 0
    assert len(found) == len(data.domains) > int(data.test.domain.max())


def test_small_texts(data_folder):
    data = text.load_small_texts(needs(data_folder, "text/document.txt"))
    assert data.train.classes == 2_000
    assert all(part.domain.bincount().min() > 80 for part in (data.train, data.test))
    assert float((data.test.x == text.UNKNOWN).double().mean()) < 0.2


CONFIGS = Path(__file__).parents[2] / "configs" / "afl"


@pytest.mark.slow
def test_the_agnostic_model_helps_the_worst_class(data_folder, fashion_mnist, tmp_path):
    """The paper's order on its second experiment, in a tenth of the steps of the table in the docs."""
    shirts = {}
    for label, more in {"uniform": {"algorithm.dual.lambda_set.kind": "sizes"}, "agnostic": {}}.items():
        given = {"compare": None, "seeds": None, "rounds": 200, "evaluation.every": 200, **more}
        given["population.data_dir"] = str(data_folder)
        run = fedfleet.Experiment(fedfleet.load(CONFIGS / "fashion_mnist.yaml", given)).run(tmp_path / label)
        shirts[label] = run.summary["final"]["eval/accuracy_worst_domain"]
    assert shirts["agnostic"] > shirts["uniform"] + 0.03
