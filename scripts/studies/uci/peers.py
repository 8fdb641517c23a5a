"""Other people's models on the splits of the UCI sets: each in its own environment, timed in the same run; resumable.

    python -m scripts.studies.uci.peers --data data/uci --output runs/uci --environments runs/peers
    python -m scripts.studies.uci.peers --data data/uci --output runs/uci --environments runs/peers \
        --sets kin8nm --peers catboost_quantiles --splits 5

The environments are made with venv and pip as they are needed; their versions are pinned below. All models are at
their defaults, on one thread (`peer_models.py`). The cells lie beside those of `reproduce`, which shows them:
`peer-NAME-SET-N.json` has the first N splits. Run the same command again to resume.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_path, make_folder
from marigold_uq.results import versions
from marigold_uq.tabular.duplicates import score_apart
from marigold_uq.tabular.scores import SplitScores, score_rows
from marigold_uq.tabular.uci import UCI_SETS, UCIDataset, UCISplit
from scripts.studies.uci import peer_models
from scripts.studies.uci.cells import Cell, CellKey, CellStore, dataset_digest

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "common": (
        "numpy==2.4.6",
        "scikit-learn==1.9.1",
        "catboost==1.2.10",
        "ngboost==0.5.11",
        "lightgbm==4.7.0",
        "quantile-forest==1.4.2",
    ),
    "treeffuser": ("treeffuser==0.2.0", "numpy==1.26.4", "scikit-learn==1.5.0", "lightgbm==4.3.0"),
    "diffgbm": ("diffgbm==0.1.2", "numpy==2.4.6", "scikit-learn==1.9.1", "lightgbm==4.7.0"),
}
"""Name -> what pip installs; TreeFFuser pins older versions than the others need."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_MODULE = Path(peer_models.__file__)


@dataclass(frozen=True)
class PeerStudy:
    """Fit other people's models to the splits of the UCI sets; cells as `reproduce` makes them.

    Args:
        data: Folder with one folder per UCI set.
        output: Folder of the results.
        environments: Folder of the virtual environments; what is missing is made.
        sets: Names of sets.
        peers: Names of models, see `peer_models.MODELS`.
        splits: Only the first splits of a set, this many.
        ensemble_size: Draws per test row.
        seed: Of split 0; that of the others is added to their number.
    """

    data: Path
    output: Path
    environments: Path
    sets: list[str] = field(default_factory=lambda: list(UCI_SETS))
    peers: list[str] = field(default_factory=lambda: list(peer_models.MODELS))
    splits: int | None = None
    ensemble_size: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_peers(self.peers)
        unknown = set(self.sets) - set(UCI_SETS)
        if unknown:
            raise ValueError(f"unknown data set {', '.join(sorted(unknown))}; expected {', '.join(UCI_SETS)}")
        if self.splits is not None and self.splits < 1:
            raise ValueError(f"splits must be at least 1; got {self.splits}")


def check_peers(names: Sequence[str]) -> None:
    """Refuse names that are no peer's."""
    unknown = sorted(set(names) - set(peer_models.MODELS))
    if unknown:
        raise ValueError(f"peers must be some of {', '.join(peer_models.MODELS)}; got {', '.join(unknown)}")


def environment_of(peer: str) -> str:
    """The name of the environment that a peer runs in."""
    return peer if peer in ENVIRONMENTS else "common"


def make_environment(folder: Path, name: str) -> Path:
    """The python of an environment below `folder`, made if it is not there or holds other versions."""
    place, wanted = folder / name, "\n".join(ENVIRONMENTS[name]) + "\n"
    python, record = place / "bin" / "python", place / "requirements.txt"
    if not (record.exists() and record.read_text(encoding="utf-8") == wanted):
        tqdm.write(f"making the environment {place}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *ENVIRONMENTS[name]], check=True)
        with atomic_path(record, overwrite=True) as temporary:
            temporary.write_text(wanted, encoding="utf-8")
    return python


def peer_versions(python: Path) -> dict[str, str]:
    """Name -> version of the packages of `ENVIRONMENTS` that a python has."""
    program = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found = json.loads(subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True).stdout)
    names = {line.partition("==")[0] for lines in ENVIRONMENTS.values() for line in lines}
    return {name: version for name, version in sorted(found.items()) if name in names}


def score_peer(
    python: Path,
    peer: str,
    splits: Sequence[UCISplit],
    *,
    ensemble_size: int,
    seed: int,
    done: Sequence[SplitScores] = (),
    keep: Callable[[list[SplitScores]], None] = lambda scores: None,
) -> list[SplitScores]:
    """Scores of every split, fitted by one process of `python`, seeded with seed + split; `done` is taken as it is."""
    scores, numbers = list(done), range(len(done), len(splits))
    with tempfile.TemporaryDirectory(prefix="marigold_uq_peer_") as folder:
        jobs = [(_write_split(Path(folder), n, splits[n]), Path(folder) / f"out_{n}.npz", seed + n) for n in numbers]
        for number, output in zip(numbers, _finished(python, peer, jobs, ensemble_size), strict=True):
            scores.append(_score(output, splits[number], seed))
            keep(scores)
    return scores


def _write_split(folder: Path, number: int, split: UCISplit) -> Path:
    """What a peer may see: no test targets."""
    path = folder / f"in_{number}.npz"
    np.savez(
        path,
        train_features=split.train_features,
        train_targets=split.train_targets,
        test_features=split.test_features,
    )
    return path


def _finished(python: Path, peer: str, jobs: Sequence[tuple[Path, Path, int]], ensemble_size: int) -> Iterator[Path]:
    """The outputs of one process as they come."""
    if not jobs:
        return
    files = [str(path) for given, output, _ in jobs for path in (given, output)]
    seeds = [str(seed) for _, _, seed in jobs]
    command = [str(python), str(_MODULE), peer, "--ensemble_size", str(ensemble_size), *files, "--seed", *seeds]
    single = {**os.environ, **dict.fromkeys(_THREADS, "1")}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=single) as process,
    ):
        assert process.stdout is not None
        expected = {str(output) for _, output, _ in jobs}
        try:
            yield from (Path(line.strip()) for line in process.stdout if line.strip() in expected)
        except BaseException:  # an interrupted study leaves no process behind
            process.terminate()
            raise
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"{peer} failed in {python}:\n{errors.read()[-2000:]}")


def _score(output: Path, split: UCISplit, seed: int) -> SplitScores:
    with np.load(output) as found:
        samples, interval = found["samples"], found["interval"]
        seconds = {name: float(found[name]) for name in found.files if name.endswith("_seconds")}
    scale = float(split.train_targets.std())
    scores = score_rows(samples, split.test_targets, target_scale=scale, interval=interval, seed=seed)
    return {**scores, **score_apart(samples, split), **seconds}


def make_cell(study: PeerStudy, peer: str, name: str) -> Cell:
    """The cell of a peer and a set; one that is there already is read."""
    dataset = UCIDataset.load(study.data, name)
    count = min(study.splits or dataset.num_splits, dataset.num_splits)
    key = CellKey("peer", peer, name, count)
    identity = {"data": dataset_digest(dataset), "seed": study.seed, "ensemble_size": study.ensemble_size}
    splits = [dataset.split(number) for number in range(count)]
    return peer_cell(CellStore(study.output), study.environments, key, splits, identity)


def peer_cell(
    store: CellStore, environments: Path, key: CellKey, splits: Sequence[UCISplit], identity: Mapping[str, Any]
) -> Cell:
    """A cell of the peer `key.family`, read if it is there; finished splits are kept. `identity` has its settings."""
    cell = store.load(key, identity)
    if cell is not None:
        return cell
    done = store.load_splits(key, identity)
    python = make_environment(environments, environment_of(key.family))
    with tqdm(total=len(splits), initial=len(done), desc=key.name, unit="split") as bar:

        def keep(scores: list[SplitScores]) -> None:
            store.save_splits(key, identity, scores)
            bar.update()

        settings = {"ensemble_size": identity["ensemble_size"], "seed": identity["seed"]}
        scores = score_peer(python, key.family, splits, done=done, keep=keep, **settings)
    cell = Cell(key, None, scores, _facts(key.family, python, identity))
    store.save(cell)
    return cell


def _facts(peer: str, python: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: identity[name] for name in ("seed", "ensemble_size")}
    model = {"peer": peer, "peer_versions": peer_versions(python)}
    return {**settings, "identity": dict(identity), **model, "versions": versions()}


def _run(study: PeerStudy, invocation: Invocation) -> int:
    """Make what is missing; a peer that fails on a set is named, and the others go on."""
    make_folder(study.output)
    failed = 0
    for name in study.sets:
        for peer in study.peers:
            try:
                cell = make_cell(study, peer, name)
            except RuntimeError as error:
                failed += 1
                print(f"{peer} on {name}: {error}", file=sys.stderr, flush=True)
                continue
            score, seconds = cell.summary["crps"], cell.summary["fit_cpu_seconds"]
            print(f"{cell.key.name}: CRPS {score.mean:.4g}, {seconds.mean:.3g} s per fit", flush=True)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.uci.peers", PeerStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
