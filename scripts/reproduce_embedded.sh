#!/usr/bin/env bash
# The embedded model from nothing: scenes, autoencoder, latents, U-Net. Every stage resumes where it stopped.
#   scripts/reproduce_embedded.sh [family]      (low_rank by default; point, gaussian, mixture are there to compare)
set -euo pipefail
cd "$(dirname "$0")/.."
family=${1:-low_rank}
runs=runs/embedded
python scripts/render_scenes.py --output $runs/scenes/validation --length 500 --split validation --processes 2
python scripts/render_scenes.py --output $runs/scenes/train --length 12000 --split train --processes 2
python scripts/train_vae.py --config configs/depth/embedded_vae.yaml
python scripts/encode_latents.py --vae $runs/vae/model --scenes $runs/scenes/train --output $runs/latents/train --flip
python train/train_depth.py --config "configs/depth/embedded_$family.yaml"
