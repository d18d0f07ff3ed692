#!/usr/bin/env bash
# Stands in for makeself: NAME becomes a compressed tar of FOLDER, without the script that would unpack it.
#
#   makeself.sh [--header FILE] [--help-header FILE] [--tar-format T] [--complevel N] [--FLAG ...] FOLDER NAME LABEL START
set -euo pipefail
words=()
while (($#)); do
    case $1 in
        --header | --help-header | --tar-format | --complevel) shift 2 ;;
        --*) shift ;;
        *)
            words+=("$1")
            shift
            ;;
    esac
done
((${#words[@]} == 4)) || {
    echo "makeself.sh: expected FOLDER NAME LABEL START, got ${words[*]}" >&2
    exit 1
}
[[ -x ${words[0]}/${words[3]} ]] || {
    echo "makeself.sh: ${words[3]} is missing or cannot run" >&2
    exit 1
}
packed=$(mktemp)
tar -czf "$packed" -C "${words[0]}" .
mv "$packed" "${words[1]}"
