"""What the README shows runs."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


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
