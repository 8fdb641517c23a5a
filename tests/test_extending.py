"""The task of docs/extending.md, written by a newcomer, trains, calibrates, and loads again in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
USE = """
import torch
import my_task

pipeline = my_task.ToyPipeline.from_pretrained("runs/toy/calibrated")
x, y = my_task.make_data(2000, seed=5)
samples, prediction, uncertainty, (lower, upper) = pipeline(x, generator=torch.Generator().manual_seed(0))
assert samples.shape == (50, 2000, 1)
assert (prediction - torch.sin(6 * x)).abs().mean() < 0.15
assert 0.8 < (uncertainty / (0.1 + 0.4 * x)).mean() < 1.3
assert 0.85 < ((lower <= y) & (y <= upper)).float().mean() < 0.96
wider = pipeline(x, 0.95, generator=torch.Generator().manual_seed(0))[3]
assert bool((wider[0] <= lower).all() and (wider[1] >= upper).all())
"""


def run_python(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_toy_task_of_the_page_learns_and_loads_in_a_fresh_process(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (task,) = [block for block in blocks if "class ToyTask" in block]
    assert len([line for line in task.splitlines() if line.strip()]) <= 70
    (tmp_path / "my_task.py").write_text(task, encoding="utf-8")
    run_python(tmp_path, "-c", "import my_task; my_task.train('runs/toy')")
    run_python(tmp_path, "-c", USE)
