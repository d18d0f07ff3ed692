#!/usr/bin/env bash
# Everything that is checked without running anything. Usage: tools/lint.sh [--fix], with the tools on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -d '' cxx < <(find op_kernel op_host csrc twin vnpu tests examples tools/real_ascendc \
    \( -name '*.h' -o -name '*.cpp' \) -print0 2>/dev/null | sort -z)

if [[ "${1:-}" == --fix ]]; then
    ruff check --fix --quiet . || true  # what cannot be fixed is reported below
    ruff format --quiet .
    clang-format -i "${cxx[@]}"
fi

failed=0
check() {
    echo "lint: $1"
    "${@:2}" || failed=1
}
check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy --strict ascend_moe" mypy
check "clang-format (${#cxx[@]} files)" clang-format --dry-run -Werror "${cxx[@]}"
check "docstrings of public names" python tools/docs_docstrings.py
check "shellcheck" shellcheck build.sh tools/*.sh .ci/run examples/cluster/*.sh
check "hadolint" hadolint docker/*.Dockerfile
exit "$failed"
