"""Public tables: fetched from packages, checked, and split."""

import io
import tarfile
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from support.scripts import load_script

from marigold_uq.tabular import public_tables
from marigold_uq.tabular.public_tables import PUBLIC_TABLES, PublicTable, TableFileError

pytest.importorskip("pandas")
CSV = "Unnamed,size,colour,day,code,price\n" + "".join(
    f"{n},{n / 3},{'red' if n % 2 else 'blue'},2024-01-{n % 28 + 1:02d},{n % 3},{'' if n == 5 else n * 2.5}\n"
    for n in range(41)
)


def describe(content: str = CSV) -> public_tables.TableFacts:
    """41 rows, one without a price, of columns that number the row, a number, text, a date and a code."""
    digest = sha256(content.encode()).hexdigest()
    facts = replace(PUBLIC_TABLES["wage"], digest=digest, target="price", num_rows=40, num_columns=4)
    return replace(facts, member="toy/data/toy.csv", leave_out=("Unnamed",), dates=("day",), categories=("code",))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(PUBLIC_TABLES, "wage", describe())
    (tmp_path / "wage.csv").write_text(CSV)
    return tmp_path


def test_a_table_is_what_was_described(root: Path) -> None:
    table = PublicTable.load(root, "wage")
    assert list(table.features.columns) == ["size", "colour", "day", "code"]
    assert table.features["day"].dtype.kind == "M"
    assert table.features["code"].dtype.name == "category"
    assert table.targets.tolist() == [n * 2.5 for n in range(41) if n != 5]


def test_splits_are_seeded_disjoint_and_encoded_from_training_rows(root: Path) -> None:
    table = PublicTable.load(root, "wage")
    splits = list(table)
    assert len(splits) == 5
    for number, split in enumerate(splits):
        train, test = table.rows(number)
        assert sorted([*train, *test]) == list(range(40))
        assert split.train_features.shape == (36, 1 + 2 + 5 + 3)
        np.testing.assert_array_equal(split.test_targets, table.targets[test])
        np.testing.assert_array_equal(split.test_features[:, 0], table.features["size"].to_numpy()[test])
    assert table.rows(0)[1].tolist() == table.rows(0)[1].tolist() != table.rows(1)[1].tolist()
    with pytest.raises(IndexError, match=r"splits 0\.\.4; got 5"):
        table.split(5)


def test_another_file_is_refused(root: Path) -> None:
    (root / "wage.csv").write_text(CSV + "\n")
    with pytest.raises(TableFileError, match=r"is not the file of ISLP==0.6.0: SHA-256 .*, expected"):
        PublicTable.load(root, "wage")
    with pytest.raises(TableFileError, match=r"prepare_tables.py --root .* fetches it"):
        PublicTable.load(root, "fair")


def archives(folder: Path) -> dict[str, tuple[Path, str]]:
    """The file in a wheel, in a source archive, and in an archive within that."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "toy.whl", "w") as wheel:
        wheel.writestr("toy/data/toy.csv", CSV)
    inner, outer = io.BytesIO(), folder / "toy.tar.gz"
    add(inner, "data/toy.csv", CSV.encode())
    with tarfile.open(outer, "w:gz") as archive:
        for name, content in (("toy/toy.csv", CSV.encode()), ("toy/inner.tar.gz", inner.getvalue())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return {
        "wheel": (folder / "toy.whl", "toy/data/toy.csv"),
        "source": (outer, "toy/toy.csv"),
        "within": (outer, "toy/inner.tar.gz!data/toy.csv"),
    }


def add(buffer: io.BytesIO, name: str, content: bytes) -> None:
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("kind", ["wheel", "source", "within"])
def test_files_are_read_out_of_packages(tmp_path: Path, kind: str) -> None:
    path, member = archives(tmp_path / "packages")[kind]
    assert load_script("scripts/prepare_tables.py").read_member(path, member) == CSV.encode()


def test_the_command_fetches_what_is_missing_and_checks_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("scripts/prepare_tables.py")
    monkeypatch.setitem(PUBLIC_TABLES, "wage", describe())
    wheel = archives(tmp_path / "packages")["wheel"][0]
    asked = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        return wheel

    monkeypatch.setattr(script, "_download", download)
    arguments = ["--root", str(tmp_path / "tables"), "--tables", "wage"]
    assert script.main(arguments) == 0
    assert script.main(arguments) == 0
    assert asked == ["ISLP==0.6.0"]
    assert (tmp_path / "tables" / "wage.csv").read_text() == CSV
    assert capsys.readouterr().out.count("wage         ok") == 2
    (tmp_path / "tables" / "wage.csv").write_text("other")
    assert script.main(arguments) == 1
    monkeypatch.setitem(PUBLIC_TABLES, "wage", replace(describe("another"), member="toy/data/toy.csv"))
    (tmp_path / "tables" / "wage.csv").unlink()
    with pytest.raises(TableFileError, match=r"toy.csv of ISLP==0.6.0: SHA-256"):
        script.fetch(tmp_path / "tables", ["wage"])
    assert not (tmp_path / "tables" / "wage.csv").exists()


def test_all_tables_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("scripts/prepare_tables.py")
    assert script.main([]) == 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + len(PUBLIC_TABLES)
    with pytest.raises(ValueError, match="unknown table boston"):
        script.PrepareTables(tables=["boston"])
