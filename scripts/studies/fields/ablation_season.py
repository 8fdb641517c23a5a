"""Do coloured noise, damping towards the season and shares of its spread pay? Scored where nothing was fitted.

python -m scripts.studies.fields.ablation pde --task ks --data ks.h5 --seed 0 --output runs/ablation
python -m scripts.studies.fields.ablation_season air --windows 18 --data air_temperature.nc --seed 0 --output runs/ablation

Trajectories: a third of the validation part gives the colour, a third chooses steps, tau and kappas of each arm, and
the last third scores. Air: trained on 2013; factors fitted to the first quarter of 2014 are scored on the second, and
the other way round. Errors count windows of one trajectory (of ten days) as one.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.field.calibrate import fit_color
from marigold_uq.field.command import read_config
from marigold_uq.field.data import Transitions, latitude_weights
from marigold_uq.field.forecasters import PipelineForecaster, load_quietly
from marigold_uq.field.lead_factors import best_blends, best_dampings, best_kappas, smooth
from marigold_uq.field.run import train_field
from marigold_uq.field.scores import independent_groups, spread_windows
from marigold_uq.field.splits import open_split
from marigold_uq.calibration import Calibration
from marigold_uq.metrics import crps, energy_score
from marigold_uq.models.season import Season
from marigold_uq.pipelines.field.output import blend, damp, stretch

CONFIGS = Path("configs/field")
LEADS = {"pde": 10, "air": 20}
MEMBERS = 12


def model(arguments: Sequence[str], folder: Path) -> tuple[Any, Any]:
    config, text = read_config([*arguments, "--training.output", str(folder)])
    if not (folder / "model").exists():
        train_field(config, text)
    pipeline = load_quietly(folder / "model")
    return open_split(config.data), pipeline


def roll(
    pipeline: Any,
    windows: Any,
    ids: list[int],
    leads: int,
    steps: int,
    tau: float,
    color: Any,
    precision: str,
    members: int = MEMBERS,
) -> Tensor:
    pipeline.register_modules(noise_color=color)
    pipeline.set_calibration(Calibration(tau=tau))
    one = PipelineForecaster(
        pipeline, num_members=members, num_steps=steps, seed=3, max_batch_size=256, mixed_precision=precision
    )
    return one.forecast(default_collate([windows[i] for i in ids]), ids, leads)


def window_scores(members: Tensor, target: Tensor, weight: Tensor | None) -> dict[str, np.ndarray]:
    """(B, L) of CRPS, energy score."""
    values = crps(members, target)
    mean = (values if weight is None else values * weight / weight.mean()).flatten(2).mean(2)
    scale = 1.0 if weight is None else weight.sqrt().to(target)
    return {
        "crps": mean.double().numpy(),
        "energy": energy_score(members * scale, target * scale, target.ndim - 2).double().numpy(),
    }


def clustered(values: np.ndarray, groups: Sequence[Any]) -> float:
    sums: dict[Any, float] = {}
    for value, group in zip(values - values.mean(), groups, strict=True):
        sums[group] = sums.get(group, 0.0) + float(value)
    return math.sqrt(len(sums) / (len(sums) - 1) * math.fsum(s * s for s in sums.values())) / len(values)


def compare(arms: dict[str, dict[str, np.ndarray]], reference: str, groups: Sequence[Any]) -> dict[str, Any]:
    """Differences in percent of the reference's mean: over all lead times in its units, and at some."""
    found: dict[str, Any] = {}
    for name, scores in arms.items():
        for metric, values in scores.items():
            base = arms[reference][metric]
            unit = base.mean(0)
            last = values.shape[1]
            leads = {"all": (values / unit).mean(1) - (base / unit).mean(1)}
            for lead in sorted({1, last // 2, last}):
                leads[str(lead)] = (values[:, lead - 1] - base[:, lead - 1]) / unit[lead - 1]
            found.setdefault(name, {})[metric] = {
                k: [100 * float(v.mean()), 100 * clustered(v, groups)] for k, v in leads.items()
            }
    return found


def pde(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    arguments = [
        "--config",
        str(CONFIGS / f"{args.task}_small.yaml"),
        "--data.pde.path",
        args.data,
        "--training.seed",
        str(args.seed),
    ]
    split, pipeline = model(arguments, folder)
    leads = LEADS["pde"]
    windows = Transitions(split.validation, num_leads=leads)
    one_step = Transitions(split.validation)

    def third(source: Any, number: int, count: int) -> list[int]:
        return [i for i in spread_windows(3 * count, len(source)) if source.sequence_of(i) % 3 == number]

    color = fit_color(pipeline, one_step, third(one_step, 0, 192))
    fitted, scored = third(windows, 1, 40), third(windows, 2, 128)
    target = {
        name: torch.stack([windows[i]["future"] for i in ids]) for name, ids in (("fit", fitted), ("test", scored))
    }
    groups = independent_groups(windows, scored)
    arms, chosen, candidates, unit = {}, {}, {}, None
    for name, own in (("white", None), ("coloured", color)):
        for steps in (1, 2):
            for tau in (1.0, 0.3, 0.05):
                members = roll(pipeline, windows, fitted, leads, steps, tau, own, "no")
                kappas, after, _ = best_kappas(members, target["fit"])
                unit = unit or after
                score = float(np.mean(np.array(after) / np.array(unit)))
                candidates[f"{name}, {steps} steps, tau {tau}"] = score
                print(name, steps, tau, score, flush=True)
                if name not in chosen or score < chosen[name][0]:
                    chosen[name] = (score, steps, tau, smooth(kappas))
        _, steps, tau, kappas = chosen[name]
        members = stretch(roll(pipeline, windows, scored, leads, steps, tau, own, "no"), kappas)
        arms[name] = window_scores(members, target["test"], None)
    picks = {name: {"steps": c[1], "tau": c[2]} for name, c in chosen.items()}
    return {
        "candidates": candidates,
        "chosen": picks,
        "windows": len(scored),
        "groups": len(set(groups)),
        "arms": compare(arms, "white", groups),
        "mean_crps": {n: a["crps"].mean(0).tolist() for n, a in arms.items()},
    }


def air(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    periods = [
        "--data.weather.train",
        '["2013-01-01", "2013-12-31"]',
        "--data.weather.validation",
        '["2014-01-01", "2014-06-30"]',
    ]
    arguments = [
        "--config",
        str(CONFIGS / "air_small.yaml"),
        "--data.weather.path",
        args.data,
        "--training.seed",
        str(args.seed),
        "--training.mixed_precision",
        args.precision,
        *periods,
    ]
    split, pipeline = model(arguments, folder)
    leads, season = LEADS["air"], Season.fit(pipeline.encoder, split.train)
    quarters = [
        split.validation.between("2014-01-01", "2014-03-31"),
        split.validation.between("2014-04-01", "2014-06-30"),
    ]
    weight = latitude_weights(split.validation.coordinates)
    data = []
    for quarter in quarters:
        windows = Transitions(quarter, num_leads=leads)
        color = fit_color(pipeline, Transitions(quarter), spread_windows(128, len(Transitions(quarter))))
        ids = spread_windows(args.windows, len(windows))
        batch = default_collate([windows[i] for i in ids])
        expected = {}
        for name, module in (("encoder", None), ("season", season)):
            pipeline.register_modules(season=module)
            expected[name] = pipeline.expected_states(np.asarray(batch["time"]), leads)
        usual = pipeline.season_deviations(np.asarray(batch["time"]), leads)
        pipeline.register_modules(season=None)
        data.append(
            {
                "windows": windows,
                "ids": ids,
                "color": color,
                "target": batch["future"],
                "expected": expected,
                "usual": usual,
                "groups": independent_groups(windows, ids),
            }
        )
    totals: dict[str, list[Any]] = {}
    factors: dict[str, Any] = {}
    groups: list[Any] = []
    for fit, test, number in ((data[0], data[1], 0), (data[1], data[0], 1)):
        groups += [(number, g) for g in test["groups"]]
        for name, color in (("white", None), ("coloured", fit["color"])):
            own = roll(pipeline, fit["windows"], fit["ids"], leads, 1, 1.0, color, args.precision)
            other = roll(pipeline, test["windows"], test["ids"], leads, 1, 1.0, color, args.precision)
            made = {}
            target, usual = fit["target"], fit["usual"]
            made[f"{name}"] = stretch(other, smooth(best_kappas(own, target)[0]))
            for where in ("encoder", "season"):
                d = smooth(best_dampings(own, target, fit["expected"][where]))
                a, b = damp(own, d, fit["expected"][where]), damp(other, d, test["expected"][where])
                made[f"{name}, damping ({where})"] = stretch(b, smooth(best_kappas(a, target)[0]))
                k, c = best_blends(a, target, usual)
                made[f"{name}, damping ({where}), shares"] = blend(b, k, c, test["usual"])
            k, c = best_blends(own, target, usual)
            made[f"{name}, shares"] = blend(other, k, c, test["usual"])
            for arm, members in made.items():
                totals.setdefault(arm, []).append(window_scores(members, test["target"], weight))
            print(name, number, flush=True)
    arms = {arm: {m: np.concatenate([p[m] for p in parts]) for m in parts[0]} for arm, parts in totals.items()}
    mean = {n: a["crps"].mean(0).tolist() for n, a in arms.items()}
    return {
        "factors": factors,
        "windows": len(groups),
        "groups": len(set(groups)),
        "arms": compare(arms, "white", groups),
        "to_all": compare(arms, "white, damping (encoder), shares", groups),
        "to_all_season": compare(arms, "white, damping (season), shares", groups),
        "num_annual": season.config.num_annual,
        "mean_crps": mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["pde", "air"])
    parser.add_argument("--task", default="air")
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=36)
    parser.add_argument("--precision", default="no")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.output / f"{args.task}-{args.seed}"
    found = {"pde": pde, "air": air}[args.kind](args, folder)
    (args.output / f"{args.task}-{args.seed}-more.json").write_text(json.dumps(found, indent=1))
    for name, metrics in found["arms"].items():
        print(name, {m: {k: [round(x, 2) for x in v] for k, v in leads.items()} for m, leads in metrics.items()})


if __name__ == "__main__":
    main()
