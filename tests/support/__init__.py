"""Helpers of the tests: small models and data, exact answers, slow and obvious formulas."""
