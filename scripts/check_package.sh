#!/usr/bin/env bash
# Build sdist and wheel, look into them, install the wheel into a new environment and use it from another folder,
# without a network. PIP_ARGUMENTS go to the installation.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3=${PYTHON:-python3}
"$python3" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet build
git -C "$here" archive --format=tar HEAD | tar -x -C "$(mkdir "$work/source" && echo "$work/source")"
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }

sdist=$(tar -tf "$work"/dist/*.tar.gz)
wheel=$("$python3" -m zipfile -l "$work"/dist/*.whl)
for name in LICENSE NOTICE SECURITY.md CHANGELOG.md configs/ train/ eval/ docs/ tests/conftest.py tests/support/; do
    grep -q "$name" <<<"$sdist" || { echo "the sdist lacks $name"; exit 1; }
done
for name in LICENSE NOTICE marigold_uq/py.typed marigold_uq/assets/samples marigold_uq/pipelines/depth/pipeline.py; do
    grep -q "$name" <<<"$wheel" || { echo "the wheel lacks $name"; exit 1; }
done
if grep -qE "(^| )(tests|scripts)/" <<<"$wheel"; then echo "the wheel holds tests or scripts"; exit 1; fi

"$python3" -m venv "$work/use"
# shellcheck disable=SC2086
"$work/use/bin/python" -m pip install --quiet ${PIP_ARGUMENTS:-} "$work"/dist/*.whl
mkdir "$work/elsewhere"
cd "$work/elsewhere"
cat >sitecustomize.py <<'END'
import socket


def refuse(*arguments, **options):
    raise OSError("the network was used")


socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
END
export PYTHONPATH="$work/elsewhere"
"$work/use/bin/marigold-uq" --version
"$work/use/bin/marigold-uq" info
"$work/use/bin/marigold-uq" depth --sample -o out --formats color npz
ls out
echo "sdist and wheel are whole; the wheel works from another folder without a network"
