"""One wrong line in a kernel, and the suite fails. A build a mutant, minutes in all: `pytest -m mutants`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pytest_runs import first_failure

from ascend_moe.native import library as _lib

pytestmark = pytest.mark.mutants

SUITE = [
    "kernels/test_seed_example.py",
    *(
        f"kernels/test_twin_reference.py::test_{name}"
        for name in ("fixed", "special_values", "zero_rows_quantised")
    ),
    "twin/test_twin_errors.py",
    "kernels/test_sequences.py::test_that_the_poison_lies_where_the_rows_go",
    "kernels/test_sequences.py::test_every_sequence_across_the_wrap[2-2-1]",
    "kernels/test_sequences.py::test_every_sequence_across_the_wrap[2-2-2]",
]
SUITE_SECONDS = 150  # a mutant that hangs fails as well


@dataclass(frozen=True)
class Mutant:
    """``old``, which is there once, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


def _kernel(name: str, header: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"op_kernel/{header}.h", old, new)


MUTANTS = [
    # routing
    _kernel(
        "prefix off by one",
        "common/routing",
        "prefix.SetValue(expert, static_cast<int32_t>(rows))",
        "prefix.SetValue(expert, static_cast<int32_t>(rows + (l == 1)))",
    ),
    _kernel(
        "a core counts its own pairs as earlier ones",
        "common/routing",
        "if (core + i < core_)",
        "if (core + i <= core_)",
    ),
    _kernel(
        "capacity one too large",
        "common/routing",
        "if (rows > info_->capacity &&",
        "if (rows > info_->capacity + 1 &&",
    ),
    _kernel(
        "mask of the chunk's first tokens",
        "common/routing",
        "info_->maskRank == 1 ? token - firstToken_ : i",
        "info_->maskRank == 1 ? i : i",
    ),
    _kernel(
        "masked pairs are routed", "common/routing", "== 0) return kInactive;", "== 2) return kInactive;"
    ),
    _kernel(
        "last expert is invalid",
        "common/routing",
        "id < static_cast<int32_t>(info_->experts)",
        "id + 1 < static_cast<int32_t>(info_->experts)",
    ),
    # dispatch
    _kernel(
        "expand_idx kept where nothing is routed",
        "window/dispatch",
        "index.SetValue(i, static_cast<int32_t>(position));",
        "if (routing_.pairs().Routed(id)) index.SetValue(i, static_cast<int32_t>(position));",
    ),
    _kernel(
        "triple without k",
        "window/dispatch",
        "triple.SetValue(2, static_cast<int32_t>(k))",
        "triple.SetValue(2, static_cast<int32_t>(k == 1 ? 0 : k))",
    ),
    _kernel(
        "chunks run over the end of a segment",
        "window/dispatch",
        "Min(end, segments.End(slot)) - row);",
        "end - row);",
    ),
    _kernel(
        "expert_token_nums types swapped",
        "common/dispatch_outputs",
        "tiling_->tokenNumsType == 0 ? end",
        "tiling_->tokenNumsType != 0 ? end",
    ),
    _kernel(
        "tp_recv_counts left out",
        "common/dispatch_outputs",
        "if (tiling_->tpWorldSize == 1)",
        "if (tiling_->tpWorldSize == 2)",
    ),
    # segments
    _kernel(
        "rows of a source start at the segment before",
        "common/segments",
        "SetValue(slot, before);",
        "SetValue(slot, before - (before > 1));",
    ),
    _kernel("falling counts are accepted", "common/segments", "if (end < before ||", "if (end < 0 ||"),
    # quantisation
    _kernel("scale is m / 127", "common/quantize", "scale = 1.0f / inverse;", "scale = largest / 127.0f;"),
    _kernel("scale of zero rows is 0", "common/quantize", "float scale = 1.0f;", "float scale = largest;"),
    _kernel(
        "smoothed row is used for another expert",
        "common/quantize",
        "(!kSmooth || expert == expert_)",
        "(!kSmooth || true)",
    ),
    _kernel(
        "codes are truncated",
        "common/quantize",
        "AscendC::RoundMode::CAST_RINT, hidden_",
        "AscendC::RoundMode::CAST_TRUNC, hidden_",
    ),
    # status and waiting
    _kernel(
        "no status to who gets no rows",
        "common/exchange",
        "sender_.PutStatus(peer, run, bytes);",
        "if (failed || counts.Rows(peer, 0) != 0) sender_.PutStatus(peer, run, bytes);",
    ),
    _kernel(
        "status without counts",
        "common/exchange",
        "writer.SetCount(l, count);",
        "writer.SetCount(l, 0);",
    ),
    _kernel(
        "status leaves before the rows of other cores",
        "common/exchange",
        "verdict_ = board_.Meet<IsMutant(Mutant::kNoSyncBeforeFlags)>(1, all);",
        "verdict_ = all;",
    ),
    _kernel(
        "the higher rank's error is reported",
        "common/verdict",
        "other.source < verdict.source",
        "other.source > verdict.source",
    ),
    # the window
    _kernel(
        "one half for all epochs",
        "protocol/window",
        "return parity * HalfBytes(dataBytes);",
        "return (parity - parity) * HalfBytes(dataBytes);",
    ),
    _kernel(
        "status slots are not doubled",
        "protocol/window",
        "(static_cast<uint64_t>(parity) * world + source) *",
        "(parity * 0ull + source) *",
    ),
    _kernel(
        "parity breaks at the wrap",
        "protocol/window",
        "epoch == 0xFFFFFFFFu ? 2u : epoch + 1",
        "epoch == 0xFFFFFFFFu ? 1u : epoch + 1",
    ),
    _kernel(
        "stale status unknown across the wrap",
        "protocol/window",
        "(epoch == 3 && seen == 0xFFFFFFFFu)",
        "(epoch == 3 && seen == 0xFFFFFFFDu)",
    ),
    _kernel(
        "a block too much a row",
        "protocol/window",
        "(quantised ? kBlock : 0)",
        "(quantised ? 2 * kBlock : 0)",
    ),
    # combine
    _kernel(
        "k descending",
        "window/sum",
        "for (uint32_t k = 0; k < info_->topK; ++k) {",
        "for (uint32_t k = info_->topK; k-- > 0;) {",
    ),
    _kernel(
        "expert scale left out",
        "window/sum",
        "if (weighted) AscendC::Muls(term, term, weight, elements);",
        "(void)weight;",
    ),
    _kernel(
        "position in the expert left out",
        "window/sum",
        "routing.Prefix(id) + indexBuf_.Get<int32_t>().GetValue(i);",
        "routing.Prefix(id) + 0 * indexBuf_.Get<int32_t>().GetValue(i);",
    ),
    _kernel(
        "shared expert for inactive tokens",
        "window/sum",
        "if (active && tiling_->hasSharedExpertX != 0)",
        "if (tiling_->hasSharedExpertX != 0)",
    ),
    _kernel(
        "sum is truncated",
        "window/sum",
        "AscendC::Cast(out, sum, AscendC::RoundMode::CAST_RINT",
        "AscendC::Cast(out, sum, AscendC::RoundMode::CAST_TRUNC",
    ),
    _kernel(
        "wrong returns are accepted", "common/combine_inputs", "if (ours != theirs)", "if (ours < theirs)"
    ),
    _kernel(
        "expand_idx is not looked at",
        "common/combine_inputs",
        "if (position >= total)",
        "if (position > total + 4096)",
    ),
    _kernel(
        "k of a triple is not looked at",
        "common/combine_inputs",
        "info.world, info.maxBatch, info.topK}",
        "info_->world, info_->maxBatch, 4096}",
    ),
]


class Bench:
    """A copy of the native sources with one build directory."""

    def __init__(self, root: Path) -> None:
        self.source, self.build = root / "source", root / "build"
        origin = _lib.native_source_root()
        self.originals: dict[str, str] = {}
        for name in ("cmake", "op_kernel", "op_host", "csrc", "twin", "vnpu"):
            shutil.copytree(origin / name, self.source / name)
        for name in ("CMakeLists.txt", "tools/source_hash.py"):
            (self.source / name).parent.mkdir(exist_ok=True)
            shutil.copy(origin / name, self.source / name)
        bin_dir = Path(sys.executable).parent
        tools = {
            name: shutil.which(name) or shutil.which(name, path=str(bin_dir)) for name in ("cmake", "ninja")
        }
        if tools["cmake"] is None:
            pytest.skip("no cmake")
        self.cmake = tools["cmake"]
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}"] if tools["ninja"] else []
        # Built for the compile's speed: the mutants are run for seconds.
        flags = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1 -w"]
        self._call([self.cmake, "-S", str(self.source), "-B", str(self.build), *generator, *flags])

    def _call(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

    def library(self, mutant: Mutant | None) -> Path:
        """The library with this one change; the change before is taken back."""
        for name, text in self.originals.items():
            (self.source / name).write_text(text)
        self.originals.clear()
        if mutant is not None:
            path = self.source / mutant.file
            text = path.read_text()
            assert text.count(mutant.old) == 1, (
                f"{mutant.name}: {mutant.old!r} is in {mutant.file} {text.count(mutant.old)} times"
            )
            self.originals[mutant.file] = text
            path.write_text(text.replace(mutant.old, mutant.new))
        jobs = str(os.cpu_count() or 1)
        self._call([self.cmake, "--build", str(self.build), "--target", "ascend_moe", "--parallel", jobs])
        return self.build / "libascend_moe.so"

    def first_failure(self, library: Path) -> str | None:
        """What of the suite fails first with this library; None when all passes."""
        return first_failure(library, SUITE, SUITE_SECONDS, ASCEND_MOE_TIMEOUT_S="3")


@pytest.fixture(scope="module", autouse=True)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if "mutants" not in request.config.getoption("-m"):
        pytest.skip("takes minutes: pytest -m mutants")
    made = Bench(tmp_path_factory.mktemp("mutants"))
    library = made.library(None)
    assert made.first_failure(library) is None, "the suite fails without any mutant"
    yield made


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_found(bench: Bench, mutant: Mutant) -> None:
    failure = bench.first_failure(bench.library(mutant))
    print(f"{mutant.name}: {failure}")
    assert failure is not None, f"no test sees {mutant.new!r} in {mutant.file}"
