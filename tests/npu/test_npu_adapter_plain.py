"""Checks what of the NPU adapter needs no torch_npu: refusals, the error record's handling, patching, the build."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ascend_moe
from ascend_moe import npu
from ascend_moe.errors import ArgumentError, LibraryError
from ascend_moe.native import library as _lib
from ascend_moe.native import torch_npu as _torch_npu
from ascend_moe.native.torch_npu import NEWER, OLDER
from ascend_moe.native.windows import deadline_s
from ascend_moe.ops import callbacks, npu_adapter, npu_adapter_build
from ascend_moe.ops.npu_adapter_build import BuildError

NAMES = npu.WINDOW_OPERATORS
OPS = tuple(name for name in NAMES if name in ascend_moe.__all__)  # those with kernels of their own
E, K, H = 4, 2, 32


def private_use(name: str, **arguments: Any) -> Any:
    """The op's kernel for NPU tensors, called with tensors of this machine."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return getattr(torch.ops.ascend_moe, name).default.redispatch(keys, **arguments)


class NpuTensor(torch.Tensor):
    """Says that it is on an NPU, and has no memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a tensor without memory")

    @staticmethod
    def like(value: Any, **changes: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = {"dtype": value.dtype, "device": "privateuseone:0"} | changes
        return torch.Tensor._make_wrapper_subclass(NpuTensor, value.shape, **made)


def call_of(name: str) -> dict[str, Any]:
    ids, rows = torch.zeros(3, K, dtype=torch.int32), torch.zeros(3, H, dtype=torch.bfloat16)
    call = {"expert_ids": ids, "group_ep": "g", "ep_world_size": 1, "ep_rank_id": 0, "moe_expert_num": E}
    if "dispatch" in name:
        return {"x": rows, **call}
    index = "assist_info_for_combine" if name.endswith("_v2") else "expand_idx"
    flat, weights = torch.zeros(6, dtype=torch.int32), torch.ones(3, K)
    return {"expand_x": rows, index: flat, "ep_send_counts": flat, "expert_scales": weights, **call}


# ---- without torch_npu


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_kernel_for_npu_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=f"^{name}: (expand_)?x is on cpu, not on npu"):
        private_use(name, **call_of(name))
    find = importlib.util.find_spec
    absent = ("torch_npu", "torch")  # as the adapter asks
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in absent else find(name, *more))
    monkeypatch.setattr(npu_adapter, "_loaded", None)
    on_npu = {key: NpuTensor.like(value) for key, value in call_of(name).items()}
    words = r"ops on an NPU need the torch_npu adapter, and \w+ is not install"
    sparse = NpuTensor.like(on_npu["expert_ids"], layout=torch.sparse_coo)
    not_dense = r"is a torch\.sparse_coo tensor, .*ids\.to_dense\(\)"
    wrong = (on_npu | {"expert_ids": sparse}, ArgumentError, not_dense)
    for given, kind, text in ((on_npu, LibraryError, words), wrong):
        with pytest.raises(RuntimeError, match=text) as caught:
            private_use(name, **given)
        with pytest.raises(kind, match=text):  # in the class that the public function raises
            raise callbacks.stored_error(caught.value)


def test_adapter_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a library of CANN is missing, the adapter is not to blame, and not to be removed."""
    adapter = tmp_path / "none.so"
    monkeypatch.setattr(npu_adapter, "_loaded", None)
    monkeypatch.setenv("ASCEND_MOE_NPU_LIBRARY", str(adapter))
    with pytest.raises(LibraryError, match=r"ASCEND_MOE_NPU_LIBRARY=.*none\.so is not a file"):
        npu_adapter.load()
    adapter.write_text("no library")
    with pytest.raises(LibraryError, match=r"none\.so cannot be loaded \(.*\): unset ASCEND_MOE_NPU_LIBRARY"):
        npu_adapter.load()

    def load(path: str) -> None:
        raise OSError("libascendcl.so: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(torch.ops, "load_library", load)
    with pytest.raises(LibraryError, match=r"libascendcl\.so is part of CANN .*set_env\.sh.*`ascend-moe vnpu -- `"):
        npu_adapter.load()


def no_cann(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """A torch_npu whose import ends in this error."""
    (folder / "torch_npu.py").write_text(f"raise ImportError({text!r})\n")
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.syspath_prepend(str(folder))


def test_torch_npu_without_cann(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "libhccl.so: cannot open shared object file: No such file or directory"
    no_cann(monkeypatch, tmp_path, text)
    fix = r"\(libhccl\.so: .*\); libhccl\.so is part of CANN .*: source CANN's set_env\.sh, or.*ascend-moe vnpu"
    with pytest.raises(LibraryError, match=f"patch_torch_npu: torch_npu cannot be imported {fix}"):
        ascend_moe.patch_torch_npu()
    with pytest.raises(LibraryError, match=f"npu_swiglu: a tensor on an NPU needs torch_npu, .* {fix}"):
        _torch_npu.call_torch_npu("npu_swiglu")
    no_cann(monkeypatch, tmp_path, "libtorch_npu.so: undefined symbol: _ZN2at4npu")
    with pytest.raises(LibraryError, match=r"undefined symbol.*; install the torch_npu that matches"):
        ascend_moe.patch_torch_npu()


def test_the_deadline_follows_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def deadlines() -> list[float]:
        return [deadline_s(first=first) for first in (False, True)]

    monkeypatch.delenv("ASCEND_MOE_TIMEOUT_S", raising=False)
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
    assert deadlines() == [300, 600]
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "200")
    assert deadlines() == [190, 190]
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "7")
    assert deadlines() == [7, 14]


# ---- the build


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders like those of torch and torch_npu."""
    torch_folder, npu_folder = tmp_path / "torch", tmp_path / "torch_npu"
    third = "include/third_party"
    for path in (
        torch_folder / "include/torch/csrc/api/include",
        torch_folder / "share/cmake/Torch",
        *(npu_folder / third / part for part in ("acl/inc", "hccl/inc", "op-plugin")),
    ):
        path.mkdir(parents=True)
    (torch_folder / "share/cmake/Torch/TorchConfig.cmake").write_text("-D_GLIBCXX_USE_CXX11_ABI=0")
    monkeypatch.setattr(npu_adapter_build, "package_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(npu_adapter_build, "versions", lambda: ("2.9.1+cpu", "2.9.1"))
    return tmp_path


def test_a_refusal_of_the_compiler_is_one_line_first(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:  # these headers are empty folders
        npu_adapter_build.build(_lib.native_source_root(), tmp_path / "out.so")
    first = str(caught.value).splitlines()[0]
    assert first.startswith("compiling the torch_npu adapter against torch 2.9.1+cpu and torch_npu 2.9.1 failed: ")
    assert "error: " in first and not (tmp_path / "out.so").exists()


def test_missing_pieces_are_named(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _lib.native_source_root()
    (wheels / "torch_npu/include/third_party/acl/inc").rmdir()
    with pytest.raises(BuildError, match="acl/inc is missing: install torch and torch_npu again"):
        npu_adapter_build.command(root, Path("out"))
    (wheels / "torch_npu/include/third_party/acl/inc").mkdir()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(no-such-compiler\): install g\+\+ 11"):
        npu_adapter_build.command(root, Path("out"))
    with pytest.raises(BuildError, match="no sources in"):
        npu_adapter_build.sources(wheels)


def test_packaged_adapter_is_taken_only_for_these_versions(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "package"
    library = package / "lib" / npu_adapter_build.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_text("built")
    key = npu_adapter_build.key(_lib.native_source_root())
    assert key.startswith("torch-2.9.1+cpu-torch_npu-2.9.1")
    own = _lib._package_paths()
    monkeypatch.setattr(_lib, "_package_paths", lambda: [*own, package])
    monkeypatch.setenv("ASCEND_MOE_CACHE", str(tmp_path / "cache"))
    beside = library.with_name(library.name + npu_adapter_build.KEY_SUFFIX)
    beside.write_text(key + "\n")
    assert npu_adapter.library_path() == library and not caplog.messages
    beside.write_text("torch-1\n")
    built: list[Path] = []

    def build(root: Path, target: Path) -> None:
        built.append(target)
        target.write_text("")

    monkeypatch.setattr(npu_adapter_build, "build", build)
    monkeypatch.setattr(npu_adapter_build, "command", lambda root, target: [])
    first, second = npu_adapter.library_path(), npu_adapter.library_path()
    assert first == second == tmp_path / "cache/npu" / key / npu_adapter_build.LIBRARY
    assert len(built) == 1  # then it comes from the cache
    begins, ends = caplog.messages
    assert begins.startswith(f"ascend_moe: building the torch_npu adapter into {first.parent} (once per version")
    assert ends.startswith("ascend_moe: built the torch_npu adapter in ")
    monkeypatch.setattr(npu_adapter_build, "versions", lambda: ("2.9.1+cpu", "2.9.1.post1"))
    assert npu_adapter.library_path() not in (first, library) and len(built) == 2


def test_build_script_stands_alone() -> None:
    """CMake runs it before anything is installed: one line and an exit code, whatever is missing."""
    path = _lib.native_source_root() / "ascend_moe" / "npu_adapter_build.py"
    if not path.is_file():  # a wheel keeps Python apart from native sources
        path = Path(npu_adapter_build.__file__)
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(path), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("ascend_moe: torch is not installed for") and done.stderr.count("\n") == 1


# ---- an older torch_npu


def test_the_page_lists_the_operators_that_differ() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vnpu.md").read_text()
    named = re.findall(r"^\| (npu_\w+) \|", page.partition("## Differences of torch_npu ")[2], re.MULTILINE)
    assert set(named) == {*OLDER.lacks, *OLDER.defaults, *OLDER.refuses, *OLDER.shapes}


def test_calls_are_fitted_to_the_torch_npu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn calls: an argument that it lacks goes where it has its default, and is named where it has another."""
    rng = random.Random(7)
    newer = {"npu_moe_finalize_routing": [1, 2, 7, 0, -1], "npu_moe_gating_top_k": [torch.ones(2), 3, 0]}
    for operators in (NEWER, OLDER):
        monkeypatch.setattr(_torch_npu, "operators", lambda operators=operators: operators)
        for name, values in newer.items():
            for _ in range(40):
                lacked = {argument: rng.choice([None, *values]) for argument in OLDER.lacks[name]}
                given = dict(rng.sample([*lacked.items(), ("bias", 5), ("scales", None)], rng.randint(1, 3)))
                wrong = [
                    argument
                    for argument, default in operators.lacks.get(name, {}).items()
                    if given.get(argument) is not None and given[argument] is not default
                ]
                if wrong:
                    with pytest.raises(ArgumentError, match=f"({'|'.join(wrong)}) is not supported by {name} of"):
                        _torch_npu.fitted(name, given)
                else:
                    kept = {k: v for k, v in given.items() if k not in operators.lacks.get(name, {})}
                    assert _torch_npu.fitted(name, given) == kept
