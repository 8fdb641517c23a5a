"""Depth: data, scenes, training, evaluation, calibration, files. Inference is in `marigold_uq.pipelines.depth`."""
