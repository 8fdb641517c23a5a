"""One training loop for all tasks: accelerate, EMA, exact resume, clean interruption."""
