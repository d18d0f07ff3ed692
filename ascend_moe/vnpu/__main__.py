"""`python -m ascend_moe.vnpu -- COMMAND` is `ascend-moe vnpu -- COMMAND`, without the extra [cli]."""

from __future__ import annotations

import sys

from ascend_moe.cli.vnpu import main
from ascend_moe.errors import AscendMoeError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AscendMoeError as error:
        print(f"ascend-moe vnpu: {error}", file=sys.stderr)
        sys.exit(2)
