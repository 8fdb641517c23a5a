"""A table's pipeline goes to the Hub and back, against a local stand-in of its HTTP API."""

import json
from pathlib import Path

import numpy as np
from support.hub_server import HubServer, run_client
from support.tiny_sets import quick_model

from marigold_uq.tabular.data import TableSource
from marigold_uq.tabular.run import train_tabular

CLIENT = """
import json, sys
import numpy as np, torch
from diffusers import DiffusionPipeline
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.hub import push_to_hub

folder, rows = sys.argv[1], np.load(sys.argv[2])
push_to_hub(folder, "someone/rows")
pipelines = {
    "here": TabularRegressionPipeline.from_pretrained(folder + "/model"),
    "own class": TabularRegressionPipeline.from_pretrained("someone/rows"),
    "custom": DiffusionPipeline.from_pretrained(
        "someone/rows", custom_pipeline="someone/rows", trust_remote_code=True, torch_dtype=torch.float64
    ),
}
pipelines["here"].push_to_hub("someone/again")
pipelines["by its method"] = TabularRegressionPipeline.from_pretrained("someone/again")
outputs = {name: pipeline(rows, 20, coverage=0.8) for name, pipeline in pipelines.items()}
print(json.dumps({name: [*out.interval.tolist(), *out.samples.tolist()] for name, out in outputs.items()}))
"""


def test_a_pushed_pipeline_loads_from_the_hub_with_the_same_predictions_and_intervals(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2))
    np.savez(tmp_path / "table.npz", X=x, y=x[:, 0])
    model = quick_model("paper", max_epochs=2, baseline_epochs=2, calibration_fraction=0.5)
    run = train_tabular(TableSource(tmp_path / "table.npz"), model, tmp_path / "run")
    np.save(tmp_path / "rows.npy", x[:3])
    with HubServer() as hub:
        output = run_client(hub, CLIENT, str(run), str(tmp_path / "rows.npy"), cache=tmp_path / "cache")
        files = set(hub.repositories["someone/rows"].files)
    result = json.loads(output.strip().splitlines()[-1])
    output = model.pipeline_(x[:3], 20, coverage=0.8)
    assert output.interval is not None
    assert model.pipeline_.calibration_for().interval is not None
    want = np.concatenate([output.interval, output.samples])
    for name, values in result.items():
        np.testing.assert_allclose(values, want, rtol=1e-9, atol=1e-9 * np.abs(want).max(), err_msg=name)
    assert {"README.md", "pipeline.py", "model_index.json", "network/config.json", "baseline/config.json"} <= files
