"""What one rank does on the (virtual) NPU for test_npu_adapter.py: named cases, results as JSON by rank.

torchrun --nproc-per-node 2 npu_ranks.py FOLDER CASE...
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bad_arguments
import torch
import torch.distributed as dist
import torch_npu
from bad_call import BS, OPS, E, H, K

import ascend_moe
from ascend_moe import comm, npu, reference
from ascend_moe.errors import AscendMoeError, CommError
from ascend_moe.native import binding
from ascend_moe.ops import calls, npu_adapter, npu_communicator

OP = {op: getattr(ascend_moe, f"npu_moe_distribute_{op}") for op in OPS}
CASES: dict[str, Callable[[Ranks], Any]] = {}


def case(function: Callable[[Ranks], Any]) -> Callable[[Ranks], Any]:
    CASES[function.__name__] = function
    return function


def on_npu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return value
    return value.npu() if value.numel() < 1 << 20 else value  # some are views of almost nothing


def said(error: BaseException | None) -> dict[str, Any] | None:
    """What two backends must agree on."""
    if error is None:
        return None
    details = {k: str(v) for k, v in getattr(error, "details", {}).items()}
    return {"type": type(error).__name__, "text": str(error), "details": details}


def outcome(function: Callable[[], Any]) -> BaseException | None:
    try:
        function()
    except Exception as error:
        return error
    return None


class Ranks:
    """This rank, with a group of HCCL and one of gloo."""

    def __init__(self) -> None:
        torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("hccl")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.gloo = dist.new_group(backend="gloo")
        self.hccl = self.new_group()

    def new_group(self) -> str:
        """A fresh communicator of its own windows."""
        self.group = dist.new_group(list(range(self.world)))
        return ascend_moe.comm_name(self.group)

    def meet(self) -> None:
        torch.npu.synchronize()
        dist.barrier(self.gloo)

    def place(self, name: str) -> dict[str, Any]:
        return {
            "group_ep": name,
            "ep_world_size": self.world,
            "ep_rank_id": self.rank,
            "moe_expert_num": E,
        }

    def valid(self, name: str, move: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
        """Legal arguments of the four ops, made by running them."""
        g = torch.Generator().manual_seed(self.rank)
        ids = move((5 * torch.arange(BS * K) % E).to(torch.int32).view(BS, K))
        x = move(torch.randn(BS, H, generator=g).bfloat16())
        weights = move(torch.rand(BS, K, generator=g))
        made: dict[str, dict[str, Any]] = {}
        for op, index in [("dispatch", "expand_idx"), ("dispatch_v2", "assist_info_for_combine")]:
            made[op] = {"x": x, "expert_ids": ids, **self.place(name)}
            out = OP[op](**made[op])
            back = {"expand_x": out[0], "expert_ids": ids, index: out[2], "ep_send_counts": out[4]}
            made[op.replace("dispatch", "combine")] = {**back, "expert_scales": weights, **self.place(name)}
            OP[op.replace("dispatch", "combine")](**made[op.replace("dispatch", "combine")])
        return made


@case
def bad_calls(ranks: Ranks) -> Any:
    """Every local mistake of the tables on both backends: pairs that differ, and how many agreed."""
    gloo = ascend_moe.comm_name(ranks.gloo)
    cpu = ranks.valid(gloo, lambda value: value)
    ranks.valid(ranks.hccl, on_npu)
    ascend_moe.check()
    agreed, differ = 0, []
    for bad in bad_arguments.table(ranks.world):
        if bad.raised_by != "each" or issubclass(bad.error, CommError):
            continue
        on_cpu = bad.apply(cpu[bad.op], last=False)
        there = {name: on_npu(value) for name, value in on_cpu.items()}
        tensors = [value for value in there.values() if isinstance(value, torch.Tensor)]
        if any(value.device.type != "npu" for value in tensors) or on_cpu["group_ep"] != gloo:
            continue  # about devices and names, which differ
        there["group_ep"] = ranks.hccl
        first, second = outcome(partial(OP[bad.op], **on_cpu)), outcome(partial(OP[bad.op], **there))
        want, got = said(first), said(second)
        if got is not None and want is not None:
            got["text"] = got["text"].replace(ranks.hccl, gloo).replace(f"npu:{ranks.rank}", "cpu")
        if got == want and want is not None:
            agreed += 1
        else:
            differ.append([f"{bad.op}: {bad.label}", want, got])
    out = outcome(lambda: ranks.valid(ranks.hccl, on_npu))  # and none did harm
    ranks.meet()
    ascend_moe.close(gloo)
    return {"agreed": agreed, "differ": differ, "afterwards": said(out)}


@case
def collective_errors(ranks: Ranks) -> Any:
    """An expert id out of range: told by the next op, by check, and forgotten after."""
    valid = ranks.valid(ranks.hccl, on_npu)["dispatch"]
    wrong = valid["expert_ids"].clone()
    if ranks.rank == ranks.world - 1:
        wrong[1, 1] = E + 3
    spoiled = {**valid, "expert_ids": wrong}
    gloo = ascend_moe.comm_name(ranks.gloo)
    cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in spoiled.items()} | {"group_ep": gloo}
    found: dict[str, Any] = {"cpu": said(outcome(lambda: OP["dispatch"](**cpu)))}
    found["launch"] = said(outcome(lambda: OP["dispatch"](**spoiled)))
    torch.npu.synchronize()
    found["next"] = said(outcome(lambda: OP["dispatch"](**valid)))  # raises before it launches
    found["again"] = said(outcome(lambda: OP["dispatch"](**valid)))
    found["check after"] = said(outcome(ascend_moe.check))
    OP["dispatch"](**spoiled)
    found["check"] = said(outcome(lambda: ascend_moe.check(ranks.hccl)))
    found["check twice"] = said(outcome(ascend_moe.check))
    found["works"] = said(outcome(lambda: ranks.valid(ranks.hccl, on_npu)))
    ranks.meet()
    ascend_moe.close(gloo)
    return found


def inputs_of(ranks: Ranks, batches: list[int], seed: int = 0) -> list[reference.RankInput]:
    made = []
    for rank in range(ranks.world):
        g = torch.Generator().manual_seed(100 * seed + rank)
        x = torch.randn(batches[rank], H, generator=g).bfloat16()
        ids = torch.rand(batches[rank], E, generator=g).topk(K).indices.int()
        made.append(reference.RankInput(x, ids, expert_scales=torch.rand(batches[rank], K, generator=g)))
    return made


def differences(
    ranks: Ranks, inputs: list[reference.RankInput], global_bs: int, sent: Any, out: torch.Tensor, v2: bool
) -> list[str]:
    """Of a round trip whose experts change nothing."""
    expected = reference.dispatch(inputs, moe_expert_num=E, global_bs=global_bs)
    sums = reference.combine(
        inputs, [one.expand_x for one in expected], expected, moe_expert_num=E, global_bs=global_bs
    )
    contract = "v2" if v2 else "v1"
    reports = [
        reference.validate(
            "dispatch",
            sent,
            expected[ranks.rank],
            rank=ranks.rank,
            contract=contract,
            ranks_per_server=comm.ranks_per_server(ranks.hccl, ranks.world, ranks.rank),
        ),
        reference.validate("combine", out, sums[ranks.rank], rank=ranks.rank),
    ]
    return [report.text for report in reports if not report.ok]


def round_trip(
    ranks: Ranks, one: reference.RankInput, name: str, global_bs: int, v2: bool
) -> tuple[Any, torch.Tensor]:
    x, ids, weights = one.x.npu(), one.expert_ids.npu(), one.expert_scales.npu()
    suffix = "_v2" if v2 else ""
    sent = OP[f"dispatch{suffix}"](x, ids, **ranks.place(name), global_bs=global_bs)
    out = OP[f"combine{suffix}"](
        sent[0], ids, sent[2], sent[4], weights, **ranks.place(name), global_bs=global_bs
    )
    return sent, out


def launches() -> list[int]:
    """Of the twin's kernels by this process: dispatch, combine."""
    path = os.environ["ASCEND_MOE_VNPU"] + "/opp/op_api/lib/libcust_opapi.so"
    count = ctypes.CDLL(path).vnpu_launches
    count.restype = ctypes.c_uint64
    torch.npu.synchronize()
    return [count(f"AscendMoeDistribute{op}".encode()) for op in ("Dispatch", "Combine")]


class NpuLaunch(ctypes.Structure):
    """AmNpuLaunch of csrc/npu/launch.h."""

    _fields_ = [
        ("op", ctypes.c_int32),
        ("contract", ctypes.c_int32),
        ("inputs", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("group_ep", ctypes.c_char_p),
        ("group_tp", ctypes.c_char_p),
        ("comm_alg", ctypes.c_char_p),
        ("window_mib", ctypes.c_int64),
        ("timeout_us", ctypes.c_int64),
        ("outputs", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("host_record", ctypes.c_void_p),
    ]


def handle(tensor: torch.Tensor) -> int:
    """An AtenTensorHandle, never given back."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)
    assert address is not None
    return address


@case
def skipped_by_cann(ranks: Ranks) -> Any:
    """With all its outputs empty an operator is never launched: why the error record is an output."""
    empty = torch.empty(0, H, dtype=torch.bfloat16, device="npu")
    none = torch.empty(0, dtype=torch.int32, device="npu")
    tensors = {
        "expand_x": empty,
        "expert_ids": torch.empty(0, K, dtype=torch.int32, device="npu"),
        "expand_idx": none,
        "ep_send_counts": none,
        "expert_scales": torch.empty(0, K, device="npu"),
    }
    integers = {
        "ep_world_size": ranks.world,
        "ep_rank_id": ranks.rank,
        "moe_expert_num": E,
        "shared_expert_num": 1,
    }
    tensor_names, attribute_names = calls.tensor_names(), calls.attribute_names()
    inputs = (ctypes.c_void_p * len(tensor_names))(
        *(handle(tensors[name]) if name in tensors else None for name in tensor_names)
    )
    attributes = (ctypes.c_int64 * len(attribute_names))(*(integers.get(name, 0) for name in attribute_names))
    outputs = (ctypes.c_void_p * 1)(handle(torch.empty_like(empty)))
    launch = NpuLaunch(
        op=calls.OP_COMBINE,
        contract=1,
        inputs=ctypes.addressof(inputs),
        attributes=ctypes.addressof(attributes),
        group_ep=ranks.hccl.encode(),
        group_tp=b"",
        comm_alg=b"",
        outputs=ctypes.addressof(outputs),
        record=handle(none.clone()),
        host_record=handle(none.cpu()),
    )
    adapter, text = ctypes.CDLL(str(npu_adapter.load())), ctypes.create_string_buffer(1024)
    before = launches()
    assert adapter.am_npu_launch(ctypes.byref(launch), text, ctypes.c_uint64(len(text))) == 0, text.value
    return [now - then for now, then in zip(launches(), before, strict=True)]


@case
def empty_batches(ranks: Ranks) -> Any:
    """A rank without tokens, then none anywhere: the kernels must run all the same."""
    wrong = []
    before = launches()
    for batches in ([BS] + [0] * (ranks.world - 1), [0] * ranks.world):
        for v2 in (False, True):
            inputs = inputs_of(ranks, batches)
            sent, out = round_trip(ranks, inputs[ranks.rank], ranks.hccl, BS * ranks.world, v2)
            ascend_moe.check()
            wrong += differences(ranks, inputs, BS * ranks.world, sent, out, v2)
            wrong += [] if out.shape == (batches[ranks.rank], H) and out.device.type == "npu" else ["shape"]
    return {"wrong": wrong, "launches": [now - then for now, then in zip(launches(), before, strict=True)]}


@case
def capture_and_replay(ranks: Ranks) -> Any:
    """A captured round trip gives new tokens' results at every replay, and tells of bad ids afterwards."""
    name = ranks.new_group()
    found: dict[str, Any] = {}
    first = inputs_of(ranks, [BS] * ranks.world)[ranks.rank]
    x, ids, weights = first.x.npu(), first.expert_ids.npu(), first.expert_scales.npu()
    place = ranks.place(name)

    def layer() -> tuple[Any, torch.Tensor]:
        sent = OP["dispatch_v2"](x, ids, **place)
        return sent, OP["combine_v2"](sent[0], ids, sent[2], sent[4], weights, **place)

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        found["cold"] = said(outcome(layer))
    layer()
    ascend_moe.check()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        sent, out = layer()
    found["wrong"] = []
    for seed in range(1, 4):
        inputs = inputs_of(ranks, [BS] * ranks.world, seed)
        mine = inputs[ranks.rank]
        for tensor, value in ((x, mine.x), (ids, mine.expert_ids), (weights, mine.expert_scales)):
            tensor.copy_(value)
        graph.replay()
        ascend_moe.check()
        found["wrong"] += differences(ranks, inputs, 0, sent, out, v2=True)
    before = launches()
    graph.replay()
    found["launches"] = [now - then for now, then in zip(launches(), before, strict=True)]
    if ranks.rank == 0:
        ids[0, 0] = E
    graph.replay()
    torch.npu.synchronize()
    found["bad replay"] = said(outcome(layer))
    ids.copy_(inputs[ranks.rank].expert_ids)
    graph.replay()
    found["afterwards"] = said(outcome(ascend_moe.check))
    found["wrong"] += differences(ranks, inputs, 0, sent, out, v2=True)
    ranks.meet()
    return found


def packets_now(names: tuple[str, ...]) -> list[Any]:
    """CANN's own operators of these names."""
    return [getattr(torch.ops.npu, name) for name in names]


@case
def patched(ranks: Ranks) -> Any:
    """torch_npu's own functions, before, while and after they are ours."""
    names = npu.WINDOW_OPERATORS
    before = [getattr(torch_npu, name) for name in names]
    packets = packets_now(names)
    # vllm-ascend asks HCCL itself for the name.
    backend = ranks.group._get_backend(torch.device("npu"))
    group_ep = backend.get_hccl_comm_name(ranks.rank)
    ascend_moe.comm._handed_out.clear()
    inputs = inputs_of(ranks, [BS] * ranks.world, seed=9)
    one = inputs[ranks.rank]
    with ascend_moe.patch_torch_npu() as patch:
        inner = ascend_moe.patch_torch_npu()
        inner.undo()
        sent = torch_npu.npu_moe_distribute_dispatch_v2(
            x=one.x.npu(), expert_ids=one.expert_ids.npu(), **ranks.place(group_ep)
        )
        out = torch_npu.npu_moe_distribute_combine_v2(
            expand_x=sent[0],
            expert_ids=one.expert_ids.npu(),
            assist_info_for_combine=sent[2],
            ep_send_counts=sent[4],
            expert_scales=one.expert_scales.npu(),
            expand_scales=torch.empty(0, device="npu"),
            tp_send_counts=sent[5],
            **ranks.place(group_ep),
        )
        residual = torch.ones(BS, 1, H, dtype=torch.bfloat16)
        normed = torch_npu.npu_moe_distribute_combine_add_rms_norm(
            *(sent[0], one.expert_ids.npu(), sent[2], sent[4], one.expert_scales.npu()),
            *(residual.npu(), torch.ones(H, dtype=torch.bfloat16).npu()),
            **ranks.place(group_ep),
        )
        met = torch_npu._npu_distribute_barrier(one.x.npu(), group_ep, ranks.world)
        ascend_moe.check()
        swapped = [getattr(torch_npu, op) is getattr(npu, op) for op in names]
    patch.undo()
    return {
        "swapped": swapped,
        "restored": [getattr(torch_npu, op) is old for op, old in zip(names, before, strict=True)],
        "torch.ops untouched": all(
            getattr(torch.ops.npu, name) is old for name, old in zip(names, packets, strict=True)
        ),
        "wrong": differences(ranks, inputs, 0, sent, out, v2=True),
        "sum": float((normed[2].cpu().squeeze(1).float() - 1 - out.cpu().float()).abs().max()),
        "rms": float((normed[0].cpu().float().square().mean(-1) - 1).abs().max()),
        "barrier": torch.equal(met.cpu(), one.x),
    }


@case
def wrong_devices(ranks: Ranks) -> Any:
    """Names and tensors that do not belong together."""
    gloo = ascend_moe.comm_name(ranks.gloo)
    valid = ranks.valid(ranks.hccl, on_npu)["dispatch"]
    ascend_moe.check()
    cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in valid.items()}
    c10d = dist.group.WORLD.group_name
    calls = {
        "cpu tensors, hccl name": cpu,
        "npu tensors, gloo name": {**valid, "group_ep": gloo},
        "npu tensors, unknown name": {**valid, "group_ep": "nobody"},
        "npu tensors, c10d name": {**valid, "group_ep": c10d},
        "one on cpu": {**valid, "expert_ids": valid["expert_ids"].cpu()},
        "x on cpu": {**valid, "x": valid["x"].cpu()},
        "wrong world": {**valid, "ep_world_size": ranks.world + 1, "moe_expert_num": 3 * (ranks.world + 1)},
        "wrong rank": {**valid, "ep_rank_id": (ranks.rank + 1) % ranks.world},
    }
    found = {label: said(outcome(partial(OP["dispatch"], **call))) for label, call in calls.items()}
    ranks.meet()
    ascend_moe.close(gloo)
    return found


@case
def not_blocking(ranks: Ranks) -> Any:
    """Strided inputs, the caching allocator and meta: what else a caller relies on."""
    one = inputs_of(ranks, [BS] * ranks.world, seed=5)
    mine = one[ranks.rank]
    wide = torch.zeros(BS, 2 * H, dtype=torch.bfloat16)
    wide[:, ::2] = mine.x
    strided = wide.npu()[:, ::2]
    ids = mine.expert_ids.t().contiguous().npu().t()
    place = ranks.place(ranks.hccl)
    sent = OP["dispatch"](strided, ids, **place)
    out = OP["combine"](sent[0], ids, sent[2], sent[4], mine.expert_scales.npu(), **place)
    ascend_moe.check()
    wrong = differences(ranks, one, 0, sent, out, v2=False)
    for _ in range(2):  # after warm-up memory is reused
        round_trip(ranks, mine, ranks.hccl, 0, False)
    ascend_moe.check()
    del sent, out
    before = torch.npu.memory_reserved()
    for _ in range(5):
        round_trip(ranks, mine, ranks.hccl, 0, False)
    ascend_moe.check()
    grad = strided.clone().float().bfloat16().requires_grad_()
    with torch.enable_grad():
        tracked = OP["dispatch"](grad, ids, **place)[0]
    ascend_moe.check()
    backward = outcome(lambda: tracked.float().sum().backward())
    return {"wrong": wrong, "grown": torch.npu.memory_reserved() - before, "backward": said(backward)}


@case
def timeouts(ranks: Ranks) -> Any:
    """A rank that does not call: the others learn who, and the communicator stays failed."""
    name = ranks.new_group()
    valid = ranks.valid(name, on_npu)["dispatch"]
    ascend_moe.check()
    ranks.meet()
    found: dict[str, Any] = {}
    os.environ["ASCEND_MOE_TIMEOUT_S"] = "1"
    if ranks.rank == 0:
        OP["dispatch"](**valid)
        found["check"] = said(outcome(lambda: ascend_moe.check(name)))
        found["later"] = said(outcome(lambda: OP["dispatch"](**valid)))
        found["later check"] = said(outcome(ascend_moe.check))
    dist.barrier(ranks.gloo)
    if ranks.rank != 0:
        OP["dispatch"](**valid)  # finds rank 0's abort
        found["check"] = said(outcome(lambda: ascend_moe.check(name)))
    del os.environ["ASCEND_MOE_TIMEOUT_S"]
    ascend_moe.close(name)
    found["closed"] = name not in npu_communicator._ends
    found["check after close"] = said(outcome(ascend_moe.check))
    found["op after close"] = said(outcome(lambda: (OP["dispatch"](**valid), ascend_moe.check())))
    fresh = ranks.new_group()
    found["fresh group"] = said(outcome(lambda: ranks.valid(fresh, on_npu)))
    ascend_moe.check()
    ranks.meet()
    return found


@case
def killed_peer(ranks: Ranks) -> Any:
    """The last rank is killed: ends this process, the collectives of the others would never."""
    valid = ranks.valid(ranks.hccl, on_npu)["dispatch"]
    ascend_moe.check()
    ranks.meet()
    if ranks.rank == ranks.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = outcome(lambda: (OP["dispatch"](**valid), ascend_moe.check()))
    found = {"error": said(error), "seconds": time.monotonic() - start}
    (Path(sys.argv[1]) / f"{ranks.rank}.json").write_text(json.dumps(found))
    os._exit(0)


@case
def own_window_size(ranks: Ranks) -> Any:
    """A group with a window size of its own: HCCL's option goes before HCCL_BUFFSIZE."""
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": 64}
    group = dist.new_group(list(range(ranks.world)), pg_options=options)
    name = ascend_moe.comm_name(group)
    inputs = inputs_of(ranks, [BS] * ranks.world, seed=6)
    sent, out = round_trip(ranks, inputs[ranks.rank], name, 0, True)
    ascend_moe.check()
    ranks.meet()
    end = npu_communicator._ends[name]
    x = torch.zeros(4096, 7168, dtype=torch.bfloat16).npu()
    ids = torch.zeros(4096, K, dtype=torch.int32).npu()
    small = said(outcome(lambda: OP["dispatch"](x, ids, **ranks.place(name))))
    wrong = differences(ranks, inputs, 0, sent, out, v2=True)
    return {"mib": end.buffer_mib, "wrong": wrong, "too small": small}


@case
def another_current_device(ranks: Ranks) -> Any:
    """Tensors decide where an op runs, not the current device."""
    inputs = inputs_of(ranks, [BS] * ranks.world, seed=7)
    mine = inputs[ranks.rank]
    x, ids, weights = mine.x.npu(), mine.expert_ids.npu(), mine.expert_scales.npu()
    place = ranks.place(ranks.hccl)
    with torch.npu.device((ranks.rank + 2) % torch.npu.device_count()):
        sent = OP["dispatch"](x, ids, **place)
        out = OP["combine"](sent[0], ids, sent[2], sent[4], weights, **place)
        ascend_moe.check()
    wrong = differences(ranks, inputs, 0, sent, out, v2=False)
    return wrong + ([] if out.device == x.device else ["device"])


@case
def too_small(ranks: Ranks) -> Any:
    """A window too small is refused before anything is launched, by the check that CPU has."""
    rows = 4096
    x = torch.zeros(rows, 7168, dtype=torch.bfloat16)
    ids = torch.zeros(rows, K, dtype=torch.int32)
    gloo = ascend_moe.comm_name(ranks.gloo)
    cpu = said(outcome(lambda: OP["dispatch"](x, ids, **ranks.place(gloo))))
    npu = said(outcome(lambda: OP["dispatch"](x.npu(), ids.npu(), **ranks.place(ranks.hccl))))
    ranks.meet()
    ascend_moe.close(gloo)
    return {"cpu": cpu, "npu": npu}


@case
def refused_by_tiling(ranks: Ranks) -> Any:
    """A call that only CANN's side refuses: the status and its reason come at once."""
    name = ranks.hccl
    ranks.valid(name, on_npu)
    ascend_moe.check()
    ascend_moe.close(name)
    before, made = os.environ.get("HCCL_BUFFSIZE"), binding.End
    # Without a size of its own the launch has op_host read the variable itself.
    binding.End = lambda **facts: made(**{**facts, "buffer_mib": 0})  # type: ignore[assignment,misc]
    npu_communicator.find(name, ranks.world, ranks.rank, torch.device("npu", torch.npu.current_device()))
    binding.End = made  # type: ignore[misc]
    os.environ["HCCL_BUFFSIZE"] = "many"
    error = outcome(lambda: ranks.valid(name, on_npu))
    os.environ.pop("HCCL_BUFFSIZE") if before is None else os.environ.update(HCCL_BUFFSIZE=before)
    ascend_moe.close(name)
    ranks.meet()
    return said(error)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    ranks = Ranks()
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = CASES[name](ranks)
        except Exception as error:
            kind = "ascend_moe" if isinstance(error, AscendMoeError) else "other"
            results[name] = {"raised": kind, "trace": traceback.format_exc()}
            break
    (folder / f"{ranks.rank}.json").write_text(json.dumps(results))
    dist.barrier(ranks.gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
