"""``python -m ascend_moe.bench``: the same as ``ascend-moe bench``."""

from ascend_moe.cli.bench import main

if __name__ == "__main__":
    main()
