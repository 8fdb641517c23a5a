"""Inference pipelines, installed as `marigold_uq.pipelines`."""
