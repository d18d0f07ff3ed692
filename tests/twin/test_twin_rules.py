"""The twin's strictness: every rule of the hardware that it watches fires, and its near miss does not."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path

import pytest
from twin_oracle import COMMON, NATIVE, SCRATCH, compiler, runtime_sources, syntax_errors

pytestmark = pytest.mark.asan

# Rule kernel -> the finding and a piece of what is said.
FAULTS = {
    "ub_over": ("UB overflow", "196576 of the UB's 196608"),
    "buffers_65": ("UB overflow", "more than 64 buffers"),
    "two_pipes": ("queue discipline", "two TPipes"),
    "buf_view_over": ("out of bounds", "TBuf holds 256 bytes"),
    "buf_view_unaligned": ("misaligned address", "offset 16"),
    "copy_rounded": ("copy length rounded down", "48 bytes: the last 16 would be dropped"),
    "copy_rounded_half": ("copy length rounded down", "34 bytes: the last 2 would be dropped"),
    "copy_nothing": ("illegal argument", "of 0 bytes"),
    "copy_past_ub": ("out of bounds", "needs 288 bytes, the UB view holds 256"),
    "copy_ub_unaligned": ("misaligned address", "16 bytes past a 32-byte boundary"),
    "copy_gm_past": ("out of bounds", '256 bytes at byte 32516 of GM "gm", which has 32768'),
    "copy_gm_unaligned": ("misaligned address", "not aligned to 4 bytes"),
    "copy_past_declared": ("out of bounds", "64 bytes, the GlobalTensor holds 60"),
    "copy_stranger": ("out of bounds", "in no tensor or window"),
    "pad_count": ("illegal argument", "blockCount 4096 is over 4095"),
    "pad_element": ("illegal argument", "blockLen 6 is not a multiple of the 4-byte element"),
    "pad_right_over": ("illegal argument", "more than 32 bytes"),
    "atomic_type": ("illegal argument", "SetAtomic of another element type"),
    "atomic_left": ("illegal argument", "SetAtomicNone is missing"),
    "element_past": ("out of bounds", "element 8 of a LocalTensor of 8"),
    "vector_past": ("out of bounds", "260 bytes, the UB view holds 256"),
    "cast_none": ("illegal argument", "round mode 0"),
    "queue_alloc_3": ("queue discipline", "none of the queue's 2 tensors free"),
    "queue_out_9": ("queue discipline", "more than 8 queue tensors"),
    "queue_depth_over": ("queue discipline", "over the queue's depth 1"),
    "queue_empty": ("queue discipline", "DeQue of an empty queue"),
    "queue_freed_twice": ("queue discipline", "freed twice"),
    "queue_leak": ("queue discipline", "1 queue tensors were never freed"),
    "queue_foreign": ("queue discipline", "not this queue's"),
    "use_after_free": ("use after free", "after FreeTensor"),
    "use_after_reset": ("use after free", "TPipe was reset"),
    "never_allocated": ("use after free", "never allocated"),
    "event_8": ("event discipline", "event id 8"),
    "event_twice": ("event discipline", "set twice"),
    "event_unset": ("event discipline", "nobody has set"),
    "event_left": ("event discipline", "still set"),
    "sync_diverges": ("SyncAll divergence", "but cores 1 have left"),
    "fail_while_waiting": ("event discipline", "(rank 5, core 3)"),
}
# These name no source line: they are found after the kernel, or by an object without one.
WITHOUT_LINE = {"atomic_left", "queue_leak", "event_left", "two_pipes"}
GOOD = [
    "ub_full",
    "buffers_64",
    "pipe_after_destroy",
    "buf_view_ok",
    "copy_ok",
    "copy_ub_aligned",
    "copy_gm_end",
    "copy_declared",
    "pad_ok",
    "pad_right_ok",
    "atomic_ok",
    "element_last",
    "vector_ok",
    "cast_rint",
    "queue_alloc_2",
    "queue_out_8",
    "queue_depth_ok",
    "queue_freed",
    "use_before_free",
    "use_before_reset",
    "event_7",
    "sync_all",
    "sync_often",
]


@functools.cache
def rules() -> ctypes.CDLL:
    library = Path(SCRATCH.name) / "rules.so"
    sources = [
        NATIVE / "rule_kernels.cpp",
        *runtime_sources(),
    ]
    command = [compiler(), *COMMON, "-O1", "-shared", "-fPIC", *map(str, sources), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    opened = ctypes.CDLL(str(library))
    opened.run_rule.restype = opened.rule_names.restype = ctypes.c_char_p
    return opened


def says(name: str) -> str:
    return rules().run_rule(name.encode()).decode()


def test_every_rule_kernel_is_expected_to_do_something() -> None:
    assert sorted(rules().rule_names().decode().split()) == sorted([*FAULTS, *GOOD])


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_rule_is_named_with_its_place(name: str) -> None:
    finding, detail = FAULTS[name]
    text = says(name)
    assert text.startswith(f"{finding}: ") and detail in text
    assert "(rank 5, core " in text
    assert name in WITHOUT_LINE or "rule_kernels.cpp:" in text
    assert "\n" not in text


@pytest.mark.parametrize("name", GOOD)
def test_a_near_miss_passes(name: str) -> None:
    assert says(name) == ""


PRELUDE = """
#include "kernel_operator.h"
using namespace AscendC;
void Kernel() {
    TPipe pipe;
    TBuf<> a, b, c;
    pipe.InitBuffer(a, 1024);
    pipe.InitBuffer(b, 1024);
    pipe.InitBuffer(c, 1024);
"""
# Legal and illegal calls in pairs: the near miss proves that the snippet fails for the reason it should.
COMPILES = {
    "cast_float_half": "Cast(a.Get<half>(), b.Get<float>(), RoundMode::CAST_RINT, 8);",
    "muls_float": "Muls(a.Get<float>(), b.Get<float>(), 2.0f, 8);",
    "add_int32": "Add(a.Get<int32_t>(), b.Get<int32_t>(), c.Get<int32_t>(), 8);",
    "abs_float": "Abs(a.Get<float>(), b.Get<float>(), 8);",
    "duplicate_bf16": "Duplicate(a.Get<bfloat16_t>(), bfloat16_t(), 16);",
    "reduce_max_float": "ReduceMax(a.Get<float>(), b.Get<float>(), c.Get<float>(), 8);",
    "div_float": "Div(a.Get<float>(), b.Get<float>(), c.Get<float>(), 8);",
    "barrier_v": "PipeBarrier<PIPE_V>();",
    "scalars": (
        "static_assert(AlignUp(33, 32) == 64 && DivCeil(33, 32) == 2);"
        " (void)(ToFloat(ToBfloat16(1.5f)) + ScalarGetSFFValue<1>(8));"
    ),
    "atomic_float": "SetAtomicAdd<float>();",
}
REFUSED = {
    "cast_float_int8": "Cast(a.Get<int8_t>(), b.Get<float>(), RoundMode::CAST_RINT, 8);",
    "cast_bf16_half": "Cast(a.Get<half>(), b.Get<bfloat16_t>(), RoundMode::CAST_RINT, 8);",
    "cast_uint32_float": "Cast(a.Get<float>(), b.Get<uint32_t>(), RoundMode::CAST_NONE, 8);",
    "muls_bf16": "Muls(a.Get<bfloat16_t>(), b.Get<bfloat16_t>(), bfloat16_t(), 16);",
    "muls_wrong_scalar": "Muls(a.Get<float>(), b.Get<float>(), 2, 8);",
    "add_bf16": "Add(a.Get<bfloat16_t>(), b.Get<bfloat16_t>(), c.Get<bfloat16_t>(), 8);",
    "add_uint32": "Add(a.Get<uint32_t>(), b.Get<uint32_t>(), c.Get<uint32_t>(), 8);",
    "add_int8": "Add(a.Get<int8_t>(), b.Get<int8_t>(), c.Get<int8_t>(), 8);",
    "add_mixed": "Add(a.Get<float>(), b.Get<half>(), c.Get<float>(), 8);",
    "div_int32": "Div(a.Get<int32_t>(), b.Get<int32_t>(), c.Get<int32_t>(), 8);",
    "abs_int32": "Abs(a.Get<int32_t>(), b.Get<int32_t>(), 8);",
    "duplicate_int8": "Duplicate(a.Get<int8_t>(), static_cast<int8_t>(0), 32);",
    "reduce_max_int32": "ReduceMax(a.Get<int32_t>(), b.Get<int32_t>(), c.Get<int32_t>(), 8);",
    "barrier_s": "PipeBarrier<PIPE_S>();",
    "atomic_uint32": "SetAtomicAdd<uint32_t>();",
    "unknown_call": "Arange(a.Get<int32_t>(), 0, 1, 8);",
}


@pytest.mark.parametrize("name", COMPILES)
def test_a_legal_call_compiles(name: str, tmp_path: Path) -> None:
    assert syntax_errors(PRELUDE + COMPILES[name] + "}", tmp_path) == ""


@pytest.mark.parametrize("name", REFUSED)
def test_an_illegal_call_does_not_compile(name: str, tmp_path: Path) -> None:
    assert "error" in syntax_errors(PRELUDE + REFUSED[name] + "}", tmp_path)
