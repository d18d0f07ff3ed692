"""Many ranks on one device: one launch runs an op of W ranks, each on a group of cores, with the kernels' own bodies.

`ascend-moe validate --one-card W` runs it without a cluster: on one NPU, or on the twin. All windows lie in one
allocation; each rank's context points at them (op_kernel/protocol/tiling.h).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ascendc_twin.soc import SOCS

from .. import reference
from ..errors import KernelFault, need, need_one_of
from ..native import library
from ..native.windows import MIB
from ..ops import calls, npu_adapter
from ..ops.npu_communicator import soc_of
from ..ops.registration import OPERATORS
from ..reference.cases import Case
from ..settings import CONTEXTS
from . import ValidationResult, run
from .cases import between_servers, matrix
from .run import DevicePlace, Result

RANKS = (2, 4, 8)
USUAL_CORES = 8  # of a rank, where the device has as many
TWIN_CORES = 48  # of the NPU whose division among the ranks the twin repeats
HIERARCHY = "hierarchy"
ALGORITHMS = ("window", "direct", HIERARCHY)
WINDOW_MIB = 24
DEADLINE_S = 20.0
GROUP = "one card"
_BLOCK_WORDS, _ALIGNMENT = 8, 512
_STATE_BYTES = MIB


@dataclass
class _Op:
    """An op of one rank, planned, with its memory."""

    plan: calls.Plan
    inputs: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]
    record: torch.Tensor
    workspace: torch.Tensor
    tiling: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory that the kernel may touch."""
        return [*self.inputs.values(), *self.outputs, self.record, self.workspace, self.tiling]


@dataclass
class OneCard:
    """``world`` ranks of ``cores`` cores each on a ``device``. ``share``: ranks per server, 0: all."""

    world: int
    cores: int
    algorithm: str
    device: torch.device
    share: int = 0
    rank: int = 0  # whose error is raised
    _ops: list[_Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        stride = WINDOW_MIB * MIB + _STATE_BYTES
        windows = self.world * stride
        self._memory = self._zeros(windows * (2 if self.share else 1) + _ALIGNMENT)
        first = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._contexts = [
            self._context(rank, first, first + windows if self.share else 0, stride) for rank in range(self.world)
        ]

    def _zeros(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def _context(self, rank: int, window: int, staging: int, stride: int) -> torch.Tensor:
        given = (rank, self.world, window, staging, stride, WINDOW_MIB * MIB)
        image = ctypes.create_string_buffer(library.lib().am_card_context(*given, None))
        library.lib().am_card_context(*given, image)
        return self._bytes(image.raw)

    def _bytes(self, image: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(image), dtype=torch.uint8).to(self.device)

    def places(self) -> list[DevicePlace]:
        """Return the `DevicePlace` of each rank."""
        return [DevicePlace(GROUP, self.world, rank, self.device) for rank in range(self.world)]

    def prepare(self, op: str, place: DevicePlace, case: Case, values: dict[str, Any]) -> Any:
        """Plan one rank's op and return its outputs, which `launch` fills. Call this for rank 0, 1, … of all ranks."""
        name = f"npu_moe_distribute_{op}" + ("_v2" if case.contract == 2 else "")
        inputs = {key: value.contiguous() for key, value in values.items() if isinstance(value, torch.Tensor)}
        shapes = tuple((key, value.dtype, tuple(value.shape)) for key, value in inputs.items())
        called = OPERATORS[name]
        attributes = called.attributes(values)
        spec = calls.describe(called.code, case.contract, GROUP, self.algorithm, shapes, attributes)
        self._describe(spec, place.rank)
        outputs = [
            torch.empty(shape, dtype=dtype or case.torch_dtype, device=self.device)
            for dtype, shape in calls.outputs_of(spec)
        ]
        plan = calls.Plan(name, spec, self.algorithm)
        _, workspace_bytes, tiling = plan.tiled()
        record = self._zeros(calls.error_record_words(), torch.int32)
        self._ops.append(_Op(plan, inputs, outputs, record, self._zeros(workspace_bytes), self._bytes(tiling)))
        return outputs[0] if op == "combine" else tuple(outputs)

    def _describe(self, spec: Any, rank: int) -> None:
        spec.comm_world, spec.comm_rank, spec.window_mib, spec.cores = self.world, rank, WINDOW_MIB, self.cores
        spec.ub_bytes, spec.deadline_micros = library.lib().am_card_ub_bytes(), int(DEADLINE_S * 1e6)
        spec.context_kind = CONTEXTS.index("a2" if self.share else "table")
        spec.ranks_per_server, spec.intra_node_stores = self.share, int(self.share > 0)

    def launch(self) -> None:
        """Run the ops of all ranks that `prepare` has planned as one launch.

        Raises:
            ArgumentError: the ranks have different tiling keys. AscendMoeError: an op has failed.
        """
        ops, self._ops = self._ops, []
        keys, rows = zip(*map(self._row, ops, self._contexts), strict=True)
        need(len(set(keys)) == 1, "case", "has the tiling keys {}; the ranks of a launch share one", sorted(set(keys)))
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        barrier = self._zeros(calls.MAX_CORES * _BLOCK_WORDS, torch.int32).view(calls.MAX_CORES, _BLOCK_WORDS)
        run_on = self._on_npu if self.device.type == "npu" else self._on_twin
        run_on(table, barrier, keys[0], ops)
        records = [op.record.cpu() for op in ops]
        for self.rank, record in enumerate(records):
            if code := int(record[1]):
                raise calls.error_of(code, record.data_ptr(), "", self)

    def _row(self, op: _Op, context: torch.Tensor) -> tuple[int, list[int]]:
        """Return the tiling key of the launch, and what its kernel reads of one rank."""
        names = calls.tensor_names()
        inputs = (ctypes.c_uint64 * len(names))(*(_address(op.inputs.get(name)) for name in names))
        outputs = (ctypes.c_uint64 * len(op.outputs))(*map(_address, op.outputs))
        others = (ctypes.c_uint64 * 3)(*map(_address, (op.record, op.workspace, op.tiling)))
        row = (ctypes.c_uint64 * library.lib().am_card_rank_words())()
        key = library.lib().am_card_rank(op.plan.handle, _address(context), inputs, outputs, others, row)
        return int(key), list(row)

    def _on_twin(self, table: torch.Tensor, barrier: torch.Tensor, key: int, ops: Sequence[_Op]) -> None:
        memory = [self._memory, *self._contexts, table, barrier, *(tensor for op in ops for tensor in op.tensors)]
        ranges = [number for one in memory if one.numel() for number in (one.data_ptr(), one.nbytes)]
        given, fault = (ctypes.c_uint64 * len(ranges))(*ranges), ctypes.create_string_buffer(1024)
        shape = (self.world, self.cores, key)
        where = (_address(table), _address(barrier))
        if library.lib().am_card_launch(*where, *shape, given, len(ranges) // 2, fault, len(fault)):
            raise KernelFault(f"one card: {fault.value.decode()}", rank=0)

    def _on_npu(self, table: torch.Tensor, barrier: torch.Tensor, key: int, ops: Sequence[_Op]) -> None:
        npu_adapter.load()
        with npu_adapter.typed_errors():
            torch.ops.ascend_moe_npu.one_card(table.data_ptr(), self.world, self.cores, key, barrier)
            torch.npu.synchronize(self.device)  # type: ignore[attr-defined,unused-ignore]

    def describe_peer(self, peer: int) -> str:
        """Return "", where a communicator describes a lost rank in its errors."""
        return ""


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def cases_of(world: int, algorithm: str, share: int, drawn: tuple[int, int]) -> list[Case]:
    """Return the bf16 cases of `matrix` without faults and smooth scales; ``drawn``: seed and number of random ones."""
    seed, extra = drawn
    able = [case for case in matrix(world, seed, extra, ("bf16",)) if case.fault() is None and not case.smooth]
    return between_servers(able, share) if algorithm == HIERARCHY else [replace(case, share=0) for case in able]


def run_case(card: OneCard, case: Case) -> Iterator[Result]:
    """Run a case and yield the comparison of each rank's dispatch, then combine, with the reference."""

    def result(op: str, rank: int, report: Any) -> Result:
        mode = f"{card.algorithm}, {case.mode}"
        return Result(op, mode, case.name, rank, report.ok, "" if report.ok else report.text)

    sent = [run.dispatch(place, case, call=card.prepare) for place in card.places()]
    card.launch()
    want, contract = case.dispatched(), f"v{case.contract}"
    for rank, got in enumerate(sent):
        report = reference.validate("dispatch", got, want[rank], rank=rank, contract=contract, exact_shapes=True)
        yield result("dispatch", rank, report)
    rows = case.rows_of(want)
    sums = [
        run.combine(place, case, run.padded(rows[rank], case, sent[rank][0]), sent[rank], call=card.prepare)
        for rank, place in enumerate(card.places())
    ]
    card.launch()
    for rank, expected in enumerate(case.combined(rows, want)):
        yield result("combine", rank, reference.validate("combine", sums[rank], expected, rank=rank))


def cores_of(world: int, device: torch.device) -> list[int]:
    """Return the numbers of cores per rank to run with: the device's divided by W, and 8 if W times 8 cores can run."""
    total = TWIN_CORES
    if device.type == "npu":
        name = soc_of(device)
        need_one_of("device", name, SOCS)
        total = SOCS[name].aiv
    most = calls.MAX_CORES if device.type == "cpu" else total
    return sorted({total // world, *[USUAL_CORES] * (world * USUAL_CORES <= most)})


def validate(
    world: int,
    device: torch.device,
    about: str,
    drawn: tuple[int, int],
    progress: Callable[[int, int], None] = lambda done, most: None,
) -> ValidationResult:
    """Run every case of every algorithm with W ranks on one device.

    Args:
        world: 2, 4 or 8.
        about: description of ``device``, for the result.
        drawn: seed, and number of random cases per algorithm.
        progress: receives the number of results so far and of all.
    """
    need(world in RANKS, "one_card", "is {}; it must be 2, 4 or 8 ranks", world)
    rule = "needs the fast engine, ASCEND_MOE_ENGINE is {}: unset it, or run `ascend-moe explore --case w2,one_card`"
    need(device.type == "npu" or library.engine_name() == "fast", "one_card", rule, library.engine_name())
    cards = [
        (cores, algorithm, world // 2 if algorithm == HIERARCHY else 0)
        for cores in cores_of(world, device)
        for algorithm in ALGORITHMS
        if algorithm != HIERARCHY or world > 2  # two servers of at least two ranks
    ]
    planned = [(card, cases_of(world, card[1], card[2], drawn)) for card in cards]
    count, found, start = sum(len(cases) for _, cases in planned), list[Result](), time.monotonic()
    for (cores, algorithm, share), cases in planned:
        card = OneCard(world, cores, algorithm, device, share)
        for case in cases:
            found += run_case(card, case)
            progress(len(found), 2 * world * count)
    about = f"{about}, {world} ranks on one device, {' and '.join(map(str, cores_of(world, device)))} cores each"
    return ValidationResult(world, about, count, time.monotonic() - start, found)
