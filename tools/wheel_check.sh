#!/usr/bin/env bash
# Installs a wheel in a clean environment and runs tests/test_tiny.py there with a PATH that has no compiler.
#
#     tools/wheel_check.sh WHEEL PYTHON TORCH [pip's options for torch, for example --index-url URL]
set -euo pipefail

wheel=$(realpath "$1") python=$2 torch=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$(dirname "${BASH_SOURCE[0]}")/../tests/test_tiny.py" "$folder"
"$python" -m venv "$folder/venv"
cd "$folder"
venv/bin/python -m pip install --quiet "${@:4}" "$torch"
venv/bin/python -m pip install --quiet "${wheel}[cli]" pytest pytest-timeout
venv/bin/python -m pip check
export ASCEND_MOE_TEST_INSTALLED=1 ASCEND_MOE_CACHE=$folder/cache ASCENDC_TWIN_CACHE=$folder/twin
PATH=$folder/venv/bin venv/bin/python -m pytest -q -p no:cacheprovider --timeout=300 test_tiny.py
echo "wheel-check: $python, $torch: PASS"
