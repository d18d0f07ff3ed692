"""A run: its configuration, tokens, layer and window size, and the work of one rank."""

from __future__ import annotations

import importlib.resources
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ascend_moe import comm
from ascend_moe._text import DEFAULT_TEXT
from ascend_moe.call import CallOptions
from ascend_moe.checkpoint import build_layer
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.dispatchers.base import Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.native.windows import A2_STATE_MIB, CONTEXT_A2
from ascend_moe.ops import calls
from ascend_moe.ops.collectives import MAX_BATCH
from ascend_moe.plan import Request, on_servers, window_need
from ascend_moe.reference import RankInput
from ascend_moe.reference.cases import DTYPES
from ascend_moe.settings import MAX_WORLD

_GRAMS = (1, 2, 3)  # lengths of the byte sequences that make up a token


@dataclass(frozen=True)
class RunSpec(CallOptions):
    """A run and the options of its calls, equal on all ranks.

    With quant_mode 2 the experts are int8 too (W8A8), or quantized as in the checkpoint.

    Attributes:
        config: sizes and options of the layer.
        batches: BS of each rank; ranks and batches out of range raise ArgumentError.
        dtype: element type of x, expert rows and weights.
        text: at least sum(batches) bytes, one per token.
        seed: of tokens and random weights.
        iterations: timed passes, after one that is not timed.
        checkpoint, layer: path of a Hugging Face checkpoint and number of its decoder layer; None: random weights.
    """

    config: MoEConfig
    batches: tuple[int, ...]
    dtype: torch.dtype
    text: bytes
    seed: int = 0
    iterations: int = 5
    checkpoint: str | None = None
    layer: int = 0
    global_bs: int = field(init=False, default=0)

    @property
    def ranks(self) -> int:
        """Number of ranks, W."""
        return len(self.batches)

    @property
    def global_rows(self) -> int:
        """global_bs in rows: ``global_bs`` times the rows that the layer dispatches per token."""
        return self.global_bs * self.config.rows_of_a_token

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_bs", self.ranks * max(self.batches))  # required for unequal batches
        experts = self.config.num_experts
        if not 1 <= self.ranks <= MAX_WORLD or experts % self.ranks:
            rule = f"use a divisor of {experts} up to {MAX_WORLD}"
            raise ArgumentError(f"{self.ranks} ranks cannot share {experts} experts evenly; {rule}", argument="ranks")
        if min(self.batches) < 0 or not 1 <= max(self.batches) <= MAX_BATCH:
            text = f"batches are {self.batches}; need 0..{MAX_BATCH} tokens per rank, and at least one token"
            raise ArgumentError(text, argument="batch")


def batches_of(text: str, ranks: int) -> tuple[int, ...]:
    """Parse tokens per rank: a list as "48,0,7", or one number n: n * (1 - r / (2 * W)), rounded up, for rank r of W.

    Raises ArgumentError for another text, a list for another number of ranks, and too many tokens.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ArgumentError(f"{text!r} is neither a number of tokens nor a list like 48,0,7,16", argument="batch")
    numbers = [int(part) for part in parts]
    if max(numbers) > MAX_BATCH:
        raise ArgumentError(f"{text!r} is too large; need 0..{MAX_BATCH} tokens per rank", argument="batch")
    if len(numbers) == 1:
        most = numbers[0]
        return tuple(most - most * rank // (2 * ranks) for rank in range(ranks))
    if len(numbers) != ranks:
        why = f"{text!r} lists {len(numbers)} ranks, there are {ranks}; give one number, or one per rank"
        raise ArgumentError(why, argument="batch")
    return tuple(numbers)


def default_text() -> bytes:
    """Return the bytes of the package's text, the opening of Alice's Adventures in Wonderland."""
    return (importlib.resources.files("ascend_moe") / "data" / DEFAULT_TEXT).read_bytes()


def embed(spec: RunSpec, rank: int) -> Tensor:
    """Return the rank's tokens (BS, H) with RMS 1, one per byte of its part of the text.

    A token is the scaled sum of three random vectors, for its byte, the last two and the last three bytes. Tokens thus
    depend on their context, and equal words have equal tokens.
    """
    first, count = sum(spec.batches[:rank]), spec.batches[rank]
    text = b" " * (max(_GRAMS) - 1) + spec.text
    vectors: dict[bytes, Tensor] = {}
    x = torch.zeros(count, spec.config.hidden_size)
    for token in range(count):
        end = first + token + max(_GRAMS)
        for length in _GRAMS:
            gram = text[end - length : end]
            if gram not in vectors:
                key = spec.seed << 32 | length << 24 | int.from_bytes(gram, "big")
                generator = torch.Generator().manual_seed(key % (1 << 63))
                vectors[gram] = torch.randn(spec.config.hidden_size, generator=generator)
            x[token] += vectors[gram]
    return (x / x.square().mean(-1, keepdim=True).sqrt()).to(spec.dtype)


def token_ids(spec: RunSpec, rank: int) -> Tensor:
    """Return the rank's bytes of the text as token ids (BS,) int64, for layers that route by them."""
    first, count = sum(spec.batches[:rank]), spec.batches[rank]
    return torch.tensor(list(spec.text[first : first + count]), dtype=torch.int64)


def build(spec: RunSpec, dispatcher: Dispatcher, *, floats: bool = False) -> MoELayer:
    """Build the layer with the experts of ``dispatcher``'s rank; ``floats``: dequantize those of a checkpoint."""
    if spec.checkpoint is not None:
        return build_layer(
            spec.checkpoint, spec.layer, dispatcher, dtype=spec.dtype, global_bs=spec.global_bs, dequantize=floats
        )
    layer = MoELayer(spec.config, dispatcher, dtype=spec.dtype, global_bs=spec.global_bs)
    return layer.init_weights(spec.seed)


def needed_mib(spec: RunSpec) -> int:
    """Return the minimum HCCL_BUFFSIZE, in MiB, that is enough for any routing of the batches."""
    config = spec.config
    algorithm = calls.comm_algorithm("")
    selected = {"comm_alg": algorithm} | on_servers(spec.ranks, algorithm, calls.is_two_level(""))
    request = Request(
        ranks=spec.ranks,
        experts=config.num_experts,
        topk=config.top_k // config.rows_of_a_token,
        hidden=config.row_size,
        batch=max(spec.batches) * config.rows_of_a_token,
        equal_batches=False,
        dtype=next(name for name, dtype in DTYPES.items() if dtype == spec.dtype),
        quant_mode=spec.quant_mode,
        **config.special.given,
        **selected,
    )
    return window_need(request)["buffsize_mib"]


# ---- one rank

PHASES = ("router", "dispatch", "experts", "combine")

# Quantization temporarily needs several times the size of the weights: one thread at a time.
_ONE_AT_A_TIME = threading.Lock()

#: progress(stage, done, total), total 0 when unknown.
Progress = Callable[[str, int, int], None]


@dataclass
class RankRecord:
    """Inputs and results of one rank, which received n rows.

    Attributes:
        tokens, x: tokens of the layer, and the rows passed to dispatch for them.
        expert_ids, expert_scales: (BS, K) ids and weights of these rows.
        own: tensors that combine adds on this rank (shared expert's, special experts'), by argument name.
        dispatched: dispatch's seven outputs, with rows cut to n.
        expert_rows: output of the experts, (n, H).
        steady: every pass and MoELayer.forward returned the bits of ``out``.
        seconds: phase -> seconds of each timed pass.
        traffic: op -> the emulator's counters of bytes moved by MTE.
        algorithms: op -> algorithm.
        window_mib, state_mib: MiB of HCCL_BUFFSIZE for rows, and for the state.
        needed_mib: result of `needed_mib`.
        weighed: dispatch took expert_scales.
    """

    rank: int
    tokens: Tensor
    x: Tensor
    expert_ids: Tensor
    expert_scales: Tensor
    own: dict[str, Tensor | None]
    dispatched: tuple[Tensor, ...]
    expert_rows: Tensor
    out: Tensor
    steady: bool
    seconds: dict[str, list[float]] = field(default_factory=dict)
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    algorithms: dict[str, str] = field(default_factory=dict)
    window_mib: int = 0
    state_mib: int = 0
    needed_mib: int = 0
    weighed: bool = False

    @property
    def given(self) -> RankInput:
        """The inputs of dispatch and combine, for the reference."""
        return RankInput(self.x, self.expert_ids, expert_scales=self.expert_scales, **self.own)


@torch.no_grad()
def run_rank(spec: RunSpec, rank: int, group_ep: str, progress: Progress) -> RankRecord:
    """Run the layer as one rank and return its record. All ranks of ``group_ep`` must call this."""
    config = spec.config
    dispatcher = MC2Dispatcher(group_ep, spec.ranks, rank, config.num_experts, **config.special.given)
    progress("weights of the experts", 0, 0)
    layer = build(spec, dispatcher)
    if spec.quant_mode:
        with _ONE_AT_A_TIME:
            layer.quantize_()
    x = embed(spec, rank)
    passes = spec.iterations + 1
    progress("passes through the layer", 0, passes)
    input_ids = token_ids(spec, rank) % (layer.config.vocab_size or 256)
    record, _, out = _pass(layer, dispatcher, x, input_ids)
    # not layer(x), which returns two values in a PairLayer
    record.steady = torch.equal(MoELayer.forward(layer, x, input_ids=input_ids), out)
    record.seconds = {phase: [] for phase in PHASES}
    for done in range(1, passes):
        progress("passes through the layer", done, passes)
        again, times, _ = _pass(layer, dispatcher, x, input_ids)
        record.steady = record.steady and torch.equal(again.out, record.out)
        for phase, seconds in zip(PHASES, times, strict=True):
            record.seconds[phase].append(seconds)
    end = comm.lookup(group_ep, spec.ranks, rank)
    record.window_mib = end.data_bytes >> 20
    record.state_mib = A2_STATE_MIB if end.context_kind == CONTEXT_A2 else 0
    record.needed_mib = needed_mib(spec)
    return record


def _pass(
    layer: MoELayer, dispatcher: MC2Dispatcher, tokens: Tensor, input_ids: Tensor
) -> tuple[RankRecord, tuple[float, ...], Tensor]:
    """Run the steps of MoELayer.forward; return a record, the seconds of each phase, and the output."""
    now = time.perf_counter
    start = now()
    weights, ids = layer.route(tokens, input_ids)
    x, ids, weights, _ = layer.enter(tokens, ids, weights)
    routed = now()
    sent = layer.send(x, ids, weights, global_bs=layer.global_bs)
    dispatched = now()
    traffic, algorithms = _moved(dispatcher, "dispatch")
    resumed = now()
    expert_rows, beside = layer.run_experts(sent), layer.run_shared(tokens)
    own = layer.local_addends(x, beside)
    computed = now()
    out = dispatcher.combine(expert_rows, sent, weights, **own)
    result = layer.leave(out, beside) if layer.leaves_apart else out
    combined = now()
    of_combine = _moved(dispatcher, "combine")
    rows = int(sent.ep_recv_counts[-1])
    outputs = (
        sent.expand_x[:rows].clone(),
        sent.dynamic_scales[:rows].clone(),
        sent.expand_idx[: 3 * rows].clone(),
        sent.expert_token_nums,
        sent.ep_recv_counts,
        sent.handle.given["tp_send_counts"],
        sent.expand_scales[:rows].clone(),
    )
    record = RankRecord(dispatcher.rank, tokens, x, ids, weights, own, outputs, expert_rows[:rows].clone(), out, False)
    record.weighed = dispatcher.weighs_first
    record.traffic, record.algorithms = traffic | of_combine[0], algorithms | of_combine[1]
    return record, (routed - start, dispatched - routed, computed - resumed, combined - computed), result


def _moved(dispatcher: MC2Dispatcher, op: str) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Return bytes and algorithm of the last ``op``, by its name."""
    end = comm.lookup(dispatcher.group_ep, dispatcher.world_size, dispatcher.rank)
    return {op: calls.traffic(end)}, {op: end.algorithm}
