"""Evaluation of forecasts: `evaluation` scores one model, `calibration` chooses its corrections, `study` does many.

`forecasters` are what can be scored, `scores` what is measured per lead time, `figures` and `report` how it is shown.
"""
