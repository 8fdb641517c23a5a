"""A table's pipeline goes to the Hub and back, against a local stand-in of its HTTP API."""

import json
from pathlib import Path

import numpy as np
from support.hub_server import HubServer, run_client

from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.data import TableSource
from marigold_uq.tabular.run import train_tabular

CLIENT = """
import json, sys
import numpy as np, torch
from diffusers import DiffusionPipeline
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.hub import push_to_hub
from marigold_uq.loading import fetch_pretrained

folder, rows = sys.argv[1], np.load(sys.argv[2])
push_to_hub(folder, "someone/rows")
place, components = fetch_pretrained(TabularRegressionPipeline, "someone/rows", {})
pipelines = {
    "here": TabularRegressionPipeline.from_pretrained(folder + "/model"),
    "plain": TabularRegressionPipeline.from_pretrained(place, **components),
    "own class": TabularRegressionPipeline.from_pretrained("someone/rows", trust_remote_code=True),
    "custom": DiffusionPipeline.from_pretrained(
        "someone/rows", custom_pipeline="someone/rows", trust_remote_code=True, torch_dtype=torch.float64
    ),
}
pipelines["here"].push_to_hub("someone/again")
pipelines["by its method"] = TabularRegressionPipeline.from_pretrained("someone/again", trust_remote_code=True)
print(json.dumps({name: pipeline(rows, 6).samples.tolist() for name, pipeline in pipelines.items()}))
"""


def test_a_pushed_pipeline_loads_from_the_hub_with_the_same_predictions(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2))
    np.savez(tmp_path / "table.npz", X=x, y=x[:, 0])
    model = DiffusionRegressor("paper", max_epochs=2, baseline_epochs=2, num_inference_steps=3, random_state=0)
    run = train_tabular(TableSource(tmp_path / "table.npz"), model, tmp_path / "run")
    np.save(tmp_path / "rows.npy", x[:3])
    with HubServer() as hub:
        output = run_client(hub, CLIENT, str(run), str(tmp_path / "rows.npy"), cache=tmp_path / "cache")
        files = set(hub.repositories["someone/rows"].files)
    result = json.loads(output.strip().splitlines()[-1])
    want = model.pipeline_(x[:3], 6).samples
    for name, samples in result.items():
        rounding = 1e-5 if name == "plain" else 1e-9  # its components come in float32, as they were trained
        np.testing.assert_allclose(samples, want, rtol=rounding, atol=rounding * np.abs(want).max(), err_msg=name)
    assert {"README.md", "pipeline.py", "model_index.json", "network/config.json", "baseline/config.json"} <= files
