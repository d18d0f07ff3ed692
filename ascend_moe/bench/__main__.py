"""``python -m ascend_moe.bench``: the same as ``ascend-moe bench``."""

from ascend_moe.bench.cli import main

if __name__ == "__main__":
    main()
