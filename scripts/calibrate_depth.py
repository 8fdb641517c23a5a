r"""Calibrate a depth model on scenes that nothing else has seen, and save it with its calibration.

python scripts/calibrate_depth.py --model runs/embedded/low_rank/model --scenes runs/embedded/scenes/calibration \
    --steps 1 --output runs/embedded/calibrated

The first half of the scenes chooses kappa, which stretches the members around their mean, by the fair CRPS; the second
half, with kappa frozen, the half width of the conformal interval in standard deviations. The unit of the guarantee is
the scene. All uncertainty modes that the model has are calibrated, for the number of steps and members given here.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.calibration import Calibration, choose_kappa, conformal_images, residual_ratio
from marigold_uq.data.depth import RenderedScenes
from marigold_uq.evaluation.options import AlignmentOptions, PipelineOptions
from marigold_uq.evaluation.prediction import Members
from marigold_uq.evaluation.predictors import PipelinePredictor
from marigold_uq.evaluation.protocol import DepthProtocol
from marigold_uq.pipelines.depth_call import LAW_MODES, MODES, is_monotone

PIXELS = 1500
"""Pixels of each scene that take part; neighbours say the same."""


@dataclass(frozen=True)
class Pixels:
    """N pixels of a scene, in units of the standard deviation of the true depth, so that all scenes weigh the same."""

    members: Tensor  # (E, N)
    point: Tensor  # (N,), the centre of the pipeline's interval
    truth: Tensor  # (N,)


@torch.inference_mode()
def aligned_members(predictor: PipelinePredictor, scenes: RenderedScenes) -> list[Pixels]:
    """What was predicted and what is true at some pixels of every scene."""
    protocol = DepthProtocol.of(AlignmentOptions(), predictor, scenes, "scenes")
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in tqdm(range(len(scenes)), desc=f"{predictor.mode}", unit="scene"):
        sample = scenes.read(index)
        prediction = predictor.predict(sample)
        assert isinstance(prediction, Members)
        aligned = protocol.align(prediction, sample)
        valid = torch.nonzero(sample["valid"][0].flatten()).flatten()
        chosen = torch.randint(len(valid), (PIXELS,), generator=generator)
        places = valid[chosen]
        maps = (prediction.samples.flatten(1)[:, places], prediction.point.flatten()[places])
        unit = aligned.target.std()
        members, point = ((aligned.scale * values.double() + aligned.shift) / unit for values in maps)
        found.append(Pixels(members, point, aligned.target[0, chosen] / unit))
    return found


def calibration_of(scenes: list[Pixels], coverage: float, steps: int, note: str) -> Calibration:
    """Kappa from the first half of the scenes, the conformal half width from the second."""
    half = len(scenes) // 2
    members = torch.cat([scene.members for scene in scenes[:half]], -1)
    kappa = choose_kappa(members, torch.cat([scene.truth for scene in scenes[:half]])).kappa
    ratios = [residual_ratio(one.point, kappa * one.members.std(0, correction=1), one.truth) for one in scenes[half:]]
    return Calibration(
        kappa=kappa,
        conformal_scale=float(conformal_images(ratios, 1 - coverage)),
        coverage=coverage,
        num_calibration=len(ratios),
        num_steps=steps,
        num_members=len(members),
        note=note,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--scenes", type=Path, required=True, help="folder of scripts/render_scenes.py")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    args = parser.parse_args(arguments)
    if args.output.exists():
        parser.error(f"{args.output} exists; choose another folder or remove it")
    scenes = RenderedScenes(args.scenes)
    note = f"{len(scenes)} procedural scenes ({scenes.name_of(0)} and so on), half for kappa, half for the interval"
    found = {}
    for mode in args.modes:
        options = PipelineOptions(
            args.model, mode, args.members, steps=args.steps, batch_size=args.members, seed=args.seed
        )
        predictor = PipelinePredictor(options)
        if predictor.pipeline.config.calibration is not None:
            parser.error(f"{args.model} is calibrated already; give the model as training left it")
        if predictor.space != "depth" or predictor.metric:
            parser.error(f"{args.model} predicts {predictor.space}; expected affine-invariant depth")
        pipeline = predictor.pipeline
        if mode in LAW_MODES and not pipeline.scheduler.family.has_spread:
            continue  # a point model has no law to read
        if mode == "marginal" and not is_monotone(pipeline):
            continue
        found[mode] = calibration_of(aligned_members(predictor, scenes), args.coverage, args.steps, note)
        print(mode, found[mode])
    for mode, calibration in found.items():
        predictor.pipeline.calibrate(mode, calibration)
    temporary = args.output.with_name(args.output.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    predictor.pipeline.save_pretrained(temporary)
    temporary.rename(args.output)


if __name__ == "__main__":
    main()
