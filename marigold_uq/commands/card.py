"""`marigold-uq card`: the model card of a finished run, and its upload."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from marigold_uq.commands.runner import Invocation

__all__ = ["CardOptions", "run_card"]


@dataclass(frozen=True)
class CardOptions:
    """Write the model card of a finished run, and upload it.

    Args:
        folder: Run folder or pipeline folder.
        repo_id: Name on the Hub, user/name; used in the card's code and by push_to_hub.
        task: depth, field or tabular; default: what the pipeline's class says.
        evaluations: metrics.json files, or folders with them, beside those found below the folder.
        base_model: Hub name of the weights that were finetuned; default: from the run's config.
        datasets: Hub names of the training data; default: from the run's config.
        license: The Hub's identifier, for instance apache-2.0; default: that of a known base model.
        push_to_hub: Upload the model folder to repo_id.
        private: Make a new repository private.
        overwrite: Replace a card that is there.
    """

    folder: list[Path] = field(default_factory=list)
    repo_id: str | None = None
    task: str | None = None
    evaluations: list[Path] = field(default_factory=list)
    base_model: str | None = None
    datasets: list[str] = field(default_factory=list)
    license: str | None = None
    push_to_hub: bool = False
    private: bool = False
    overwrite: bool = False


def run_card(options: CardOptions, invocation: Invocation | None = None) -> int:
    """Write the files and, if asked, upload the folder."""
    from marigold_uq.hub import make_card, push_to_hub, read_run

    if len(options.folder) != 1:
        raise ValueError(f"name one folder, a run or a pipeline; got {len(options.folder)}")
    if options.push_to_hub and options.repo_id is None:
        raise ValueError("push_to_hub needs --repo_id user/name")
    (folder,) = options.folder
    card = make_card(
        folder,
        repo_id=options.repo_id,
        task=options.task,
        evaluations=options.evaluations,
        base_model=options.base_model,
        datasets=options.datasets or None,
        license=options.license,
        overwrite=options.overwrite,
    )
    model = read_run(folder, task=options.task).model
    if not card.data.get("license"):
        print("the card states no licence; add one with --license")
    print(f"card written to {model / 'README.md'}")
    if options.push_to_hub and options.repo_id is not None:
        print(f"uploaded: {push_to_hub(folder, options.repo_id, private=options.private or None)}")
    return 0
