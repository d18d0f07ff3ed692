"""`ascend-moe bench`: dispatch and combine against their peers and the machine's limit, in one run.

All methods run in the same rank processes, on the same data, in turns, and are checked before they are
timed. docs/performance.md says what is measured and how.
"""
