"""Fields: data, training, evaluation, calibration, figures. Inference is in `marigold_uq.pipelines.field`."""
