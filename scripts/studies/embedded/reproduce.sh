#!/usr/bin/env bash
# The embedded model from nothing: scenes, autoencoder, latents, a common base, one family, calibration, the package's
# files. Every stage resumes where it stopped.
#   scripts/studies/embedded/reproduce.sh [family]      (point, gaussian, mixture, low_rank or low_rank_kernel)
set -euo pipefail
cd "$(dirname "$0")/.."
family=${1:-gaussian}
runs=runs/embedded
render() { python scripts/render_scenes.py --output "$runs/scenes/$1" --length "$2" --split "$3" --seed "$4" --processes 2; }
render train 30000 train 0
render validation 200 validation 0
render calibration 300 validation 1
render test 500 test 0
python -m scripts.studies.embedded.train_vae --config configs/depth/embedded_vae.yaml
python -m scripts.studies.embedded.train_vae --config configs/depth/embedded_decoder.yaml
python scripts/encode_latents.py --vae $runs/vae/model --scenes $runs/scenes/train --output $runs/latents/train --flip \
    --processes 2
python train/train_depth.py --config configs/depth/embedded_base.yaml
python train/train_depth.py --config configs/depth/embedded_base_more.yaml
turn=(--model $runs/base_more/model --latents $runs/latents/train)
[ -d $runs/rotated_vae ] || python -m scripts.studies.embedded.rotate_latents basis "${turn[@]}" --output $runs/rotated_vae
python -m scripts.studies.embedded.train_vae --config configs/depth/embedded_rotated_decoder.yaml
[ -d $runs/rotated/model ] || python -m scripts.studies.embedded.rotate_latents apply "${turn[@]}" --basis $runs/rotated_vae/basis.npy \
    --vae $runs/rotated_decoder/model --output $runs/rotated/model --latents-output $runs/rotated_latents/train
python train/train_depth.py --config "configs/depth/embedded_$family.yaml"
[ -d "$runs/calibrated_$family" ] || python scripts/calibrate_depth.py --model "$runs/$family/model" \
    --scenes $runs/scenes/calibration --output "$runs/calibrated_$family"
[ -d "$runs/assets_$family" ] || python -m scripts.studies.embedded.assemble --model "$runs/calibrated_$family" \
    --output "$runs/assets_$family"
