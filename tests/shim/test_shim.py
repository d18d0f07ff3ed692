"""The shim of torch_npu is installed and undone whole; devices, operators and streams behave as torch_npu's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from routed_tokens import codes, randn
from torch.distributed import distributed_c10d

from ascend_moe import npu
from ascend_moe.errors import ArgumentError, LibraryError
from ascend_moe.interop import cann_ops_transformer
from ascend_moe.shim import torch_npu as shim

BF16, INT32 = torch.bfloat16, torch.int32
H, F = 32, 16


@pytest.fixture
def torch_npu() -> Iterator[Any]:
    shim.install(quiet=True)
    try:
        yield __import__("torch_npu")
    finally:
        shim.uninstall()


def namespaces() -> dict[Any, dict[str, Any]]:
    """Returns what install changes, and the modules that there are."""
    owners = (torch, torch.amp, torch.random, torch.UntypedStorage, torch.Tensor, torch.nn.Module, torch._C._nn)
    classes = (torch._C._distributed_c10d.Backend, distributed_c10d.Backend)
    tables = {owner: dict(vars(owner)) for owner in (*owners, dist, distributed_c10d, *classes)}
    return {**tables, "modules": {name: sys.modules[name] for name in sys.modules if re.match("torch|cann_ops", name)}}


def test_uninstall_undoes_everything(caplog: pytest.LogCaptureFixture) -> None:
    torch.utils._device._device_constructors()
    before = namespaces()
    assert not shim.is_installed()
    shim.install()
    shim.install()
    assert shim.is_installed() and namespaces() != before
    shim.uninstall()
    shim.uninstall()
    after = namespaces()
    for owner, table in before.items():
        assert {name for name in {*table, *after[owner]} if table.get(name) is not after[owner].get(name)} == set()
    warnings = [record for record in caplog.records if "a shim of torch_npu by ascend_moe" in record.getMessage()]
    assert [record.levelname for record in warnings] == ["WARNING"]
    with pytest.raises(RuntimeError, match="npu"):
        torch.device("npu")


def test_refused_beside_torch_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LibraryError, match=r"torch_npu is installed.*patch_torch_npu.*ascend-moe vnpu"):
        shim.install()
    assert not hasattr(torch, "npu")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))  # somebody's stub, which has no spec
    with pytest.raises(LibraryError, match=r"torch_npu is installed"):
        shim.install()


def test_npu_means_cpu(torch_npu: Any) -> None:
    assert "shim" in repr(torch_npu) and torch_npu.__version__.endswith("shim")
    assert torch_npu.npu is torch.npu and torch_npu.npu_swiglu is npu.npu_swiglu
    assert not hasattr(torch_npu, "npu_no_such_operator")
    torch.npu.set_device("npu:3")
    assert torch.npu.current_device() == 3 and torch.npu.is_available()
    torch.npu.set_device(0)
    cpu = torch.device("cpu")
    devices = [torch.device("npu"), torch.device("npu:1"), torch.device("npu", 2), torch.device(type="npu", index=0)]
    assert devices == [cpu] * 4 and isinstance(cpu, torch.device) and not isinstance("cpu", torch.device)
    assert torch.device("meta").type == "meta" and torch.device("cpu", 0).index == 0
    made = [
        *(torch.zeros(2, device=device) for device in ("npu", "npu:1", torch.npu.current_device(), devices[0])),
        *(torch.ones(2).to(device) for device in ("npu", 0, devices[0])),
        *(torch.ones(2).npu(), torch.ones(2).to(device="npu", dtype=BF16), torch.ones(2).new_empty(3, device="npu")),
        *(torch.nn.Linear(2, 2, device="npu").weight, torch.nn.Linear(2, 2).to("npu:0").npu().weight),
    ]
    assert {tensor.device for tensor in made} == {cpu} and made[0].is_npu
    with torch.device("meta"):
        assert torch.empty(1).is_meta
    assert torch.randn(2, device="npu", generator=torch.Generator(device="npu").manual_seed(1)).device == cpu
    counts = torch.histc(torch.tensor([0, 2, 2, 3, -1], dtype=INT32), bins=4, min=0, max=4)
    assert counts.dtype == INT32 and counts.tolist() == [1, 0, 2, 1]
    assert torch.histc(torch.tensor([0.0, 1.0]), 2).dtype == torch.float32


def test_autocast_and_generators_of_npus_are_the_cpus(torch_npu: Any, tmp_path: Path) -> None:
    ways = [lambda: torch.autocast("npu", dtype=torch.bfloat16), lambda: torch.amp.autocast(device_type="npu")]
    x = torch.randn(4, 4, device="npu")
    for dtype, way in zip((BF16, BF16, torch.float16), (*ways, torch_npu.npu.amp.autocast), strict=True):
        with way():
            assert (x @ x).dtype == dtype == torch.get_autocast_dtype("npu") and torch.is_autocast_enabled("npu")
    assert torch.amp.GradScaler("npu").state_dict() == torch.npu.amp.GradScaler().state_dict()
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.save(x, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location=lambda storage, _: storage.npu()), x)


def test_operators_of_torch_ops(torch_npu: Any) -> None:
    x, ids = randn(3, 8).requires_grad_(), torch.tensor([[1, 0], [2, 1], [0, 2]], dtype=INT32)
    assert torch.equal(torch.ops.npu.npu_swiglu(x), npu.npu_swiglu(x))
    torch.ops.npu.npu_swiglu(x).sum().backward()
    assert x.grad is not None
    rows, places = torch.ops.npu.npu_moe_token_permute(x, ids)
    back = torch_npu.npu_moe_token_unpermute(rows, places, probs=torch.full((3, 2), 0.5), restore_shape=x.shape)
    torch.testing.assert_close(back, x)
    assert torch.ops.npu.npu_format_cast(x, 29) is not None
    a, b, one = torch.ones(2, 4, dtype=torch.int8), torch.ones(4, 3, dtype=torch.int8), torch.ones(1)
    assert torch.ops.npu.npu_quant_matmul(a, b, one, output_dtype=torch.bfloat16).tolist() == [[4.0] * 3] * 2
    shim.uninstall()
    assert not hasattr(torch.ops.npu, "npu_swiglu") and not hasattr(torch.ops.npu, "npu_grouped_matmul")
    shim.install(quiet=True)
    assert torch.equal(torch.ops.npu.npu_swiglu(x), npu.npu_swiglu(x))


def test_what_a_with_block_sets_is_restored_if_it_raises(torch_npu: Any) -> None:
    with pytest.raises(ZeroDivisionError), torch.npu.device(3), torch.npu.stream(torch.npu.Stream()):
        assert torch.npu.current_device() == 3 and torch.npu.current_stream() is not torch.npu.default_stream()
        raise ZeroDivisionError
    assert torch.npu.current_device() == 0 and torch.npu.current_stream() is torch.npu.default_stream()


def test_streams_and_events_have_nothing_to_wait_for(torch_npu: Any) -> None:
    from torch_npu.npu.streams import Event

    assert Event is torch.npu.Event
    first = torch.npu.current_stream().record_event()
    with torch_npu.npu.stream(torch.npu.Stream(device=torch.npu.current_device())):
        assert torch.npu.current_stream() is not torch.npu.default_stream()
        first.wait()
        last = torch.npu.Event(enable_timing=True)
        last.record()
    torch.npu.current_stream().wait_event(last)
    torch.npu.synchronize()
    assert first.query() and first.elapsed_time(last) >= 0
    assert torch.npu.current_stream() is torch.npu.default_stream()


def test_copies_to_an_npu_are_plain_memory(torch_npu: Any, tmp_path: Path) -> None:
    pinned = torch.ones(2, pin_memory=True, device="npu").pin_memory()
    pinned.record_stream(torch.npu.current_stream())
    torch.save(pinned, tmp_path / "saved")
    for place in ("npu:0", {"cpu": "npu:1"}, torch.device("npu")):
        assert torch.equal(torch.load(tmp_path / "saved", place), pinned)
        assert torch.equal(torch.load(tmp_path / "saved", map_location=place), pinned)
    state = torch.npu.get_rng_state()
    drawn = torch.normal(0.0, 1.0, (3,), device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(drawn, torch.normal(0.0, 1.0, (3,)))


def test_compile_with_it_and_after_it() -> None:
    """torch.compile's tables of functions are built at its first use, here while the shim is there."""
    script = """
import torch
from ascend_moe.shim import torch_npu as shim
def double(x, device):
    return 2 * x + torch.zeros(2, device=device)
shim.install(quiet=True)
compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
assert compiled(torch.ones(2), "npu").tolist() == [2, 2]
shim.uninstall()
torch._dynamo.reset()
assert compiled(torch.ones(2), "cpu").tolist() == [2, 2]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_w4a16_as_vllm_ascend_packs_and_multiplies_it(torch_npu: Any) -> None:
    """Its w4a16.py: int32 numbers (E * K, N) packed by eight, scales and zero offsets by group of K, bf16 rows."""
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(-8, 8, (2 * H, F), generator=generator).int()
    packed = torch_npu.npu_convert_weight_to_int4pack(numbers).view(2, H, -1)
    assert packed.dtype == INT32 and packed.shape == (2, H, F // 8)
    scale = 0.5 ** torch.randint(1, 4, (2, 4, F), generator=generator).to(BF16)
    x, counts = torch.randint(-3, 4, (5, H), generator=generator).to(BF16), torch.tensor([2, 3])
    (y,) = torch_npu.npu_grouped_matmul(
        x=[x], weight=[packed], antiquant_scale=[scale], antiquant_offset=[torch.zeros_like(scale)], split_item=2,
        group_list_type=1, group_type=0, group_list=counts, output_dtype=BF16,
    )  # fmt: skip
    dense = numbers.view(2, H, F).double() * scale.double().repeat_interleave(H // 4, 1)
    expected = torch.cat([x[:2].double() @ dense[0], x[2:].double() @ dense[1]])
    assert torch.equal(y, expected.to(BF16))
    for wrong, text in ((numbers.long(), "weight is torch.int64"), (numbers + 1, "weight must be -8")):
        with pytest.raises(ArgumentError, match=text):
            torch_npu.npu_convert_weight_to_int4pack(wrong)


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_quant_matmul_follows_its_formula(torch_npu: Any, lead: tuple[int, ...]) -> None:
    x, weight, scale = codes(*lead, H), codes(H, F, seed=1), randn(F).abs() / 100
    rows, bias = randn(x[..., 0].numel()).abs(), torch.arange(F, dtype=INT32)
    sums = torch_npu.npu_quant_matmul(x, weight, scale, output_dtype=INT32)
    assert torch.equal(sums, x.int() @ weight.int())
    y = torch_npu.npu_quant_matmul(x, weight, scale, pertoken_scale=rows, bias=bias, output_dtype=BF16)
    expected = ((x.int() @ weight.int() + bias).float() * scale * rows.view(*lead, 1)).to(BF16)
    assert torch.equal(y, expected)
    carried = scale.view(INT32).long()  # fp32 bits in int64
    assert torch.equal(
        y, torch_npu.npu_quant_matmul(x, weight, carried, pertoken_scale=rows, bias=bias, output_dtype=BF16)
    )
    assert torch_npu.npu_format_cast(weight, 29) is weight
    with pytest.raises(ArgumentError, match=r"output_dtype is None"):
        torch_npu.npu_quant_matmul(x, weight, scale)
    for wrong in ({"scale": scale[:3]}, {"pertoken_scale": scale}, {"bias": scale.double()}, {"x2": weight[:5]}):
        given = {"x1": x, "x2": weight, "scale": scale, "output_dtype": BF16, **wrong}
        with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))} is"):
            torch_npu.npu_quant_matmul(**given)


def test_attention_has_a_name_and_is_refused(torch_npu: Any) -> None:
    """transformers imports the name where torch_npu is."""
    with pytest.raises(ArgumentError, match=r"^npu_fusion_attention: the shim .* use torch's"):
        torch_npu.npu_fusion_attention(torch.ones(1), torch.ones(1), torch.ones(1), 1, "BSH")


def test_uninstall_leaves_cann_ops_transformer(torch_npu: Any) -> None:
    shim.uninstall()
    cann_ops_transformer.install()
    shim.install(quiet=True)
    shim.uninstall()
    assert "cann_ops_transformer" in sys.modules
    cann_ops_transformer.uninstall()


# ---- torch_npu.profiler writes torch_npu's files, with events of the CPU


def read_events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    assert all({"name", "ts", "dur"} <= event.keys() for event in events)
    return events


@pytest.mark.filterwarnings("ignore:Profiler")
def test_profiler_of_scheduled_steps(torch_npu: Any, tmp_path: Path) -> None:
    """As sgl-kernel-npu measures: every other step, two exports of each, a list whose events have ts and dur."""
    from torch_npu.profiler import ProfilerActivity, profile, schedule, supported_activities

    x, written = randn(2, 8), []

    def export(recorded: Any) -> None:
        for name in ("first", "second"):
            recorded.export_chrome_trace(tmp_path / name)
            names = [event["name"] for event in read_events(tmp_path / name)]
            written.append((names.count("npu::npu_swiglu"), *(f"ProfilerStep#{step}" in names for step in (1, 3))))

    steps = schedule(wait=1, active=1, repeat=2)
    with profile(activities=[ProfilerActivity.NPU], schedule=steps, on_trace_ready=export) as recorded:
        for times in (1, 3, 1, 5):
            for _ in range(times):
                torch.ops.npu.npu_swiglu(x)
            recorded.step()
    export(recorded)
    assert written == [(3, True, False)] * 2 + [(5, False, True)] * 4
    assert supported_activities() == {ProfilerActivity.CPU} and ProfilerActivity.NPU in supported_activities()
