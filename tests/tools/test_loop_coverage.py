"""`make loop-coverage`: what counts the turns of a loop, which loops count, and what the tables say of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import loop_coverage
from loop_coverage import instrumented

SOURCE = """// for (a comment; is; none)
int Turns(int n) {
    int sum = 0;
    for (int i = 0; i < n; ++i)
        for (int k = 0; k < kTwo; ++k) sum += k;
    while (n > 9 && sum < 1000) sum += 100;
    do {
        while (sum % 7 != 0) ++sum;
        if (n == 5) continue;
    } while (--n > 0);
    if (n < 0) for (;;) { if (++sum > 500) break; } else sum += 1;
    return sum;
}
"""
COUNTED = """#include <cstdio>
constexpr int kTwo = 2;
int most[8];
namespace loops { struct Turns {
    Turns(int loop, int turns = 0) : loop(loop), turns(turns) { Take(); }
    bool Once() { return begun ? false : (begun = true); }
    bool Turn() { ++turns; return Take(); }
    bool Take() { if (turns > most[loop]) most[loop] = turns; return true; }
    int loop, turns; bool begun = false;
}; }
"""


def test_a_counter_changes_nothing_and_counts_the_most_turns(tmp_path: Path) -> None:
    text, loops = instrumented("kernel.h", SOURCE, 0)
    assert [(loop.line, loop.counts) for loop in loops] == [
        *((4, True), (5, False), (6, True), (7, True), (8, True), (11, True))
    ]
    main = 'int main() { printf("%d %d", Turns(3), Turns(12)); for (int n : most) printf(" %d", n); }'
    plain = "#include <cstdio>\nconstexpr int kTwo = 2;\nint most[8];\n" + SOURCE + main
    said = []
    for name, program in (("plain", plain), ("counted", COUNTED + text + main)):
        (tmp_path / f"{name}.cpp").write_text(program)
        subprocess.run([os.environ.get("CXX", "g++"), "-o", name, f"{name}.cpp"], cwd=tmp_path, check=True)
        said.append(subprocess.run([tmp_path / name], capture_output=True, text=True).stdout.split())
    assert said[0][:2] == said[1][:2]
    assert [*map(int, said[1][2:8])] == [12, 2, 10, 12, 4, 0]


def test_every_loop_of_the_kernels_has_a_counter() -> None:
    texts, loops = loop_coverage.all_loops()
    assert len(loops) > 200 and sum(text.count(".Once()") for text in texts.values()) == len(loops)
    known = {(loop.file, loop.text) for loop in loops}
    assert {*loop_coverage.NEVER} <= known, "a loop that cannot be filled is no more"
    for file, old, _, _ in loop_coverage.EDITS:
        assert (loop_coverage.ROOT / file).read_text().count(old) == 1, (file, old)
