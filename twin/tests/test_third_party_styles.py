"""Kernels in the styles of CANN's releases: structs of contexts, template tiling keys, the toolkit's header paths."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
from third_party_runs import HALF, KERNELS, kernels, tiling
from twin_oracle import compiler
from typer.testing import CliRunner

import ascendc_twin
from ascendc_twin.cli import app
from ascendc_twin.compiling import include_directory, own_text, preprocess, unit_of, vendor_headers
from ascendc_twin.entries import Entry
from ascendc_twin.errors import ArgumentError, TwinBuildError
from ascendc_twin.template_keys import bound, find_declarations

# What is compiled for the checked engine, or once more with other defines, runs nightly.
modes = pytest.mark.parametrize("mode", ["fast", pytest.param("checked", marks=pytest.mark.nightly)])


@pytest.mark.parametrize(
    "text,flags",
    [
        ("void f(HcclOpResParam*); struct HcclOpResParam { int a; };", ["-DTWIN_AWAITS_HcclOpResParam"]),
        ("typedef struct { int a; } HcclOpResParam; void f(HcclOpResParam*);", []),
        (
            r'auto x = "{\"{"; void f(HcclOpResParam*); struct HcclOpResParam { int a; };',
            ["-DTWIN_AWAITS_HcclOpResParam"],
        ),
        ("void f(HcclOpResParam* p) { p->rankSize; }", ["-DTWIN_LACKS_HcclOpResParam"]),
        ("using namespace AscendC::HcclContextDef; void f(HcclOpResParam*);", []),
        ("namespace Own { struct HcclOpResParam { }; void f(HcclOpResParam*); }", []),
        ("void f(HcclRankRelationResV2*);", ["-DTWIN_LACKS_HcclRankRelationResV2"]),
    ],
)
def test_context_structs_are_declared_where_a_source_has_none(text: str, flags: list[str]) -> None:
    assert list(unit_of(Path("k.cpp"), text).flags) == flags


def test_a_structs_fields_are_read_before_its_header_stands(tmp_path: Path) -> None:
    """The struct's header, with what it includes itself, comes first; a struct of the source itself stays an error."""
    (tmp_path / "words.h").write_text("#ifndef WORDS\n#define WORDS\nconstexpr int kNames = 16;\n#endif\n")
    struct = "struct HcclOpResParam { uint64_t memory[2]; uint32_t rank, world; char name[kNames]; };"
    (tmp_path / "context.h").write_text(f'#pragma once\n#include "words.h"\n{struct}\n')
    kernel = """#include "kernel_operator.h"
    __aicore__ inline uint32_t World(__gm__ HcclOpResParam* context) { return context->world; }
    CONTEXT
    extern "C" __global__ __aicore__ void worlds(GM_ADDR y) {
        *(__gm__ uint32_t*)y = World((__gm__ HcclOpResParam*)AscendC::GetHcclContext<0>());
    }
    """
    source = tmp_path / "worlds.cpp"
    source.write_text(kernel.replace("CONTEXT", '#include "context.h"'))
    y = [[np.zeros(8, np.uint32)] for _ in range(2)]
    built = ascendc_twin.load(source, includes=[tmp_path])
    built.launch("worlds", y, windows=ascendc_twin.Windows(2, data_bytes=4096), timeout_s=20)
    assert [rank[0][0] for rank in y] == [2, 2]
    source.write_text(kernel.replace("CONTEXT", struct.replace("kNames", "16")))
    with pytest.raises(TwinBuildError, match="incomplete type"):
        ascendc_twin.build(source)


# ---- template keys ----

# D_T from bit 0 (8 bits), HAS_MASK (1), the place of SCALE among 7, 8, 3, 5 (4), FORMAT (8), KIND (8), CORES (8).
HALF_KEY = 1 | 0 << 8 | 2 << 9 | 2 << 13 | 20 << 21
FLOAT_KEYS = {
    (mask, scale): mask << 8 | place << 9 | 2 << 13 | 30 << 21 for mask in (0, 1) for scale, place in ((5, 3), (8, 1))
}
CUBE_KEY = HALF_KEY | 7 << 29


@modes
@pytest.mark.parametrize("length,cores", [(200, 7), (64, 1)])
def test_the_key_selects_the_instance(mode: str, length: int, cores: int) -> None:
    source = np.random.default_rng(length).integers(-9, 10, length)
    mask = np.random.default_rng(1).integers(0, 2, length)
    for key, dtype, want in [
        (HALF_KEY, np.float16, source * 3),
        *((k, np.float32, source * scale * (mask if has else 1)) for (has, scale), k in FLOAT_KEYS.items()),
    ]:
        y = np.full(length, 99, dtype)
        args = [source.astype(dtype), mask.astype(dtype), y]
        call = ("template_key", args, tiling(length), cores, key)
        kernels("template_key").launch(*call, workspace_bytes=0, mode=mode)
        assert np.array_equal(y, want), key


def test_keys_are_listed_and_others_are_refused_by_name() -> None:
    template, x = kernels("template_key"), np.zeros(64, np.float32)
    keys = template.tiling_keys("template_key")
    assert set(keys) == {HALF_KEY, *FLOAT_KEYS.values()}
    names = {"D_T": "half", "HAS_MASK": "0", "SCALE": "3", "FORMAT": "2", "KIND": "20", "CORES": "0"}
    assert keys[HALF_KEY] == names
    listed = "; ".join(
        rf"{key} \({', '.join(f'{name}={value}' for name, value in arguments.items())}\)"
        for key, arguments in keys.items()
    ).partition(";")[0]
    for key, said in [
        (12345, rf"template_key: tiling_key 12345 is none of its keys: {listed}; "),
        (CUBE_KEY, rf"template_key: tiling_key {CUBE_KEY} \(.*CORES=7\) needs cube cores"),
    ]:
        with pytest.raises(ArgumentError, match=said):
            template.launch("template_key", [x, x, x, None], tiling(64), 1, key)
    assert kernels("add_custom", HALF).tiling_keys("add_custom") == {}
    shown = CliRunner().invoke(app, ["list", str(ascendc_twin.build(KERNELS / "template_key.cpp"))]).output
    assert f"  {HALF_KEY}: D_T=half, HAS_MASK=0, SCALE=3, FORMAT=2, KIND=20, CORES=0\n" in shown


def test_some_instances_alone_are_built(tmp_path: Path) -> None:
    text = preprocess(KERNELS / "template_key.cpp", "fast", [], [])
    unit = unit_of(KERNELS / "template_key.cpp", own_text(text), {HALF_KEY})
    refused = {instance.key: instance.refused for instance in unit.entries[0].instances}
    assert refused == {
        HALF_KEY: "",
        CUBE_KEY: "needs cube cores",
        **dict.fromkeys(FLOAT_KEYS.values(), "was not built"),
    }
    assert unit.compiled(tmp_path, 0).read_text().count("case ") == 1
    with pytest.raises(ArgumentError, match=f"tiling_keys: no template kernel has 7; known: .*{HALF_KEY}"):
        ascendc_twin.load(KERNELS / "template_key.cpp", tiling_keys=[7])


def test_the_host_makes_the_same_keys(tmp_path: Path) -> None:
    source = tmp_path / "host.cpp"
    calls = ["C_DT_FLOAT16, 0, SCALE_NONE, C_FORMAT_ND, 20, 0", "C_DT_FLOAT, 1, 8, C_FORMAT_ND, 30, 0"]
    calls += ["C_DT_FLOAT, 1, 6, C_FORMAT_ND, 30, 0", "C_DT_FLOAT, 1, 8"]
    prints = "".join(f'printf("%llu ", (unsigned long long)GET_TPL_TILING_KEY({call}));' for call in calls)
    source.write_text(f'#include "template_key.h"\n#include <cstdio>\nint main() {{ {prints} }}\n')
    command = [compiler(), "-std=c++17", f"-I{include_directory()}", f"-I{KERNELS}", str(source), "-o"]
    subprocess.run([*command, str(tmp_path / "host")], check=True)
    printed = subprocess.run([tmp_path / "host"], capture_output=True, text=True, check=True).stdout.split()
    assert [int(word) for word in printed] == [HALF_KEY, FLOAT_KEYS[1, 8], 2**64 - 1, 2**64 - 1]


TEMPLATE = Entry("add", "", (), ("int", "bool"))
DECLARED = 'twin_tpl_declared("Add", twin_tpl(UINT, "N", 1, 1, 4, 6), twin_tpl(BOOL, "B", 1, 0, 1));'


@pytest.mark.parametrize(
    "text,said",
    [
        ("", "no ASCENDC_TPL_ARGS_DECL for the template add; there is none"),
        (DECLARED, "the template add has no ASCENDC_TPL_SEL"),
        ('twin_tpl_declared("Add", twin_tpl(BOOL, "B", 1, 0));', "the template add has 2 parameters, its .* 1: B"),
        (
            f'{DECLARED} twin_tpl_selected(twin_tpl_combination(twin_tpl(UINT, "N", 0, 1, 5)));',
            "N: 5 is selected; need a declared one: 4, 6",
        ),
        (
            DECLARED.replace("4, 6", "4, 5, 6") + "twin_tpl_selected(twin_tpl_combination());",
            "N: 3 values do not fit its 1 bits",
        ),
        (DECLARED.replace("4, 6", "4, kSix"), "N.*'kSix' is no number to the preprocessor"),
        (DECLARED.replace("1, 4, 6", "9, 4, 6"), "a UINT begins with ASCENDC_TPL_UI_RANGE"),
        (DECLARED.replace("1, 4, 6", "0, 2, 4, 6"), "2 ranges have 4 ends, not 2"),
        ("twin_tpl_selected(twin_tpl_combination());", "stands before the ASCENDC_TPL_ARGS_DECL"),
    ],
)
def test_keys_that_do_not_fit_are_refused(text: str, said: str) -> None:
    with pytest.raises(TwinBuildError, match=said):
        bound(TEMPLATE, find_declarations(text))


def test_kernel_types_and_determinism_are_no_arguments() -> None:
    """Cube cores are refused; of two combinations of one key the plain one is taken; structs are passed over."""
    rows = [
        'twin_tpl(UINT, "N", 0, 1, 4), twin_tpl(CORES, "", 0, 6, 7), twin_tpl(STRUCT, "S", 0, 0)',
        'twin_tpl(UINT, "N", 0, 1, 6), twin_tpl(DETERMINISTIC, "", 0, true), twin_tpl(CORES, "", 0, 6)',
        'twin_tpl(UINT, "N", 0, 1, 6), twin_tpl(DETERMINISTIC, "", 0, false), twin_tpl(CORES, "", 0, 0)',
    ]
    listed = ", ".join(f'twin_tpl_combination({row}, twin_tpl(BOOL, "B", 0, 0))' for row in rows)
    entry = bound(TEMPLATE, find_declarations(f"{DECLARED} twin_tpl_selected({listed});"))
    assert {instance.key: instance.refused for instance in entry.instances} == {0: "needs cube cores", 1: ""}


# ---- header paths ----


def test_paths_of_the_toolkit_are_there_or_refused_by_one_line(tmp_path: Path) -> None:
    compiler()
    headers = vendor_headers((include_directory() / "vendor_headers.txt").read_text())
    assert len(headers) > 1000
    there = [name for name, text in headers.items() if "#error" not in text]
    for name in ["adv_api/hccl/hccl.h", "kernel_basic_intf.h", "basic_api/kernel_basic_intf.h", "lib/matmul_intf.h"]:
        assert name in there
    assert not [name for name in headers if (include_directory() / name).exists()]
    source = tmp_path / "one.cpp"
    refused = sorted(set(headers) - set(there))
    for name in ["register/tilingdata_base.h", *random.Random(0).sample(refused, 3)]:
        source.write_text(f'#include "{name}"\n')
        with pytest.raises(TwinBuildError, match=f'error: #error "{name}: ') as caught:
            preprocess(source, "fast", [], [])
        assert str(caught.value).count("error: ") == 2  # the line, and the compiler's output that has it
