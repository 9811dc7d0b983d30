"""UCI Adult: does a person of the 1994 census earn more than 50,000 dollars, from categories alone; two domains.

B. Becker and R. Kohavi, "Adult", UCI Machine Learning Repository, 1996, https://doi.org/10.24432/C5XW20.

Prepared as for agnostic federated learning (Mohri, Sivek & Suresh, ICML 2019; the columns are those of the code of T. Li et
al., "Fair resource allocation in federated learning", ICLR 2020): the eight categorical columns, one-hot, 99 numbers; a
missing value is zeros. The domains are people with a doctorate and the others, or the values of one of these columns, of which
a missing one is "?".
"""

from pathlib import Path

import numpy as np
import torch

from fedfleet.datasets.examples import Column, Dataset, Examples
from fedfleet.datasets.files import broken, fetch

SITE = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
FILES = {"adult.data": "5d7c39d7b8804f071cdd1f2a7c460872", "adult.test": "35238206dfdf7f1fe215bbb874adecdc"}
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
CATEGORIES = {
    "workclass": "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, Never-worked",
    "education": "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, Masters, "
    "1st-4th, 10th, Doctorate, 5th-6th, Preschool",
    "marital-status": "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, Married-AF-spouse",
    "occupation": "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, Handlers-cleaners, "
    "Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, Priv-house-serv, Protective-serv, Armed-Forces",
    "relationship": "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    "race": "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    "sex": "Female, Male",
    "native-country": "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, Japan, "
    "Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, Ireland, France, "
    "Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, Scotland, Thailand, Yugoslavia, "
    "El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands",
}
DOMAINS = ("doctorate", "others")
MISSING = "?"
INCOMES = ("<=50K", ">50K")


def load(folder: Path) -> Dataset:
    """Return Adult from `folder`/adult: float32 (32,561 + 16,281, 99), labels 0 and 1 (more than 50K), domains `DOMAINS`.

    Raises DataError.
    """
    paths = [fetch(folder, f"adult/{name}", [SITE + name], md5) for name, md5 in FILES.items()]
    (train, known), (test, known_of_test) = map(_read, paths)
    columns = {
        name: Column((*text.split(", "), MISSING), known[name], known_of_test[name])
        for name, text in CATEGORIES.items()
    }
    return Dataset("adult", train, test, DOMAINS, columns)


def _read(path: Path) -> tuple[Examples, dict[str, torch.Tensor]]:
    """Return the examples of a file, and each of their columns as numbers of its categories, the last of them missing values."""
    import pandas as pd  # here, for what else reads data sets needs none

    try:
        table = pd.read_csv(path, names=COLUMNS, skipinitialspace=True, dtype=str, comment="|", keep_default_na=False)
    except (OSError, ValueError) as error:
        raise broken(path, f"cannot be read ({error})", SITE) from error
    income = table["income"].astype(str).str.removesuffix(".")
    if len(table) == 0:
        raise broken(path, "has no row", SITE)
    if (strange := ~income.isin(INCOMES)).any():
        raise broken(
            path, f"has the income {table['income'][strange.idxmax()]!r}, expected {' or '.join(INCOMES)}", SITE
        )
    hot, columns = [], {}
    for column, text in CATEGORIES.items():
        names = np.array(text.split(", "))
        result = table[column].to_numpy(str)[:, None] == names
        if (strange := ~result.any(1) & (table[column] != MISSING).to_numpy()).any():
            raise broken(
                path,
                f"has the {column} {table[column][int(strange.argmax())]!r}, which is none of those published",
                SITE,
            )
        hot.append(result)
        columns[column] = torch.from_numpy(np.where(result.any(1), result.argmax(1), len(names)))
    x = torch.from_numpy(np.concatenate(hot, 1).astype(np.float32))
    y = torch.from_numpy((income == INCOMES[1]).to_numpy().astype(np.int64))
    domain = torch.from_numpy((table["education"] != "Doctorate").to_numpy().astype(np.int64))
    return Examples(x, y, 2, domain), columns
