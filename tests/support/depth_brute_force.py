"""The whole evaluation once more, slowly and with numpy alone: nothing of the package is imported here."""

import json
import math
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Vector = NDArray[np.float64]
LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def score_folder(root: Path, predictions: Path, *, level: float = 0.95, min_scale: float = 1e-3) -> dict:
    """{"images": name -> statistics, "groups": group -> means, "overall": means over groups}."""
    images, members_of = {}, defaultdict(list)
    for row in json.loads((root / "index.json").read_text()):
        stored = np.asarray(Image.open(root / "depth" / f"{row['name']}.png")).astype(np.float64) / row["depth_scale"]
        valid = stored > 0
        target = 1 / stored[valid] if row["kind"] == "disparity_px" else stored[valid]
        arrays = {key: value.astype(np.float64) for key, value in np.load(predictions / f"{row['name']}.npz").items()}
        pixels = {key: value[..., valid] for key, value in arrays.items()}
        images[row["name"]] = score_image(pixels, target, level, min_scale)
        members_of[row["group"]].append(images[row["name"]])
    groups = {group: mean_of(found) for group, found in members_of.items()}
    return {
        "images": images,
        "groups": {g: derive(m) for g, m in groups.items()},
        "overall": derive(mean_of(groups.values())),
    }


def mean_of(rows) -> dict:
    rows = list(rows)
    return {key: sum(np.asarray(row[key]) for row in rows) / len(rows) for key in rows[0]}


def derive(means: dict) -> dict:
    """RMSE and spread/skill are made of means, not means themselves."""
    extra = {"rmse": math.sqrt(means["squared_error"])}
    if "variance" in means:
        extra["spread"] = math.sqrt(means["variance"])
        extra["spread_skill_ratio"] = math.sqrt(means["predicted_squared_error"] / means["squared_error"])
    return {**means, **extra}


def score_image(pixels: dict, target: Vector, level: float, min_scale: float) -> dict:
    point = np.median(pixels["samples"], axis=0) if "samples" in pixels else pixels["mean"]
    design = np.stack([point, np.ones_like(point)], axis=1)
    (scale, shift), *_ = np.linalg.lstsq(design, target, rcond=None)
    low, high = 0.5 * target.min(), 2 * target.max()
    floor = min_scale * np.sort(target)[(len(target) - 1) // 2]  # torch's median is the lower one
    aligned = np.clip(scale * point + shift, low, high)
    found = depth_metrics(aligned, target)
    if "samples" in pixels:
        members = np.clip(scale * pixels["samples"] + shift, low, high)
        found |= member_metrics(members, aligned, target, level, floor)
        found |= ranking(members.std(axis=0, ddof=1), aligned, target)
    elif "std" in pixels:
        std = abs(scale) * pixels["std"]
        found |= gaussian_metrics(aligned, std, target, level, floor)
        found |= ranking(std, aligned, target)
    else:
        found |= {"squared_error": np.mean((aligned - target) ** 2), "absolute_error": np.mean(abs(aligned - target))}
        if "confidence" in pixels:
            found |= ranking(-pixels["confidence"], aligned, target)
        else:
            found |= {"crps": found["absolute_error"], "relative_crps": found["abs_relative_difference"]}
            found |= {"energy_score": np.linalg.norm(aligned - target)}
    return found


def depth_metrics(p: Vector, d: Vector) -> dict:
    ratio, log = np.maximum(p / d, d / p), np.log(p) - np.log(d)
    return {
        "abs_relative_difference": np.mean(abs(p - d) / d),
        "squared_relative_difference": np.mean((p - d) ** 2 / d),
        "rmse_linear": math.sqrt(np.mean((p - d) ** 2)),
        "rmse_log": math.sqrt(np.mean(log**2)),
        "log10": np.mean(abs(np.log10(p) - np.log10(d))),
        "delta1": np.mean(ratio < 1.25),
        "delta2": np.mean(ratio < 1.25**2),
        "delta3": np.mean(ratio < 1.25**3),
        "i_rmse": math.sqrt(np.mean((1 / p - 1 / d) ** 2)),
        "silog_rmse": 100 * math.sqrt(np.mean(log**2) - np.mean(log) ** 2),
    }


def member_metrics(members: Vector, median: Vector, target: Vector, level: float, floor: float) -> dict:
    size = len(members)
    pairs = list(combinations(range(size), 2))
    crps = abs(members - target).mean(axis=0) - sum(abs(members[i] - members[j]) for i, j in pairs) / (2 * len(pairs))
    to_target = np.mean([np.linalg.norm(member - target) for member in members])
    between = np.mean([np.linalg.norm(members[i] - members[j]) for i, j in pairs])
    mean, variance = members.mean(axis=0), members.var(axis=0, ddof=1)
    ends = {c: np.quantile(members, [(1 - c) / 2, (1 + c) / 2], axis=0, method="weibull") for c in {*LEVELS, level}}
    return {
        "crps": crps.mean(),
        "relative_crps": np.mean(crps / target),
        "energy_score": to_target - between / 2,
        "absolute_error": np.mean(abs(np.median(members, axis=0) - target)),
        "squared_error": np.mean((mean - target) ** 2),
        "variance": variance.mean(),
        "predicted_squared_error": (size + 1) / size * variance.mean(),
        "gaussian_nll": normal_nll(mean, np.maximum(np.sqrt(variance), floor), target),
        **interval_metrics(*ends[level], target, level),
        "reliability": [np.mean((ends[c][0] <= target) & (target <= ends[c][1])) for c in LEVELS],
    }


def gaussian_metrics(mean: Vector, std: Vector, target: Vector, level: float, floor: float) -> dict:
    z = (target - mean) / std
    cdf = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z])
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    crps = std * (z * (2 * cdf - 1) + 2 * density - 1 / math.sqrt(math.pi))
    error = mean - target
    ends = {
        c: (mean - normal_quantile((1 + c) / 2) * std, mean + normal_quantile((1 + c) / 2) * std)
        for c in (*LEVELS, level)
    }
    return {
        "crps": crps.mean(),
        "relative_crps": np.mean(crps / target),
        "absolute_error": abs(error).mean(),
        "squared_error": np.mean(error**2),
        "variance": np.mean(std**2),
        "predicted_squared_error": np.mean(std**2),
        "gaussian_nll": normal_nll(mean, np.maximum(std, floor), target),
        **interval_metrics(*ends[level], target, level),
        "expected_coverage": level,
        "reliability": [np.mean((ends[c][0] <= target) & (target <= ends[c][1])) for c in LEVELS],
        "pit": np.histogram(cdf, bins=20, range=(0, 1))[0] / len(cdf),
    }


def interval_metrics(lower: Vector, upper: Vector, target: Vector, level: float) -> dict:
    outside = np.maximum(lower - target, 0) + np.maximum(target - upper, 0)
    return {
        "coverage": np.mean((lower <= target) & (target <= upper)),
        "interval_width": np.mean(upper - lower),
        "interval_score": np.mean(upper - lower + 2 / (1 - level) * outside),
    }


def normal_nll(mean: Vector, std: Vector, target: Vector) -> float:
    return float(np.mean(0.5 * np.log(2 * math.pi * std**2) + (mean - target) ** 2 / (2 * std**2)))


def normal_quantile(p: float) -> float:
    """By bisection of the error function."""
    low, high = -10.0, 10.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < p else (low, middle)
    return low


def ranking(uncertainty: Vector, p: Vector, d: Vector) -> dict:
    """Assumes distinct values: with random numbers there are no ties."""
    relative, squared = abs(p - d) / d, (p - d) ** 2
    curve, oracle = remaining(uncertainty, relative), remaining(relative, relative)
    root_curve, root_oracle = np.sqrt(remaining(uncertainty, squared)), np.sqrt(remaining(squared, squared))
    return {
        "sparsification": curve / curve[0],
        "sparsification_oracle": oracle / curve[0],
        "ause_abs_rel": area((curve - oracle) / curve[0]),
        "ause_rmse": area((root_curve - root_oracle) / root_curve[0]),
        "spearman": np.corrcoef(ranks(uncertainty), ranks(abs(p - d)))[0, 1],
    }


def remaining(order: Vector, error: Vector) -> Vector:
    """Mean error of what is left after 0, 1, ..., 99 % of the pixels with the largest `order` went."""
    worst_last = error[np.argsort(order)]
    counts = [len(error) - len(error) * percent // 100 for percent in range(100)]
    return np.array([worst_last[:count].mean() for count in counts])


def area(gap: Vector) -> float:
    heights = [*gap, 0.0]  # nothing is left at 100 %
    return sum(0.01 * (one + other) / 2 for one, other in pairwise(heights))


def ranks(values: Vector) -> Vector:
    return np.argsort(np.argsort(values)).astype(np.float64)
