#!/usr/bin/env bash
# The suite with the oldest or the newest packages that setup.py allows, in a new virtual environment.
#
#   scripts/check_versions.sh oldest            # lower bounds, exactly
#   scripts/check_versions.sh newest            # what pip takes today
#   PYTHON=python3.13 scripts/check_versions.sh newest tests/pipelines    # further words go to pytest
#
# The oldest torch comes with its CUDA libraries, 4 GB.
set -euo pipefail
which=${1:?oldest or newest}
shift
here=$(cd "$(dirname "$0")/.." && pwd)
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3}" -m venv "$environment"
python="$environment/bin/python"
cd "$here"
case "$which" in
newest) "$python" -m pip install --quiet --upgrade --upgrade-strategy eager -e ".[test]" ;;
oldest)
    "$python" -m pip install --quiet --no-deps -e .
    "$python" scripts/lower_bounds.py >"$environment/oldest.txt"
    "$python" -m pip install --quiet -c "$environment/oldest.txt" -e ".[test]"
    ;;
*)
    echo "oldest or newest; got $which" >&2
    exit 2
    ;;
esac
"$python" --version
"$python" -m pip list --format=freeze --exclude-editable
"$python" -m pytest "$@"
