"""The needs of a configuration, computed without running it: window, HCCL_BUFFSIZE, UB, tiling, limits.

    report = plan(Request(ranks=16, experts=256, hidden=7168, topk=8, batch=128))
    print(report.buffsize_mib, report.violations)

The rules are those of the operators' tiling (op_host). CANN's numbers are included for comparison.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ascendc_twin.soc import DEFAULT_SOC as DEFAULT_SOC
from ascendc_twin.soc import SOC_OF_SERIES as SOC_OF_SERIES
from ascendc_twin.soc import SOCS as SOCS
from ascendc_twin.soc import Soc

from .. import settings
from ..call import DEFAULTS, DTYPES, CallOptions, SpecialExperts
from ..errors import ArgumentError, WindowTooSmall, need, need_one_of, with_typed_errors
from ..native import library
from ..native import plans as calls
from ..native.plans import ALGORITHMS
from ..native.windows import CONTEXT_A2, CONTEXT_A3, ranks_per_server, window_data_bytes
from ..settings import MAX_WINDOW_MIB

CONTRACTS = {"v1": 1, "v2": 2}
_BLOCK = 32  # rows are multiples of this many bytes
_TOO_MANY = "ep_world_size"  # the argument of the rule on the number of ranks
_SPECIAL = SpecialExperts._fields
_DEFAULTED = ("cores", "window_mib", "ranks_per_server")  # 0: the default
_MOST = {"ranks": 1 << 12, "experts": 1 << 16, "topk": 1 << 10, "hidden": 1 << 20, "batch": 1 << 20}


def soc_of(name: str) -> Soc:
    """Return the SoC ``name``, as "Ascend910_9391"; raise ArgumentError if it is not in `SOCS`."""
    need_one_of("soc", name, SOCS)
    return SOCS[name]


@dataclass(frozen=True)
class Request(CallOptions):
    """A configuration of dispatch and combine, equal on all ranks.

    Const experts are planned with alphas of shape (const_expert_num, H), the form that uses the most UB.

    Attributes:
        ranks, experts, topk: numbers of ranks W, of routed experts E, and of a token's ids K (special experts' too).
        hidden, batch: elements of a row H; maxBS, the largest number of tokens of a rank.
        equal_batches: False: ranks may have fewer tokens than ``batch``, and ``global_bs`` is W * batch. True: it is 0.
        dtype: element type of x: bf16, fp16 or fp32.
        smooth: dispatch takes smooth scales; needs ``quant_mode`` 2.
        weights: dispatch takes expert_scales too and sends them with the rows.
        contract: v1 (npu_moe_distribute_dispatch) or v2 (..._v2).
        soc: name of the SoC.
        cores: AIV cores per rank; 0: all of the SoC.
        window_mib: current HCCL_BUFFSIZE in MiB; 0: unknown, the largest is assumed.
        ranks_per_server: ranks per server; 0: the SoC's number.
        rdma_flags: as with ASCEND_MOE_RDMA_FLAGS=1: flagged blocks between A2 servers.
        super_pods: A3 super-pods that the ranks span; more than one is a violation.
    """

    ranks: int
    experts: int
    topk: int
    hidden: int
    batch: int
    equal_batches: bool = True
    dtype: str = "bf16"
    smooth: bool = False
    contract: str = "v2"
    soc: str = DEFAULT_SOC
    cores: int = 0
    window_mib: int = 0
    ranks_per_server: int = 0
    weights: bool = False
    rdma_flags: bool = False
    super_pods: int = 1
    global_bs: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not self.equal_batches and type(self.ranks) is int and type(self.batch) is int:
            object.__setattr__(self, "global_bs", self.ranks * self.batch)


@dataclass(frozen=True)
class Violation:
    """A limit of the operators that the configuration exceeds.

    Attributes:
        argument: name of the op's argument, or ranks_per_server, super_pods or HCCL_BUFFSIZE.
        message: the value and the rule, with its numbers.
    """

    argument: str
    message: str


@dataclass(frozen=True)
class CannNeed:
    """Window that one version of CANN's own operators needs.

    Attributes:
        version: name of the version.
        bytes, mib: window size in bytes, and the smallest HCCL_BUFFSIZE (MiB) that contains it.
        state_kib: KiB by which its state window, no part of HCCL_BUFFSIZE, has grown in release ``cann_state_since()``.
        refuses: why this version refuses the configuration; "" if it accepts it.
    """

    version: str
    bytes: int
    mib: int
    state_kib: int
    refuses: str


@dataclass(frozen=True)
class UbItem:
    """One buffer in the UB of a core in one step of an op: the step, the buffer's name, its size in bytes."""

    step: str
    name: str
    bytes: int


@dataclass(frozen=True)
class OpPlan:
    """Tiling of one op, and its use of UB, with the request's window, or with the largest if that is too small or 0.

    Attributes:
        tiling: fields of the op's tiling structure, by name.
        ub: the buffers of each step.
        ub_peak, fullest: largest sum of a step's buffers, in bytes, and the name of that step.
        algorithm: name of the algorithm that the op runs.
    """

    tiling: dict[str, int]
    ub: list[UbItem]
    ub_peak: int
    algorithm: str
    fullest: str


@dataclass(frozen=True)
class WindowFit:
    """Window sizes that fit a dispatch and its combine, and the algorithm of each op with them.

    Attributes:
        mib: current HCCL_BUFFSIZE; 0: unknown.
        algorithms: op -> algorithm with ``mib``, or with the largest window if ``mib`` is 0; empty: an op is refused.
        least_mib: minimum HCCL_BUFFSIZE for both ops; 0: none is large enough.
        least: op -> algorithm with ``least_mib``.
        direct_mib: minimum with which both ops run `direct`; 0: `direct` does not support this configuration.
        preferred: op -> algorithm with the largest window.
    """

    mib: int
    algorithms: dict[str, str]
    least_mib: int
    least: dict[str, str]
    direct_mib: int
    preferred: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether both ops run with ``mib``."""
        return bool(self.algorithms)

    @property
    def best_mib(self) -> int:
        """Recommended HCCL_BUFFSIZE: ``direct_mib`` if both ops prefer `direct`, else ``least_mib``."""
        return self.direct_mib if set(self.preferred.values()) == {"direct"} else self.least_mib

    @property
    def fallen_back(self) -> list[str]:
        """Ops that run another algorithm with ``mib`` than with the largest window."""
        return [op for op, algorithm in self.algorithms.items() if algorithm != self.preferred[op]]

    def needs(self) -> str:
        """Return a sentence about the minimum HCCL_BUFFSIZE."""
        if not self.least_mib:
            return f"no HCCL_BUFFSIZE up to {MAX_WINDOW_MIB} is enough"
        direct = f"{self.direct_mib} for direct" if self.direct_mib else "direct does not support it"
        if self.least_mib == self.direct_mib and set(self.least.values()) == {"direct"}:
            return f"HCCL_BUFFSIZE={self.least_mib} is the minimum, {both(self.least)}"
        return f"HCCL_BUFFSIZE={self.least_mib} is the minimum ({both(self.least)}), {direct}"

    def about(self) -> str:
        """Return a sentence on whether ``mib`` is enough, or "" if it is unknown (0)."""
        if not self.mib:
            return ""
        if not self.ok:
            return f"{self.mib} is too small"
        by = f"{self.mib} is enough, {both(self.algorithms)}"
        ops = " and ".join(self.fallen_back)
        return f"{by}: below {self.direct_mib} {ops} cannot run direct" if ops else by


def both(algorithms: dict[str, str]) -> str:
    """Format ``algorithms`` by op as text: "both by direct", or "dispatch by window, combine by direct"."""
    names = set(algorithms.values())
    if len(names) == 1:
        return f"both by {names.pop()}"
    return ", ".join(f"{op} by {algorithm}" for op, algorithm in algorithms.items())


@dataclass(frozen=True)
class PlanReport:
    """Result of `plan`.

    Attributes:
        request, soc, cores: the configuration, its SoC, and the AIV cores per rank.
        window: result of `window_need`.
        buffsize_mib: recommended HCCL_BUFFSIZE: ``fit.best_mib``, or the ``window``'s if ``fit`` is None.
        ub_bytes: UB of a core.
        cann: result of `cann_need`.
        fit: None if the operators refuse it with every window, unless only for a number of ranks that can be planned.
        ops: op -> its plan; empty if ``fit`` is None.
        violations: limits that the configuration exceeds, the current window's included.
    """

    request: Request
    soc: Soc
    cores: int
    window: dict[str, int]
    buffsize_mib: int
    ub_bytes: int
    cann: list[CannNeed]
    fit: WindowFit | None = None
    ops: dict[str, OpPlan] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no limit is exceeded."""
        return not self.violations

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and ``ok`` as a dict for JSON."""
        return asdict(self) | {"ok": self.ok}


@with_typed_errors
def plan(request: Request) -> PlanReport:
    """Compute sizes, tiling and exceeded limits of a ``request``, without a device or a window.

    Raises:
        ArgumentError: a number is outside of what can be computed, or dtype, contract, soc or comm_alg is unknown.
        LibraryError: the native library is missing.
    """
    chip = soc_of(request.soc)
    _check(request)
    cores = request.cores or chip.aiv
    window = window_need(request)
    cann = cann_need(request)
    violations, fit = _violations(request, cores), None
    ops: dict[str, OpPlan] = {}
    # More ranks than the ops support are planned too, up to the limit of CANN's own operators.
    too_many = [violation.argument for violation in violations] == [_TOO_MANY]
    if not violations or (too_many and request.ranks <= limits()["planned_world_size"]):
        trip = _RoundTrip(request, cores)
        fit, refused = _fit(trip, request, cores)
        if refused is not None:
            violations.append(Violation(settings.HCCL_BUFFSIZE.name, _rule(refused)))
        ops = {name: _op_plan(trip.plan(name, request.window_mib if fit.ok else 0)) for name in _CALLS}
    best = fit.best_mib if fit is not None else window["buffsize_mib"]
    return PlanReport(request, chip, cores, window, best, limits()["ub_bytes"], cann, fit, ops, violations)


@with_typed_errors
def require(request: Request) -> None:
    """Raise ArgumentError with the first of `plan`'s violations if the ``request`` has any."""
    for violation in plan(request).violations:
        raise ArgumentError(violation.message, argument=violation.argument)


def on_servers(ranks: int, comm_alg: str, weights: bool) -> dict[str, Any]:
    """Return the `Request` fields that differ if ASCEND_MOE_RANKS_PER_SERVER puts ``ranks`` ranks on several servers.

    Returns:
        soc (an A2), ranks_per_server, and ``comm_alg`` and ``weights`` as given; {} for one server.
    """
    share = ranks_per_server()
    if not 0 < share < ranks:
        return {}
    return {"soc": SOC_OF_SERIES["A2"], "ranks_per_server": share, "comm_alg": comm_alg, "weights": weights}


def exported_mib(default: int) -> int:
    """Return HCCL_BUFFSIZE from the environment, or ``default`` if not set. Raises ArgumentError if invalid."""
    given = settings.HCCL_BUFFSIZE.text()
    window_data_bytes()
    return int(given) if given else default


def limits() -> dict[str, int]:
    """Return the operators' maxima by name: ep_world_size, slots (W * L), topk, batch, hidden, ub_bytes, …"""
    return fields_of(library.lib().am_need_limits)


@with_typed_errors
def window_need(request: Request) -> dict[str, int]:
    """Return the window per rank that ``request`` needs, by name: dispatch_mib, combine_mib, buffsize_mib (both ops), …

    ``aligned_mib``: minimum with which the rows of both ops are aligned to 512 bytes; 0: they never are.

    Raises:
        ArgumentError: a number is outside of what can be computed, or dtype, contract or soc is unknown.
    """
    _check(request)
    spec = _dispatch(request, request.cores or soc_of(request.soc).aiv, MAX_WINDOW_MIB)
    return fields_of(library.lib().am_need_window, ctypes.byref(spec))


@with_typed_errors
def cann_need(request: Request) -> list[CannNeed]:
    """Return the window that each version of CANN's own operators needs for ``request``. Raises as `window_need`."""
    _check(request)
    shape = (request.ranks, request.experts, request.batch, request.hidden, request.topk)
    numbers = (ctypes.c_int64 * 9)(*shape, 0, request.dtype == "fp32", request.equal_batches, request.special.total)
    lines = library.text_of(library.lib().am_need_cann, numbers).splitlines()
    fields = (line.split("\t") for line in lines)
    return [CannNeed(name, int(size), int(mib), int(state), refuses) for name, size, mib, state, refuses in fields]


def cann_state_since() -> str:
    """Return the name of the first release of CANN's operators to which `CannNeed.state_kib` applies."""
    return str(library.lib().am_cann_state_since().decode())


def _check(request: Request) -> None:
    for name in (*_MOST, *_DEFAULTED, "super_pods", *_SPECIAL):
        given = getattr(request, name)
        need(type(given) is int, name, "is {!r}; need an integer", given)
    most_cores = soc_of(request.soc).aiv
    need(request.cores <= most_cores, "cores", "is {}; {} has {}", request.cores, request.soc, most_cores)
    need(isinstance(request.comm_alg, str), "comm_alg", "is {!r}; need a name", request.comm_alg)
    most = _MOST | {"cores": most_cores, "window_mib": MAX_WINDOW_MIB, "ranks_per_server": request.ranks}
    most |= {"super_pods": request.ranks} | dict.fromkeys(_SPECIAL, _MOST["experts"])
    for name, high in most.items():
        value, low = getattr(request, name), 0 if name in ("batch", *_SPECIAL) else 1
        valid = low <= value <= high or (value == 0 and name in _DEFAULTED)
        need(valid, name, "is {}; need {}..{}", value, low, high)
    for name, names in (("dtype", DTYPES), ("contract", CONTRACTS)):
        need_one_of(name, getattr(request, name), names)


def _ranks_per_server(request: Request) -> int:
    return request.ranks_per_server or min(soc_of(request.soc).ranks_per_server, request.ranks)


# ---- descriptions of the two calls ----


def call_spec(op: int, request: Request, shapes: calls.NamedShapes, cores: int, window_mib: int, rank: int = 0) -> Any:
    """Return the native description of one rank's call.

    Args:
        op: ``OP_DISPATCH`` or ``OP_COMBINE`` of `native.plans`.
        request: the configuration.
        shapes: (name, dtype, shape) of each of the call's tensors.
        cores: AIV cores of the launch.
        window_mib: MiB of the window that rows may take.
        rank: number of the calling rank.
    """
    attributes: dict[str, int | None] = dict.fromkeys(calls.attribute_names(), 0)
    attributes |= dict.fromkeys(("y_dtype", "x_dtype", "scales_dtype"), None)
    attributes |= {"ep_world_size": request.ranks, "ep_rank_id": rank, "moe_expert_num": request.experts}
    # dispatch takes combine's options too, because they share the window
    attributes |= {name: getattr(request, name) for name in DEFAULTS if name != "comm_alg"}
    attributes |= {"shared_expert_num": 1} | ({} if op == calls.OP_DISPATCH else {"quant_mode": 0})
    call = calls.describe(op, CONTRACTS[request.contract], "group", request.comm_alg, shapes, attributes)
    chip = soc_of(request.soc)
    servers = _ranks_per_server(request)
    call.context_kind = CONTEXT_A2 if chip.window_holds_state else CONTEXT_A3
    call.ranks_per_server = servers if servers < request.ranks else 0
    call.rdma_flags = request.rdma_flags
    call.comm_world, call.comm_rank = request.ranks, rank
    call.window_mib, call.cores, call.deadline_micros = window_mib, cores, 1_000_000
    call.planned = request.ranks > settings.MAX_WORLD
    return call


def _dispatch(request: Request, cores: int, window_mib: int) -> Any:
    ids = (request.batch, request.topk)
    shapes: calls.NamedShapes = (
        ("x", DTYPES[request.dtype], (request.batch, request.hidden)),
        ("expert_ids", "int32", ids),
    )
    if request.smooth:
        shapes = (*shapes, ("scales", "float32", (request.experts, request.hidden)))
    if request.weights:
        shapes = (*shapes, ("expert_scales", "float32", ids))
    return call_spec(calls.OP_DISPATCH, request, shapes, cores, window_mib)


def _combine(request: Request, cores: int, window_mib: int) -> Any:
    """Describe the combine after this dispatch, with as many rows as dispatch allocates."""
    sent = calls.outputs_of(_dispatch(request, cores, window_mib))
    index = "expand_idx" if request.contract == "v1" else "assist_info_for_combine"
    shapes: calls.NamedShapes = (
        ("expand_x", DTYPES[request.dtype], sent[0][1]),
        ("expert_ids", "int32", (request.batch, request.topk)),
        (index, "int32", sent[2][1]),
        ("ep_send_counts", "int32", sent[4][1]),
        ("expert_scales", "float32", (request.batch, request.topk)),
    )
    dtype, of_const = DTYPES[request.dtype], (request.const_expert_num, request.hidden)
    if request.special.need_rows:
        shapes = (*shapes, ("ori_x", dtype, (request.batch, request.hidden)))
    if request.const_expert_num:
        names = ("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")
        shapes = (*shapes, *((name, dtype, of_const) for name in names))
    return call_spec(calls.OP_COMBINE, request, shapes, cores, window_mib)


_CALLS: dict[str, Callable[[Request, int, int], Any]] = {"dispatch": _dispatch, "combine": _combine}


def describe(op: str, request: Request, comm_alg: str = "") -> Any:
    """Return the native description of ``op`` ("dispatch" or "combine") of a ``request`` in the largest window.

    ``comm_alg`` replaces the request's unless it is empty.
    """
    request = replace(request, comm_alg=comm_alg or request.comm_alg)
    return _CALLS[op](request, request.cores or soc_of(request.soc).aiv, MAX_WINDOW_MIB)


def tiling_of(made: calls.Plan) -> dict[str, int]:
    """Return the tiling fields of the plan ``made``, by name."""
    return fields_of(library.lib().am_need_tiling, made.handle)


def _op_plan(made: calls.Plan) -> OpPlan:
    tiling = tiling_of(made)
    lines = (line.split("\t") for line in library.text_of(library.lib().am_need_ub, made.handle).splitlines())
    items = [UbItem(step, what, int(size)) for step, what, size in lines]
    sums = dict.fromkeys((item.step for item in items), 0)
    for item in items:
        sums[item.step] += item.bytes
    fullest = max(sums, key=sums.__getitem__)
    return OpPlan(tiling, items, sums[fullest], ALGORITHMS[tiling["algorithm"]], fullest)


# ---- limits ----


def _violations(request: Request, cores: int) -> list[Violation]:
    """Return every broken rule except the one about the current window size.

    The operators report only the first broken rule, so the argument it names is corrected and the check repeated.
    """
    found: list[Violation] = []
    share, at = _ranks_per_server(request), request
    if soc_of(request.soc).series == "A2" and request.ranks % share:  # the rule of an opening group
        message = f"ranks_per_server is {share}, it must divide the {request.ranks} ranks: all A2 servers of a group "
        found.append(Violation("ranks_per_server", message + "have the same number of its ranks"))
    if request.super_pods > 1:
        found.append(Violation("super_pods", _super_pods(request)))
    if request.ranks > settings.MAX_WORLD:
        planned = limits()["planned_world_size"]
        beyond = request.ranks > planned
        most = planned if beyond else settings.MAX_WORLD
        found.append(Violation(_TOO_MANY, f"ep_world_size is {request.ranks}, it must be in 1..{most}"))
        at = _corrected(request, _TOO_MANY) if beyond else request
    while (error := _RoundTrip(at, cores).refused(0)) is not None:
        if error.argument == "comm_alg" and library.lib().am_comm_algorithm(request.comm_alg.encode()) < 0:
            raise error  # an unknown name
        found.append(Violation(error.argument, _rule(error)))
        corrected = at if isinstance(error, WindowTooSmall) else _corrected(at, str(error.argument))
        if corrected == at:
            break
        at = corrected
    return found


def _super_pods(request: Request) -> str:
    """The rule that an opening group on several super-pods breaks."""
    if soc_of(request.soc).series != "A3":
        return f"super_pods is {request.super_pods}, only A3 has super-pods; {request.soc} has ranks_per_server: use it"
    cann = next(each for each in cann_need(request) if each.version == "A3 V2 hierarchy")
    refused = f"; it refuses this configuration: {cann.refuses}" if cann.refuses else ""
    rule = library.lib().am_super_pod_rule().decode()
    return f"super_pods is {request.super_pods}: {rule}; HCCL_BUFFSIZE={cann.mib} here{refused}"


def _rule(error: ArgumentError) -> str:
    """Return the text of an op's error without the op's name."""
    return str(error).partition(": ")[2]


class _RoundTrip:
    """Dispatch and combine of a configuration, for checks with windows of any size."""

    def __init__(self, request: Request, cores: int) -> None:
        self._comm_alg = request.comm_alg
        self._state_mib = window_need(request)["state_in_window_mib"]
        self._specs = {name: call(request, cores, MAX_WINDOW_MIB) for name, call in _CALLS.items()}

    def plan(self, name: str, window_mib: int) -> calls.Plan:
        """Plan op ``name`` with this HCCL_BUFFSIZE (0: the largest). Raises ArgumentError if the op refuses it."""
        spec, variable = self._specs[name], settings.HCCL_BUFFSIZE.name
        spec.window_mib = (window_mib or MAX_WINDOW_MIB) - self._state_mib
        if spec.window_mib < 1:  # the rule of an opening group
            text = f"{name}: {variable}={window_mib} must be at least {self._state_mib + 1} with an A2 context"
            raise ArgumentError(text, argument=variable)
        return calls.Plan(f"npu_moe_distribute_{name}", spec, self._comm_alg)

    def refused(self, window_mib: int) -> ArgumentError | None:
        """Return the error that an op raises with this HCCL_BUFFSIZE (0: the largest), or None if both run."""
        try:
            self.algorithms(window_mib)
        except ArgumentError as error:
            return error
        return None

    def algorithms(self, window_mib: int) -> dict[str, str]:
        """Return op -> algorithm with this HCCL_BUFFSIZE (0: the largest). Raises ArgumentError if an op refuses it."""
        return {name: ALGORITHMS[tiling_of(self.plan(name, window_mib))["algorithm"]] for name in self._specs}

    def least_mib(self) -> int:
        """Return the minimum HCCL_BUFFSIZE with which both ops run, or 0 if none is enough."""
        low, high = self._state_mib, MAX_WINDOW_MIB
        if self.refused(high) is not None:
            return 0
        while high - low > 1:  # refused at low, accepted at high
            middle = (low + high) // 2
            low, high = (middle, high) if self.refused(middle) else (low, middle)
        return high


def _fit(trip: _RoundTrip, request: Request, cores: int) -> tuple[WindowFit, ArgumentError | None]:
    """Return the fitting windows of a valid configuration, and the error with the request's own window."""
    refused = trip.refused(request.window_mib)
    least = trip.least_mib()
    fit = WindowFit(
        mib=request.window_mib,
        algorithms={} if refused else trip.algorithms(request.window_mib),
        least_mib=least,
        least=trip.algorithms(least),
        direct_mib=_RoundTrip(replace(request, comm_alg="direct"), cores).least_mib(),
        preferred=trip.algorithms(0),
    )
    return fit, refused


def _corrected(request: Request, argument: str) -> Request:
    """Return the nearest configuration that follows the rule about this argument."""
    most = limits()
    if argument == "ep_world_size":
        sharing = [ranks for ranks in range(1, most["ep_world_size"] + 1) if request.experts % ranks == 0]
        return replace(request, ranks=max(sharing), ranks_per_server=0)
    if argument in _SPECIAL:
        none = request.contract == "v1"
        fitting: dict[str, Any] = {argument: 0 if none else min(getattr(request, argument), most["special_experts"])}
        return replace(request, **fitting)
    if argument == "moe_expert_num":
        experts = min(request.experts, most["moe_expert_num"])
        return replace(request, experts=max(1, experts // request.ranks) * request.ranks)
    if argument == "comm_alg":
        return replace(request, comm_alg="window")
    if argument in ("x", "expand_x"):
        unit = _BLOCK // (4 if request.dtype == "fp32" else 2)
        hidden = min(request.hidden, most["hidden"])
        return replace(request, hidden=max(1, hidden // unit) * unit)
    if argument in ("expert_ids", "global_bs"):
        batch = min(request.batch, most["batch"])
        if batch != request.batch:
            return replace(request, batch=batch)
        return replace(request, topk=min(request.topk, most["topk"], request.experts + request.special.total))
    return request


def fields_of(function: Any, *arguments: Any) -> dict[str, int]:
    """Call a library function with ``arguments``; return the numbers that it writes as "name=number;…", by name."""
    pairs = (word.partition("=") for word in library.text_of(function, *arguments).split(";"))
    return {name: int(value) for name, _, value in pairs}
