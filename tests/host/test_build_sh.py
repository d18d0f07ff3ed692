"""build.sh: what it says when something is missing, what it writes, and both routes run to the end over
shims of what a toolkit has (CMake functions, msopgen), which record what reaches them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from op_host_calls import ALL_TYPES, TYPES, Definition, definition

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import op_description  # noqa: E402

BOTH = "--soc=ascend910b,ascend910_93"

# CANN's CMake functions, as far as our CMakeLists.txt call them: each call is a line of calls.txt.
ASC_CONFIG = """
function(record)
  string(REPLACE ";" " " line "${ARGN}")
  file(APPEND ${CMAKE_BINARY_DIR}/calls.txt "${line}\\n")
endfunction()
set(ASCEND_AUTOGEN_PATH ${CMAKE_BINARY_DIR}/autogen)
file(MAKE_DIRECTORY ${ASCEND_AUTOGEN_PATH})
foreach(name npu_op_package npu_op_library npu_op_kernel_library npu_op_kernel_options npu_op_package_add)
  file(WRITE ${CMAKE_BINARY_DIR}/${name}.cmake "function(${name})\\n record(${name} \\${ARGN})\\n endfunction()")
  include(${CMAKE_BINARY_DIR}/${name}.cmake)
endforeach()
function(npu_op_code_gen)
  record(npu_op_code_gen ${ARGN})
  record(ASCEND_COMPUTE_UNIT ${ASCEND_COMPUTE_UNIT})
  get_target_property(includes cust_intf_pub INTERFACE_INCLUDE_DIRECTORIES)
  record(cust_intf_pub ${includes})
  foreach(op distribute_dispatch distribute_combine probe one_card)
    file(WRITE ${ASCEND_AUTOGEN_PATH}/$ENV{OPS_PROJECT_NAME}_ascend_moe_${op}.cpp "")
  endforeach()
  file(WRITE ${ASCEND_AUTOGEN_PATH}/op_proto.cc "")
endfunction()
add_custom_target(binary COMMAND ${CMAKE_COMMAND} -E echo kernels)
add_custom_target(package COMMAND ${CMAKE_COMMAND} -E touch ${CMAKE_BINARY_DIR}/custom_opp_test.run)
"""

# A project as msopgen makes it: the lines that build.sh must change, and a build that only packs.
MSOPGEN = """#!/usr/bin/env bash
echo "$*" > "$(dirname "$0")/called.txt"
while (($#)); do [[ $1 == -out ]] && out=$2; shift; done
mkdir -p "$out"/{cmake,op_host,op_kernel,framework}
cd "$out"
cat > cmake/func.cmake << 'EOF'
execute_process(COMMAND c++ -shared -std=c++11 -I ${ASCEND_CANN_PACKAGE_PATH}/include)
EOF
cat > cmake/intf.cmake << 'EOF'
target_compile_options(a -std=c++11)
target_include_directories(a ${ASCEND_CANN_PACKAGE_PATH}/include)
EOF
cat > op_host/CMakeLists.txt << 'EOF'
file(GLOB aclnn_src ${ASCEND_AUTOGEN_PATH}/aclnn_*.cpp)
file(GLOB aclnn_inc ${ASCEND_AUTOGEN_PATH}/aclnn_*.h)
EOF
echo 'add_kernels_compile()' > op_kernel/CMakeLists.txt
echo theirs > op_host/ascend_moe_distribute_dispatch.cpp
cat > CMakePresets.json << 'EOF'
{"configurePresets": [{"cacheVariables": {"vendor_name": {"type": "STRING", "value": "customize"}}}]}
EOF
cat > build.sh << 'EOF'
mkdir -p build_out
echo "$OPS_PROJECT_NAME" > build_out/prefix.txt
touch build_out/custom_opp_test.run
EOF
"""


def build(*arguments: str, home: Path | None = None, path: str | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND_", "CMAKE_"))}
    if home is not None:
        clean["ASCEND_HOME_PATH"] = str(home)
    if path is not None:
        clean["PATH"] = path
    return subprocess.run(
        ["/bin/bash", str(ROOT / "build.sh"), *arguments],
        capture_output=True,
        text=True,
        env={**clean, "LC_ALL": "C"},
        timeout=120,
    )


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def toolkit(home: Path, *, asc: bool = False, msopgen: bool = False) -> Path:
    """A directory that looks like an installed toolkit."""
    executable(home / "compiler/ccec_compiler/bin/bisheng")
    (home / "include/experiment/platform/platform").mkdir(parents=True)
    if asc:
        modules = home / "compiler/tikcpp/ascendc_kernel_cmake/fwk_modules"
        modules.mkdir(parents=True)
        (modules / "func.cmake").write_text("")
        (home / "lib64/cmake").mkdir(parents=True)
        (home / "lib64/cmake/asc-config.cmake").write_text(ASC_CONFIG)
    if msopgen:
        executable(home / "python/site-packages/bin/msopgen", MSOPGEN)
    return home


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.suffix in (".h", ".cpp")
    }


def assert_sources_are_ours(project: Path) -> None:
    """All files are there. Kernels' headers lie, and are found, under ascend_moe/, where no other package's lie."""
    folders = [path.name for path in (ROOT / "op_kernel").iterdir() if path.is_dir()]
    include = re.compile(rf'^(#include ")({"|".join(folders)})/'.encode(), flags=re.MULTILINE)
    made_files = {
        "op_api/aclnn_ascend_moe.h": op_description.aclnn_header(op_description.DESCRIPTION.read_text()).encode(),
        "op_api/aclnn_ascend_moe.cpp": op_description.aclnn_source(op_description.DESCRIPTION.read_text()).encode(),
    }
    for part in ("op_host", "op_kernel"):
        want = {
            f"ascend_moe/{name}" if part == "op_kernel" and "/" in name else name: include.sub(
                rb"\1ascend_moe/\2/", text
            )
            for name, text in tree(ROOT / part).items()
        }
        if part == "op_host":
            want |= made_files
        made = tree(project / part)
        assert made == want
        for name, text in made.items():
            for header in re.findall(r'^#include "(\S+\.h)"', text.decode(), flags=re.MULTILINE):
                if "ascend_moe/" in header or header.startswith("../"):
                    places = [(project / part / name).parent / header, project / "op_kernel" / header]
                    assert any(place.resolve().is_file() for place in places), f"{part}/{name}: {header}"
    assert {path.name for path in (project / "op_kernel").iterdir() if path.is_dir()} == {"ascend_moe"}


def preset_of(project: Path) -> dict[str, Any]:
    """The CMake variables of a written project."""
    presets = json.loads((project / "CMakePresets.json").read_text())["configurePresets"]
    variables: dict[str, Any] = presets[0]["cacheVariables"]
    return variables


# ---- what it says


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no --soc given: --soc=ascend910b (A2), --soc=ascend910_93 (A3), or both with a comma"),
        (("--soc=ascend310p",), "unknown SoC 'ascend310p': the kernels are written for ascend910b"),
        (("--soc=ascend910b,", "--vendor_name=a-b"), "'a-b' must be letters, digits and underscores"),
        ((BOTH, "--route=make"), "unknown route 'make': asc or msopgen"),
        ((BOTH, "--jobs=0"), "--jobs=0 must be a number above 0"),
        ((BOTH, "--fast"), "unknown argument --fast; see ./build.sh --help"),
        ((BOTH,), "ASCEND_HOME_PATH is not set: source the toolkit's set_env.sh"),
        ((BOTH, "--dry-run"), "or name a route for --dry-run: --route=asc, --route=msopgen"),
    ],
)
def test_wrong_calls_say_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    done = build(*arguments)
    assert (done.returncode, done.stdout) == (1, "") and message in done.stderr


def test_toolkits_that_cannot_build(tmp_path: Path) -> None:
    assert BOTH in build("--help").stdout
    assert "/nowhere is no directory" in build(BOTH, home=Path("/nowhere")).stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    done = build(BOTH, home=empty)
    assert done.returncode == 1
    assert f"{empty} can build no op project" in done.stderr
    assert f"no device compiler (bisheng or ccec) in {empty}" in done.stderr
    old = toolkit(tmp_path / "old", msopgen=True)
    assert "or CANN 8.5 or later" in build(BOTH, "--route=asc", home=old).stderr
    new = toolkit(tmp_path / "new", asc=True)
    assert "no msopgen" in build(BOTH, "--route=msopgen", home=new).stderr
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "thesis.txt").write_text("mine")
    done = build(BOTH, "--route=asc", "--dry-run", f"--build-dir={tmp_path}")
    assert done.returncode == 1 and (tmp_path / "project" / "thesis.txt").read_text() == "mine"
    assert "holds something else: name an empty or a new directory" in done.stderr


# ---- the asc route


def test_dry_run_writes_the_project(tmp_path: Path) -> None:
    """Without any toolkit; a second run starts afresh."""
    out = tmp_path / "out"
    for vendor in ("ascend_moe", "acme"):
        done = build(BOTH, "--route=asc", "--dry-run", f"--build-dir={out}", f"--vendor_name={vendor}", "--jobs=3")
        assert done.returncode == 0, done.stderr
    project = out / "project"
    assert_sources_are_ours(project)
    for part in (".", "op_host", "op_kernel"):
        name = Path(part) / "CMakeLists.txt"
        assert (project / name).read_text() == (ROOT / "cmake/opp_package" / name).read_text()
    assert "would need: ASCEND_HOME_PATH is not set" in done.stdout
    steps = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert [shlex.split(steps[0])[1:], *steps[1:]] == [
        [
            *("cmake", "-G", "Unix Makefiles", "-S", str(project), "-B", f"{out}/out"),
            *("-DCMAKE_BUILD_TYPE=Release", "-Dvendor_name=acme", "-DASCEND_COMPUTE_UNIT=ascend910b;ascend910_93"),
            *("-DASCEND_CANN_PACKAGE_PATH=/usr/local/Ascend/cann", "-DAM_INCLUDES="),
        ],
        f"+ cmake --build {out}/out --target binary -j 3",
        f"+ cmake --build {out}/out --target package -j 3",
    ]
    assert not (out / "out").exists()


def test_asc_route_to_the_end(tmp_path: Path) -> None:
    """Chosen by what the toolkit has; what CANN's functions are called with. Needs no CMake later than 3.16."""
    home = toolkit(tmp_path / "cann", asc=True, msopgen=True)
    out = tmp_path / "out"
    done = build(BOTH, f"--build-dir={out}", home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "route asc" in done.stdout
    assert f"package: {out}/custom_opp_test.run" in done.stdout
    assert f"install: bash {out}/custom_opp_test.run, or without root bash" in done.stdout.splitlines()[-1]
    assert "--install-path=DIR; then source" in done.stdout.splitlines()[-1]
    calls = dict(line.split(" ", 1) for line in (out / "out/calls.txt").read_text().splitlines()[:4])
    host, auto = out / "project/op_host", out / "out/autogen"
    assert calls["npu_op_package"].startswith("ascend_moe TYPE RUN CONFIG")
    assert calls["ASCEND_COMPUTE_UNIT"] == "ascend910b ascend910_93"
    includes = calls["cust_intf_pub"].split(" ")
    assert includes == [str(out / "project/op_kernel"), str(home / "include/experiment/platform")]
    generated = calls["npu_op_code_gen"]
    assert "-std=c++17" in generated
    assert "OPTIONS OPS_PROJECT_NAME aclnnInner" in generated
    for include in includes:
        assert f"-I{include}" in generated
    sources = sorted(str(path) for path in host.glob("*.cpp"))
    assert [word for word in generated.split(" ") if word.endswith(".cpp")] == sources
    lines = (out / "out/calls.txt").read_text().splitlines()
    libraries = {words[1]: words[2:] for words in map(str.split, lines) if words[0] == "npu_op_library"}
    ops = ("distribute_combine", "distribute_dispatch", "one_card", "probe")
    entries = [f"{auto}/aclnnInner_ascend_moe_{op}.cpp" for op in ops]
    entries.append(f"{host}/op_api/aclnn_ascend_moe.cpp")
    assert libraries["cust_opapi"] == ["ACLNN", *entries]
    assert libraries["cust_optiling"] == ["TILING", *sources]
    assert libraries["cust_op_proto"] == ["GRAPH", *sources, f"{auto}/op_proto.cc"]
    added = [line for line in lines if line.startswith("npu_op_package_add")]
    assert "npu_op_package_add ascend_moe LIBRARY cust_opapi cust_optiling cust_op_proto" in added
    assert "npu_op_package_add ascend_moe LIBRARY ascendc_kernels" in added
    assert "npu_op_kernel_options ascendc_kernels ALL OPTIONS --cce-auto-sync=off" in lines
    headers = next(line for line in added if "TYPE ACLNN FILES" in line)
    assert f"{host}/op_api/aclnn_ascend_moe.h" in headers
    # A code generator without prefixes is named.
    config = home / "lib64/cmake/asc-config.cmake"
    config.write_text(config.read_text().replace("$ENV{OPS_PROJECT_NAME}", "aclnn"))
    shutil.rmtree(auto)
    again = subprocess.run(["cmake", str(out / "out")], capture_output=True, text=True)
    assert again.returncode and "op_build wrote no aclnnInner_*.cpp" in " ".join(again.stderr.split())


def test_a_build_without_a_package_fails(tmp_path: Path) -> None:
    """With a cmake that does nothing."""
    executable(tmp_path / "bin/cmake")
    out, path = tmp_path / "out", f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = build(BOTH, f"--build-dir={out}", home=toolkit(tmp_path / "cann", asc=True), path=path)
    assert done.returncode == 1 and f"without a custom_opp_*.run in {out}" in done.stderr


# ---- the msopgen route


def ops_json() -> dict[str, Any]:
    """Returns what tools/op_description.py writes for msopgen."""
    command = [sys.executable, "-S", str(ROOT / "tools/op_description.py"), "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {op["op"]: op for op in json.loads(done.stdout)}


def test_ops_json_is_the_definition() -> None:
    ops = ops_json()
    assert set(ops) == set(ALL_TYPES)
    for op_type, op in ops.items():
        assert_defined(op, definition(op_type))


def assert_defined(op: dict[str, Any], known: Definition) -> None:
    """Names, order, required or not, types column by column, defaults."""
    names = {"bf16": 27, "fp16": 1, "float": 0, "int8": 2, "int32": 3, "int64": 9, "bool": 12}
    assert set(names.values()) <= set(TYPES.values())
    for part, tensors in (("input_desc", known.inputs), ("output_desc", known.outputs)):
        assert [tensor["name"] for tensor in op[part]] == tensors
        for tensor in op[part]:
            assert tuple(names[word] for word in tensor["type"]) == known.types[tensor["name"]]
            assert tensor["format"] == ["ND"] * known.formats[tensor["name"]]
    both = [*op["input_desc"], *op["attr"]]
    assert {entry["name"] for entry in both if entry["param_type"] == "required"} == known.required
    assert [attribute["name"] for attribute in op["attr"]] == list(known.attributes)
    for attribute in op["attr"]:
        kind, default = known.attributes[attribute["name"]]
        assert attribute["type"] == {"int": "int", "text": "string"}[kind]
        assert ("default_value" in attribute) == (attribute["param_type"] == "optional")
        assert str(attribute.get("default_value", default)) == default


def test_msopgen_route_to_the_end(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cann", msopgen=True)
    out = tmp_path / "out"
    done = build(BOTH, f"--build-dir={out}", home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "route msopgen" in done.stdout
    project = out / "project"
    assert f"package: {out}/custom_opp_test.run" in done.stdout
    called = (home / "python/site-packages/bin/called.txt").read_text()
    assert called == (
        f"gen -i {out}/ops.json -op AscendMoeDistributeDispatch -c ai_core-ascend910b,ai_core-ascend910_93 "
        f"-f pytorch -lan cpp -out {project}\n"
    )
    assert_sources_are_ours(project)
    assert not (project / "framework").exists()
    platform = home / "include/experiment/platform"
    func, intf = ((project / "cmake" / name).read_text() for name in ("func.cmake", "intf.cmake"))
    assert f"-std=c++17 -I ${{ASCEND_CANN_PACKAGE_PATH}}/include -I {platform})" in func
    assert f"(a ${{ASCEND_CANN_PACKAGE_PATH}}/include {platform})" in intf
    assert "-std=c++11" not in func + intf
    cmake = (project / "op_host/CMakeLists.txt").read_text()
    assert "${ASCEND_AUTOGEN_PATH}/aclnnInner_*.cpp ${CMAKE_CURRENT_SOURCE_DIR}/op_api/*.cpp" in cmake
    assert "${CMAKE_CURRENT_SOURCE_DIR}/op_api/aclnn_*.h" in cmake
    kernels = (project / "op_kernel/CMakeLists.txt").read_text().splitlines()
    assert kernels == ["add_ops_compile_options(ALL OPTIONS --cce-auto-sync=off)", "add_kernels_compile()"]
    assert (project / "build_out/prefix.txt").read_text() == "aclnnInner\n"
    variables = preset_of(project)
    assert variables["vendor_name"]["value"] == "ascend_moe"
    assert variables["ASCEND_COMPUTE_UNIT"]["value"] == "ascend910b;ascend910_93"
    assert variables["ASCEND_CANN_PACKAGE_PATH"]["value"] == str(home)
