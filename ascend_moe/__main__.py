"""`python -m ascend_moe` is `ascend-moe`."""

from ascend_moe.cli import main

if __name__ == "__main__":
    main()
