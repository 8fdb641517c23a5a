"""The YAML files, the defaults and the command line of train/train_depth.py."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.scripts import parse_options
from support.tiny_training import train_depth_script

from marigold_uq.depth.config import DepthTrainConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "depth"
OURS = ["gaussian", "head_only_marigold", "lora", "low_rank", "mixture", "point", "sample"]
PAPER = ["gaussian", "low_rank", "mixture", "point", "sample"]


def parse(*arguments: str) -> DepthTrainConfig:
    return parse_options(DepthTrainConfig, *arguments, defaults=train_depth_script().DEFAULTS)


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {key: value for name, part in tree.items() for key, value in leaves(part, f"{prefix}.{name}").items()}


@pytest.mark.parametrize("name", OURS)
def test_each_yaml_parses_and_holds_only_what_differs_from_the_defaults(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    config = parse("--config", str(path))
    written = leaves(yaml.safe_load(path.read_text()))
    parsed, default = leaves(asdict(config)), leaves(asdict(DepthTrainConfig()))
    for key, value in written.items():
        if key == ".start.noise_family":
            continue  # said in every file, the default's too: it is what the file is about
        assert default.get(key) != value, f"{key} is the default already"
        assert str(parsed[key]) == str(value), key


@pytest.mark.parametrize("name", PAPER)
def test_the_families_are_trained_as_in_the_paper(name: str) -> None:
    """Marigold's recipe, stated in the paper's appendix and in Marigold's published configs."""
    config = parse("--config", str(CONFIGS / f"{name}.yaml"))
    assert config.start.kind == "stable_diffusion"
    assert config.start.noise_family == name
    assert [(part.name, part.probability) for part in config.data] == [("hypersim", 0.9), ("vkitti2", 0.1)]
    lists = ["data/hypersim/filename_list_train.txt", "data/vkitti2/filename_list_train.txt"]
    assert [part.filenames for part in config.data] == lists
    assert config.validation.data is not None
    assert config.validation.data.filenames == "data/hypersim/filename_list_val.txt"
    assert config.transform.flip == 0.5
    assert config.objective.noise_strength == 0.9
    assert config.objective.score is None  # the family's own
    assert config.objective.uniform_timesteps
    training, optimizer = config.training, config.training.optimizer
    assert (training.max_steps, training.batch_size, training.micro_batch_size) == (30_000, 32, 2)
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.decay_steps) == (3e-5, 100, 25_000)
    assert (optimizer.decay, optimizer.final_factor, optimizer.weight_decay) == ("exponential", 0.01, 0.0)
    assert (training.ema_decay, optimizer.max_grad_norm) == (0.0, 0.0)


def test_the_authors_sizes_are_used() -> None:
    assert parse("--config", str(CONFIGS / "mixture.yaml")).start.num_components == 25
    assert parse("--config", str(CONFIGS / "low_rank.yaml")).start.rank == 3


def test_head_only_starts_from_a_published_marigold() -> None:
    config = parse("--config", str(CONFIGS / "head_only_marigold.yaml"))
    assert (config.start.name, config.start.kind) == ("prs-eth/marigold-depth-v1-1", "pipeline")
    assert config.trainable == "head"


def test_a_flag_overrides_the_yaml() -> None:
    config = parse("--config", str(CONFIGS / "low_rank.yaml"), "--start.rank", "5", "--training.output", "elsewhere")
    assert (config.start.rank, config.training.output) == (5, Path("elsewhere"))
    own = parse(
        "--data", "[{name: folder, root: mine, options: {depth_scale: 1000}}]", "--transform.size", "[480, 640]"
    )
    assert own.data[0].options == {"depth_scale": 1000}
    assert own.transform.size == (480, 640)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--start.nois", "gaussian"],  # no abbreviations: a typo is an error
        ["--training.max_step", "3"],
        ["--training.max_steps", "many"],
        ["--training.tracker", "paper"],
        ["--data", "[{nam: hypersim}]"],
        ["--data", "[{name: hypersim, probability: often}]"],
        ["--training.batch_size", "0"],
        ["--objective.score", "mse"],
    ],
)
def test_a_wrong_key_type_or_value_is_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as stop:
        parse(*arguments)
    assert not isinstance(stop.value, SystemExit) or stop.value.code == 2
    assert arguments[0].split(".")[-1].strip("-") in capsys.readouterr().err + str(stop.value)


def test_a_wrong_key_in_a_yaml_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("training: {learning_rate: 1.0e-4}\n")
    with pytest.raises(SystemExit):
        parse("--config", str(tmp_path / "c.yaml"))
    assert "learning_rate" in capsys.readouterr().err


def test_print_config_prints_a_yaml_that_means_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--config", str(CONFIGS / "mixture.yaml"), "--print_config")
    assert stop.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse("--config", str(tmp_path / "printed.yaml")) == parse("--config", str(CONFIGS / "mixture.yaml"))
