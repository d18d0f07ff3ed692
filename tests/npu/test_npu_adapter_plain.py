"""What of the NPU adapter needs no torch_npu: refusals, the error record's handling, patching, the build."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_errors_text import record_of

import ascend_moe
from ascend_moe import _torch_npu, comm, npu
from ascend_moe import npu as ours
from ascend_moe.errors import (
    ArgumentError,
    AscendMoeError,
    CommTimeout,
    InvalidExpertId,
    LibraryError,
)
from ascend_moe.native import library as _lib
from ascend_moe.ops import answers, npu_adapter, npu_adapter_build, npu_communicator
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


def refused(name: str, arguments: dict[str, Any], kind: type[Exception], words: str) -> Any:
    """The error of the op's kernel for NPU tensors, in the class that the public function raises."""
    with pytest.raises(RuntimeError, match=words) as caught:
        private_use(name, **arguments)
    with pytest.raises(kind, match=words) as typed:
        answers.raise_kept(caught.value)
    return typed.value


def call_of(name: str) -> dict[str, Any]:
    ids, rows = torch.zeros(3, K, dtype=torch.int32), torch.zeros(3, H, dtype=torch.bfloat16)
    place = {"group_ep": "g", "ep_world_size": 1, "ep_rank_id": 0, "moe_expert_num": E}
    if "dispatch" in name:
        return {"x": rows, "expert_ids": ids, **place}
    index = "assist_info_for_combine" if name.endswith("_v2") else "expand_idx"
    flat = torch.zeros(6, dtype=torch.int32)
    weights = torch.ones(3, K)
    return {
        "expand_x": rows,
        "expert_ids": ids,
        index: flat,
        "ep_send_counts": flat,
        "expert_scales": weights,
        **place,
    }


# ---- without torch_npu


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_kernel_for_npu_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=f"^{name}: (expand_)?x is on cpu, not on npu"):
        private_use(name, **call_of(name))
    monkeypatch.setattr(npu_adapter_build.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(npu_adapter, "_loaded", None)
    on_npu = {key: NpuTensor.like(value) for key, value in call_of(name).items()}
    refused(name, on_npu, LibraryError, r"ops on an NPU need the torch_npu adapter, and \w+ is not install")


def test_mixed_devices_and_layouts() -> None:
    """Which tensor is elsewhere, and what to pass."""
    name = OPS[0]
    given = call_of(name)
    x, ids = (NpuTensor.like(given[key]) for key in ("x", "expert_ids"))
    one = "they must be on one device"
    words = rf"{name}: expert_ids is on cpu, x on npu:0: {one}, pass expert_ids\.to\('npu:0'\)"
    assert refused(name, given | {"x": x}, ArgumentError, words).argument == "expert_ids"
    words = rf"{name}: x is on cpu, expert_ids on npu:0: {one}, pass x\.to\('npu:0'\)"
    assert refused(name, given | {"expert_ids": ids}, ArgumentError, words).argument == "x"
    sparse = NpuTensor.like(given["x"], layout=torch.sparse_coo)
    words = rf"{name}: x is a torch\.sparse_coo tensor, .*x\.to_dense\(\)"
    assert refused(name, given | {"x": sparse, "expert_ids": ids}, ArgumentError, words).argument == "x"


def test_adapter_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a library of CANN is missing, the adapter is not to blame, and not to be removed."""
    adapter = tmp_path / "none.so"
    monkeypatch.setattr(npu_adapter, "_loaded", None)
    monkeypatch.setenv("ASCEND_MOE_NPU_LIBRARY", str(adapter))
    with pytest.raises(LibraryError, match=r"ASCEND_MOE_NPU_LIBRARY=.*none\.so is not a file"):
        npu_adapter.load()
    adapter.write_text("no library")
    with pytest.raises(LibraryError, match=r"none\.so cannot be loaded \(.*\): remove it"):
        npu_adapter.load()

    def load(path: str) -> None:
        raise OSError("libascendcl.so: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(torch.ops, "load_library", load)
    with pytest.raises(LibraryError, match=r"libascendcl\.so is CANN's .*set_env\.sh.*`ascend-moe vnpu -- `"):
        npu_adapter.load()


def no_cann(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """A torch_npu whose import ends in this error."""
    (folder / "torch_npu.py").write_text(f"raise ImportError({text!r})\n")
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.syspath_prepend(str(folder))


def test_torch_npu_without_cann(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "libhccl.so: cannot open shared object file: No such file or directory"
    no_cann(monkeypatch, tmp_path, text)
    fix = r"\(libhccl\.so: .*\); libhccl\.so is CANN's .*: source CANN's set_env\.sh, or.*ascend-moe vnpu"
    with pytest.raises(LibraryError, match=f"patch_torch_npu: torch_npu cannot be imported {fix}"):
        ascend_moe.patch_torch_npu()
    with pytest.raises(LibraryError, match=f"npu_swiglu: a tensor on an NPU needs torch_npu, .* {fix}"):
        _torch_npu.call_torch_npu("npu_swiglu")
    no_cann(monkeypatch, tmp_path, "libtorch_npu.so: undefined symbol: _ZN2at4npu")
    with pytest.raises(LibraryError, match=r"undefined symbol.*; install the torch_npu that matches"):
        ascend_moe.patch_torch_npu()


def test_check_without_npu_does_nothing() -> None:
    ascend_moe.check()
    ascend_moe.check("nobody")


# ---- patch_torch_npu


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("torch_npu")
    for name in NAMES[:3]:
        setattr(module, name, f"torch_npu's {name}")
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


def originals(module: types.ModuleType) -> bool:
    kept = all(getattr(module, name) == f"torch_npu's {name}" for name in NAMES[:3])
    return kept and not any(hasattr(module, name) for name in NAMES[3:])


def swapped(module: types.ModuleType) -> bool:
    return all(getattr(module, name) is getattr(ours, name) for name in NAMES)


def test_patch_and_undo(torch_npu: types.ModuleType) -> None:
    """A second patch swaps nothing; the end of a block undoes, and leaves what others have put there."""
    patch = ascend_moe.patch_torch_npu()
    assert swapped(torch_npu)
    for _ in range(2):
        patch.undo()
        assert originals(torch_npu)
    with pytest.raises(ZeroDivisionError), ascend_moe.patch_torch_npu():
        with ascend_moe.patch_torch_npu():
            assert swapped(torch_npu)
        assert swapped(torch_npu)
        raise ZeroDivisionError
    assert originals(torch_npu)
    with ascend_moe.patch_torch_npu():
        torch_npu.npu_moe_distribute_combine = "another's"  # type: ignore[attr-defined]
    assert torch_npu.npu_moe_distribute_combine == "another's"
    assert torch_npu.npu_moe_distribute_dispatch == "torch_npu's npu_moe_distribute_dispatch"


# ---- communicators


class Group:
    """A process group of HCCL, as far as a communicator looks at it."""

    def __init__(self, world: int = 2, rank: int = 1, buffer: int = 0) -> None:
        self._world, self._rank = world, rank
        self.options = SimpleNamespace(hccl_config={"hccl_buffer_size": buffer} if buffer else {})

    def size(self) -> int:
        return self._world

    def rank(self) -> int:
        return self._rank

    def _get_backend(self, device: Any) -> Any:
        return self


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """torch.npu with CPU memory; counts how often anybody waits for the device."""
    fake = SimpleNamespace(soc="Ascend910_9391", capture=False, waits=0)

    def synchronize(device: Any) -> None:
        fake.waits += 1

    module = SimpleNamespace(
        get_device_name=lambda _: fake.soc,
        is_current_stream_capturing=lambda: fake.capture,
        synchronize=synchronize,
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(torch, "device", lambda kind: kind)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(npu_communicator, "_ends", {})
    yield fake


def end_of(name: str = "hccl", **group: int) -> npu_communicator.NpuCommunicator:
    made = Group(**group)
    end = npu_communicator.NpuCommunicator(name, made, "cpu")  # type: ignore[arg-type]
    npu_communicator._ends[name] = end
    return end


def finds(end: npu_communicator.NpuCommunicator, code: int, **words: int) -> None:
    """A kernel's finding, and the copy behind its launch."""
    end.record.copy_(torch.tensor(record_of(code, **words), dtype=torch.int32))
    end._host.copy_(end.record)


@pytest.mark.parametrize(
    "soc, buffer, kind, data_mib, share",
    [
        ("Ascend910_9391", 0, 1, 300, 0),
        ("Ascend910_9382", 64, 1, 64, 0),
        ("Ascend910B3", 0, 2, 299, 8),
        ("Ascend910B1", 64, 2, 63, 8),
    ],
)
def test_place(
    npu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    soc: str,
    buffer: int,
    kind: int,
    data_mib: int,
    share: int,
) -> None:
    """The group's own window size goes before the variable; A2 keeps its state area in it."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "300")
    npu.soc = soc
    end = end_of(buffer=buffer)
    assert (end.context_kind, end.ranks_per_server) == (kind, share)
    assert end.data_bytes == data_mib << 20 and end.buffer_mib == (buffer or 300)
    assert (end.rank, end.world) == (1, 2)


def test_other_socs_are_refused(npu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    npu.soc = "Ascend310P3"
    with pytest.raises(ArgumentError, match=r"tensors are on a Ascend310P3: .* run on Ascend910B \(A2\)"):
        end_of()
    npu.soc = "Ascend910B3"
    with pytest.raises(ArgumentError, match=r'_config\["hccl_buffer_size"\]=1 must be more than 1 MiB on an'):
        end_of(buffer=1)
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    with pytest.raises(ArgumentError, match="HCCL_BUFFSIZE=1 must be more than 1 MiB on an A2"):
        end_of()


def test_a_finding_is_raised_once(npu: SimpleNamespace) -> None:
    end = end_of()
    end.look()
    finds(end, 1, w5=0, w6=(3 << 8) | 1, w7=99, w12=8)
    assert npu.waits == 0  # nothing before it waited
    with pytest.raises(InvalidExpertId, match="expert id 99") as caught:
        end.look()
    assert (caught.value.rank, caught.value.token, caught.value.k) == (0, 3, 1)
    assert npu.waits == 1 and not end.record.any()
    end.look()
    end._host.copy_(end.record)
    end.look()
    assert end.failed is None


@pytest.mark.parametrize("asked", [True, False])
def test_a_group_that_has_failed_stays_failed(
    npu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """After close too, and even if nobody had asked: HCCL's windows hold the aborts. A new group works."""
    group, fresh = Group(), Group()
    monkeypatch.setattr(comm, "hccl_group", lambda *_: group)
    end = npu_communicator.find("hccl", 2, 1, "cpu")  # type: ignore[arg-type]
    finds(end, 17, w5=0, w9=1)
    anew = "this group has failed for good: destroy its process group and make a new one"
    if asked:
        for look in (end.look, end.look, ascend_moe.check):
            with pytest.raises(CommTimeout, match=f"rank 0 did not arrive .* - {anew}") as caught:
                look()
            assert "[rank 0" not in str(caught.value)  # nothing can be seen of its process
    comm.close("hccl")
    assert npu_communicator._ends == {}
    with pytest.raises(CommTimeout, match=f"rank 0 did not arrive .* - {anew}") as caught:
        npu_communicator.find("hccl", 2, 1, "cpu")  # type: ignore[arg-type]
    ascend_moe.check()  # that call has opened nothing
    assert caught.value.rank == 0 and str(caught.value).count(anew) == 1
    monkeypatch.setattr(comm, "hccl_group", lambda *_: fresh)
    npu_communicator.find("hccl", 2, 1, "cpu").look()  # type: ignore[arg-type]


def test_check_waits_and_looks_at_every_communicator(npu: SimpleNamespace) -> None:
    calm, other = end_of("calm"), end_of("other")
    ascend_moe.check()
    assert npu.waits == 2
    # The copy to the host is still to come: check reads the device.
    other.record.copy_(torch.tensor(record_of(1, w5=1, w7=9, w12=4), dtype=torch.int32))
    calm.look()
    ascend_moe.check("calm")
    with pytest.raises(InvalidExpertId):
        ascend_moe.check()


def test_first_op_of_a_capture(npu: SimpleNamespace) -> None:
    npu.capture = True
    with pytest.raises(AscendMoeError, match="run every op once before the capture"):
        end_of()
    npu.capture = False
    end = end_of()
    npu.capture = True
    finds(end, 1, w5=0, w7=9, w12=4)
    with pytest.raises(InvalidExpertId):
        end.look()
    assert npu.waits == 0 and end.record.any()  # a captured stream cannot be waited for, nor cleared


def test_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_MOE_TIMEOUT_S", "HCCL_EXEC_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert npu_communicator.deadline_s(first=False) == 300
    assert npu_communicator.deadline_s(first=True) == 600
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "200")
    assert npu_communicator.deadline_s(first=False) == npu_communicator.deadline_s(first=True) == 190
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "7")
    assert npu_communicator.deadline_s(first=False) == 7
    assert npu_communicator.deadline_s(first=True) == 14


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


def test_key_names_versions_and_sources(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = wheels / "tree"
    for path in ("csrc/npu/a.cpp", "csrc/npu/a.h", *npu_adapter_build._ARGUMENTS):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("")
    keys = [npu_adapter_build.key(root)]
    (root / "csrc/npu/a.h").write_text("extern int a;")
    keys.append(npu_adapter_build.key(root))
    monkeypatch.setattr(npu_adapter_build, "versions", lambda: ("2.9.1+cpu", "2.9.1.post1"))
    keys.append(npu_adapter_build.key(root))
    assert len(set(keys)) == 3
    assert all(key.startswith("torch-2.9.1+cpu-torch_npu-2.9.1") for key in keys)


def test_a_refusal_of_the_compiler_is_one_line_first(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:  # these headers are empty folders
        npu_adapter_build.build(_lib.native_source_root(), tmp_path / "out.so")
    first = str(caught.value).splitlines()[0]
    assert first.startswith(
        "the torch_npu adapter does not compile against torch 2.9.1+cpu and torch_npu 2.9.1: "
    )
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
    wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    library = package / "lib" / npu_adapter_build.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_text("built")
    key = npu_adapter_build.key(_lib.native_source_root())
    own = _lib._package_paths()
    monkeypatch.setattr(_lib, "_package_paths", lambda: [*own, package])
    monkeypatch.setenv("ASCEND_MOE_CACHE", str(tmp_path / "cache"))
    beside = library.with_name(library.name + npu_adapter_build.KEY_SUFFIX)
    beside.write_text(key + "\n")
    assert npu_adapter.library_path() == library
    beside.write_text("torch-1\n")
    built: list[Path] = []

    def build(root: Path, target: Path) -> None:
        built.append(target)
        target.write_text("")

    monkeypatch.setattr(npu_adapter_build, "build", build)
    first, second = npu_adapter.library_path(), npu_adapter.library_path()
    assert first == second == tmp_path / "cache/npu" / key / npu_adapter_build.LIBRARY
    assert len(built) == 1  # then it comes from the cache


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
