"""Train a forecast model: `accelerate launch train/train_field.py --config configs/field/ks_small.yaml`."""

import sys

from marigold_uq.field.command import main

if __name__ == "__main__":
    sys.exit(main())
