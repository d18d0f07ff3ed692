"""`python -m ascend_moe.vnpu -- COMMAND` is `ascend-moe vnpu -- COMMAND`, without the extra [cli]."""

from __future__ import annotations

import sys

from ascend_moe.errors import AscendMoeError
from ascend_moe.vnpu.cli import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AscendMoeError as error:
        print(f"ascend-moe vnpu: {error}", file=sys.stderr)
        sys.exit(2)
