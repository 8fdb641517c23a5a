#!/usr/bin/env bash
# mypy against a plain install: in an editable one it never sees pipelines/, which is installed as marigold_uq.pipelines.
set -euo pipefail
python=${PYTHON:-python}
here=$(cd "$(dirname "$0")/.." && pwd)
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
mkdir "$target/source"
cp -r "$here"/{marigold_uq,pipelines,scripts,setup.py,pyproject.toml,README.md,LICENSE} "$target/source"
"$python" -m pip install --quiet --no-deps --target "$target/site" "$target/source"
cp -r "$here/scripts" "$target/site"
cd "$target/site"
# marigold_uq/pipelines is there now, beside the rest
test -f marigold_uq/pipelines/__init__.py
export MYPYPATH="$target/site"
"$python" -m mypy --config-file "$here/pyproject.toml" --explicit-package-bases \
    -p marigold_uq -p scripts.studies -p scripts.benchmarks
