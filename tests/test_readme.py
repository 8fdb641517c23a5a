"""What the README shows runs, and what the pages point to is there."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
OLD_REVISION = "git worktree add"  # a block that begins so runs at the revision that it names


def test_the_scheduler_example_trains_and_samples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (example,) = [block for block in blocks if "reverse_diffusion" in block]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 1, generator=generator).requires_grad_()
    names = {
        "network": lambda x, t: x @ weight.T,
        "x_0": torch.randn(4, 1, generator=generator),
        "noise": torch.randn(4, 1, generator=generator),
        "t": torch.tensor([3, 500, 999, 20]),
        "x_T": torch.randn(6, 1, generator=generator),
    }
    exec(example, names)
    names["loss"].backward()
    assert bool(weight.grad.isfinite().all())
    assert names["samples"].shape == (6, 1)


def test_the_two_commands_stand_at_the_top() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    commands = [line.strip() for line in lines if line.startswith("    ")][:2]
    assert (
        commands[0] == "pip install -e . && marigold-uq depth --sample -o out"
    )  # what tests/depth/test_embedded.py runs
    assert commands[1] == 'pip install -e ".[dev]" && pytest'


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_commands_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```.*?```", text, flags=re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)", prose):
        assert link.startswith("http") or (page.parent / link).exists(), link
    commands = "\n".join([prose, *(block for block in blocks if OLD_REVISION not in block)])
    for path in re.findall(r"\b((?:scripts|train|eval|configs)/[\w/]+\.(?:py|yaml|sh))\b", commands):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (scripts(?:\.\w+)+)", commands):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), module
