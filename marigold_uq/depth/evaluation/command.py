"""The command line of `eval/eval_depth.py`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import PartialState
from jsonargparse import ActionConfigFile, ArgumentParser

from marigold_uq.depth.evaluation.evaluate import EvaluationResult, evaluate_depth
from marigold_uq.depth.evaluation.options import DepthEvaluation

HEADLINE = (
    "abs_relative_difference", "delta1", "rmse", "crps", "relative_crps", "energy_score", "gaussian_nll", "coverage",
    "expected_coverage", "interval_width", "calibrated_coverage", "calibrated_width", "spread_skill_ratio",
    "ause_abs_rel", "spearman",
)  # fmt: skip


def parse_options(arguments: Sequence[str] | None = None) -> DepthEvaluation:
    """Command line and YAML files to options; an unknown key or a wrong type is an error."""
    parser = ArgumentParser(prog="eval_depth.py", description=(DepthEvaluation.__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    parser.add_class_arguments(DepthEvaluation, as_group=False)
    values = parser.instantiate(parser.parse_args(arguments))
    values.pop("config", None)
    return DepthEvaluation(**values)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all images were scored, 1 if some failed, 2 if nothing could be done."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_options(given)
    try:
        result = evaluate_depth(options, command=shlex.join(["python", "eval/eval_depth.py", *given]))
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on where it stopped", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        if os.environ.get("MARIGOLD_UQ_TRACEBACK"):
            raise
        print(f"eval_depth: {error}", file=sys.stderr)
        return 2
    if PartialState().is_main_process:
        print(report_text(result, str(options.output)))
    return 1 if result.failures else 0


def report_text(result: EvaluationResult, output: str) -> str:
    """The headline numbers, with what they mean, for a terminal."""
    metrics = result.metrics
    lines = [f"{metrics['num_images']} images of {metrics['data']['title']}, {metrics['average']}"]
    lines.append(f"alignment: {metrics['alignment']['text']}")
    lines += [_line(name, metrics["metrics"][name]) for name in HEADLINE if name in metrics["metrics"]]
    lines += [f"failed: {one.name}: {one.reason}" for one in result.failures]
    return "\n".join([*lines, f"written to {output}"])


def _line(name: str, entry: Mapping[str, Any]) -> str:
    error = entry["standard_error"]
    return f"  {name:<26}{entry['value']:.4g}" + ("" if error is None else f" +- {error:.2g}")
