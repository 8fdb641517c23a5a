"""Check a data set on disk: which files are missing or broken, counted and with examples."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from marigold_uq.depth.data.base import DepthDataset, Problem
from marigold_uq.depth.data.listed import ListedDepth
from marigold_uq.depth.data.sample import DepthDataError
from marigold_uq.depth.data.specs import SPECS, DepthSpec

Progress = Callable[[Iterable[int]], Iterable[int]]  # e.g. tqdm


@dataclass
class LayoutReport:
    """What `check_layout` found; `ok` if nothing is missing and nothing that was decoded is broken."""

    title: str
    root: str
    num_samples: int = 0
    num_without_depth: int = 0
    num_decoded: int = 0
    num_published: int | None = None
    fatal: str | None = None
    missing: dict[str, list[str]] = field(default_factory=dict)  # "image" | "depth" | "mask" -> paths
    broken: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the data set can be used as it is."""
        return self.fatal is None and not self.broken and not any(self.missing.values())

    def text(self, num_examples: int = 5) -> str:
        """The findings, with the first examples of each kind."""
        if self.fatal is not None:
            return f"{self.title}: unusable\n  {self.fatal}"
        lines = [f"{self.title} in {self.root}: {self.num_samples} samples"]
        if self.num_without_depth:
            lines.append(f"  {self.num_without_depth} images have no ground truth and are left out")
        if self.num_published not in (None, self.num_samples):
            lines.append(
                f"  note: the published split has {self.num_published} samples; give its list with --filenames"
            )
        for kind, paths in self.missing.items():
            lines += _examples(f"{len(paths)} {kind} files missing", paths, num_examples)
        broken = [f"{name}: {reason}" for name, reason in self.broken]
        lines += _examples(f"{len(broken)} of {self.num_decoded} decoded samples broken", broken, num_examples)
        if self.ok:
            lines.append(f"  all files present, {self.num_decoded} samples decoded without error")
        return "\n".join(lines)


def check_layout(
    name: str,
    root: str | Path,
    filenames: str | Path | None = None,
    *,
    num_decode: int | None = 8,
    progress: Progress = iter,
) -> LayoutReport:
    """Look for every file of a published data set and decode `num_decode` evenly spaced samples (None: all)."""
    if name not in SPECS:
        raise ValueError(f"unknown data set {name!r}; known: {', '.join(SPECS)}")
    spec = SPECS[name]
    report = LayoutReport(spec.title, str(root), num_published=spec.num_published)
    try:
        dataset = ListedDepth(spec, root, filenames)
    except DepthDataError as error:
        report.fatal = str(error)
        return report
    report.num_samples, report.num_without_depth = len(dataset), len(dataset.lines_without_depth)
    complete = _find_missing(dataset, report)
    _decode_some(dataset, complete, num_decode, progress, report)
    return report


def check_samples(
    dataset: DepthDataset, title: str, root: str | Path, *, num_decode: int | None = None, progress: Progress = iter
) -> LayoutReport:
    """Decode `num_decode` evenly spaced samples (None: all) of any data set."""
    report = LayoutReport(title, str(root), num_samples=len(dataset))
    _decode_some(dataset, list(range(len(dataset))), num_decode, progress, report)
    return report


def describe(spec: DepthSpec) -> str:
    """The layout of a published data set, for people."""
    metres = "" if spec.depth_scale == 1 else f", metres = value / {spec.depth_scale:g}"
    details = [f"used for: {spec.role}", f"depth: {spec.depth_format}{metres}"]
    details.append(f"valid: {spec.min_depth:g} m < depth < {spec.max_depth:g} m")
    for label, value in (("crop", spec.crop), ("mask", spec.mask), ("resized to (H, W)", spec.resize)):
        if value is not None:
            details.append(f"{label}: {value}")
    if spec.num_published is not None:
        details.append(f"published split: {spec.num_published} samples")
    if spec.depth_may_be_absent:
        details.append("a line whose depth is None is left out and counted")
    details.append("a line of the filename list (paths relative to the root, which is a folder or a tar):")
    details += [f"  {column}" for column in spec.example.split()]
    details += ["get it from:", *(f"  {part}" for part in spec.source.split("; "))]
    return "\n  ".join([f"{spec.name}: {spec.title}", *details])


def _find_missing(dataset: ListedDepth, report: LayoutReport) -> list[int]:
    """Fill `report.missing`; the indices of samples whose files are all there."""
    complete = []
    for index, entry in enumerate(dataset.entries):
        absent = [(kind, path) for kind, path in entry.files() if not dataset.storage.contains(path)]
        for kind, path in absent:
            report.missing.setdefault(kind, []).append(path)
        if not absent:
            complete.append(index)
    return complete


def _decode_some(
    dataset: DepthDataset, indices: list[int], num_decode: int | None, progress: Progress, report: LayoutReport
) -> None:
    count = len(indices) if num_decode is None else min(num_decode, len(indices))
    chosen = [indices[i * len(indices) // count] for i in range(count)]
    report.num_decoded = count
    report.broken = dataset.scan(progress(chosen))


def _examples(headline: str, items: list[str], num_examples: int) -> list[str]:
    if not items:
        return []
    more = [f"    ... and {len(items) - num_examples} more"] if len(items) > num_examples else []
    return [f"  {headline}:", *(f"    {item}" for item in items[:num_examples]), *more]
