"""A mixture-of-experts layer over expert-parallel ranks: router, dispatch, expert MLP, combine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ascend_moe._tensors import FittedModule, autocasts, need_values, rows_named, without_autocast, without_casts
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers.base import ROW_DTYPES, Dispatched, Dispatcher
from ascend_moe.errors import need, need_dtype, need_shape, need_tensor, with_typed_errors
from ascend_moe.experts import Activation, grouped_mlp, quantize_weight, quantize_weight_int4
from ascend_moe.experts.int4 import bits_of
from ascend_moe.experts.quant import scale_of_bits
from ascend_moe.experts.rank_experts import RankExperts, held_text
from ascend_moe.experts.weights import Codes, ScaleWatch, keep_codes, plain, quantize_for
from ascend_moe.moe_config import ROUTERS
from ascend_moe.moe_config import MoEConfig as MoEConfig
from ascend_moe.ops.registration import wants_gradient
from ascend_moe.placement import Balance, contiguous_balance, remap, shrunk
from ascend_moe.routers.by_name import ROUTES, Hints
from ascend_moe.routers.replay import RouteCapture, RouterReplay, replayed

_EXPERTS = ("w_gate_up", "w_down")


def _need_floats(name: str, dtype: torch.dtype) -> None:
    need(dtype in ROW_DTYPES, name, "is {}; need torch.bfloat16, torch.float16 or torch.float32", dtype)


class Prepared(NamedTuple):
    """Tokens (BS, H), which of them are active (bool (BS,); None: all), and the four results of `MoELayer.enter`."""

    tokens: Tensor
    active: Tensor | None
    entering: Tensor
    ids: Tensor
    weights: Tensor
    mask: Tensor | None


class MoELayer(RankExperts, FittedModule):
    """Mixture-of-experts layer: route tokens, run this rank's experts, sum their weighted rows.

    All ranks of the dispatcher's group call ``forward`` together. The weights of a new layer are uninitialized: load
    them (``ascend_moe.checkpoint``) or call ``init_weights``. In a trainable layer they require grad, except gate_bias,
    which only affects the choice. R is H, or the config's latent_size. In gate_weight, gate_bias and logit_bias, E
    includes the special experts, after the others.

    Parameters (L experts of this rank, starting at rank * L):
        gate_weight (E, H) in ``router_dtype``; if configured gate_bias (E,) fp32 (routers that are ``biased``),
        logit_bias (E,) in ``router_dtype``, tid2eid (V, K) int32 (router "hash"),
        const_expert_alpha_1, const_expert_alpha_2 (C, R), without const_expert_gate (C,), const_expert_v (C, R) in
        ``dtype``, for C const experts, equal on all ranks,
        w_gate_up (L, R, 2I), w_down (L, I, R), gate_up_bias (L, 2I), down_bias (L, R) in ``dtype``, the biases if
        configured, w_latent_in (H, R), w_latent_out (R, H) in ``dtype``, with a latent_size,
        shared_gate_up (H, 2S), shared_down (S, H), shared_gate (H,) in ``dtype``, if configured.
        For an activation without a gate: w_gate_up (L, R, I) and shared_gate_up (H, S).

    Args:
        config: the layer's numbers.
        dispatcher: transports the rows. Its num_experts must equal the config's, or the number of physical experts of
            ``placement``; its special experts must equal the config's.
        placement: the copies of hot experts (``ascend_moe.placement.balance`` of one layer). L then counts physical
            experts, and every copy must be given its expert's weights. None: no copies.
        dtype: bf16, fp16 or fp32, of the weights and of x.
        router_dtype: bf16, fp16 or fp32, of gate_weight and its product with x; scores are always fp32. Use the
            model's dtype to reproduce the choices of a model whose router computes in it.
        device: device of the weights; None: torch's default device.
        global_bs: default for ``forward``.
        trainable: the weights require grad. Every rank's backward then calls the same ops, also without tokens. Until
            ``eval()``, router "sparsemixer" samples experts and the config's input_jitter multiplies x.
        replay: records or replaces the router's choices, depending on its action.
        capture: stores the logical ids of the last forwards. It and ``replay`` can also be set later as attributes.

    Raises:
        ArgumentError: dispatcher, config and placement have other numbers of experts, or a dtype is not supported.
    """

    _expert_parameters = ("w_gate_up", "w_down", "gate_up_bias", "down_bias")
    _expert_buffers = ("w_gate_up_scale", "w_down_scale", "w_gate_up_correction", "w_down_correction")

    copies: Tensor | None
    tid2eid: Tensor | None
    w_gate_up_scale: Tensor | None
    w_down_scale: Tensor | None
    w_gate_up_correction: Tensor | None
    w_down_correction: Tensor | None

    @with_typed_errors
    def __init__(
        self,
        config: MoEConfig,
        dispatcher: Dispatcher,
        *,
        dtype: torch.dtype = torch.bfloat16,
        router_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        global_bs: int = 0,
        trainable: bool = False,
        placement: Balance | None = None,
        replay: RouterReplay | None = None,
        capture: RouteCapture | None = None,
    ) -> None:
        super().__init__()
        self.replay, self.capture = replay, capture
        self._place_experts(placement, config.num_experts, device)
        rule = "has {} experts, the {} {}; build it with that number"
        whose, experts = ("config", config.num_experts) if placement is None else ("placement", len(self._physical))
        need(dispatcher.num_experts == experts, "dispatcher", rule, dispatcher.num_experts, whose, experts)
        for name, number in config.special._asdict().items():
            other = getattr(dispatcher.special, name)
            rule = "has {} {}, the config {}; build it with **config.special.given"
            need(other == number, "dispatcher", rule, name, other, number)
        _need_floats("dtype", dtype)
        _need_floats("router_dtype", router_dtype)
        self.config = config
        self.dispatcher = dispatcher
        self.dtype = dtype
        self.global_bs = global_bs
        hidden, local = config.hidden_size, dispatcher.local_experts
        inner, shared = config.moe_intermediate_size, config.shared_intermediate_size
        self.activation = Activation(config.activation, config.activation_numbers, config.interleaved)
        row = config.row_size
        parts = 2 if self.activation.gated else 1

        def parameter(*shape: int, kind: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=kind, device=device), requires_grad=trainable)

        self.gate_weight = parameter(config.all_experts, hidden, kind=router_dtype)
        rule = "is {!r}, which MoELayer does not support; need one of {}"
        need(config.router in ROUTES, "router", rule, config.router, tuple(ROUTES))
        biased = ROUTERS[config.router].biased
        self.gate_bias = parameter(config.all_experts, kind=torch.float32) if biased else None
        if self.gate_bias is not None:
            self.gate_bias.requires_grad_(False)
        self.logit_bias = parameter(config.all_experts, kind=router_dtype) if config.router_bias else None
        table = (config.vocab_size, config.top_k)
        hashed = config.router == "hash"
        self.register_buffer("tid2eid", torch.empty(table, dtype=torch.int32, device=device) if hashed else None)
        self.w_gate_up = parameter(local, row, parts * inner)
        self.w_down = parameter(local, inner, row)
        self.gate_up_bias = parameter(local, parts * inner) if config.expert_bias else None
        self.down_bias = parameter(local, row) if config.expert_bias else None
        self.w_latent_in = parameter(hidden, row) if config.latent_size else None
        self.w_latent_out = parameter(row, hidden) if config.latent_size else None
        self.shared_gate_up = parameter(hidden, parts * shared) if shared else None
        self.shared_down = parameter(shared, hidden) if shared else None
        self.shared_gate = parameter(hidden) if config.shared_expert_gate else None
        count = config.const_expert_num
        alphas = (count, row) if config.const_expert_gate else (count,)
        self.const_expert_alpha_1 = parameter(*alphas) if count else None
        self.const_expert_alpha_2 = parameter(*alphas) if count else None
        self.const_expert_v = parameter(count, row) if count else None
        for name in _EXPERTS:
            self.register_buffer(f"{name}_scale", None)
            self.register_buffer(f"{name}_correction", None)
        self._watch = ScaleWatch(*_EXPERTS)

    def _place_experts(self, placement: Balance | None, experts: int, device: torch.device | str | None) -> None:
        """Set the copies of each expert, and the expert of each physical one; without a placement one copy each."""
        if placement is not None:
            need_shape("placement", placement.replica_counts, (1, experts))
        self._placement = placement
        self._physical = list(range(experts)) if placement is None else placement.physical_to_logical[0].tolist()
        where = torch.empty(0, dtype=torch.int32, device=device)  # on torch's default device if None
        table = None if placement is None else self._new_buffer("copies", where)
        self.register_buffer("copies", table, persistent=False)

    @property
    def held(self) -> str:
        """This rank's experts as text for messages, such as "experts 0..3 of 8"."""
        first, local = self.dispatcher.rank * self.dispatcher.local_experts, self.dispatcher.local_experts
        return held_text(self._physical[first : first + local], self.config.num_experts)

    def _new_buffer(self, name: str, like: Tensor) -> Tensor:
        """Return the value of ``copies``, the only buffer that is not in the state dict."""
        assert self._placement is not None
        return self._placement.logical_to_physical[0].to(device=like.device, dtype=torch.int32)

    @with_typed_errors
    def shrink(self, place: Place, alive: Sequence[int]) -> None:
        """Move the layer to a smaller group after ranks were lost; this rank's weights are unchanged.

        Tokens go to the remaining copies of their experts. If an expert has no copy left, its addend is missing from
        the sums; the other weights are not rescaled.

        Args:
            place: the smaller group, from ``ascend_moe.shrink``.
            alive: the remaining ranks, by their numbers in the previous group, ascending.

        Raises:
            ArgumentError: the dispatcher is no MC2Dispatcher, ``alive`` contains ranks outside of its group, or fewer
                experts are left than a token needs. The layer is then unchanged, on all ranks.
        """
        old, device = self.dispatcher, self.gate_weight.device
        before = contiguous_balance(old.num_experts) if self._placement is None else self._placement
        after = shrunk(before, old.world_size, alive)
        rule = "has {} ranks, the place {}; pass the ranks and the place of one ascend_moe.shrink"
        need(len(alive) == place.world, "alive", rule, len(alive), place.world)
        left = old.local_experts * place.world + old.special.total
        rule = "leaves {} experts, fewer than top_k {}: build a new layer with all experts on these ranks"
        topk = self.config.top_k
        need(topk // self.config.rows_of_a_token <= left, "alive", rule, left, topk)
        self.dispatcher = old.moved(place)
        self.global_bs = self.global_bs // old.world_size * place.world
        self._place_experts(after, self.config.num_experts, device)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> MoELayer:
        """Fill the weights with random values, scaled for rows near RMS 1; return self.

        An expert's weights depend on ``seed`` and its logical id only, not on the number of ranks.
        """

        def fill(tensor: Tensor | None, stream: int, fan_in: int) -> None:
            if tensor is not None:
                generator = torch.Generator().manual_seed((seed * 1_000_003 + stream) % (1 << 63))
                values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
                tensor.copy_(values / math.sqrt(fan_in))

        hidden = self.config.hidden_size
        fill(self.gate_weight, 0, hidden)
        # A softmax over many experts is near 1 / E: a larger bias alone would decide the choice.
        softmax = self.config.router == "softmax_bias"
        fill(self.gate_bias, 1, (10 * self.config.all_experts) ** 2 if softmax else 100)
        fill(self.shared_gate_up, 2, hidden)
        fill(self.shared_down, 3, self.config.shared_intermediate_size)
        fill(self.shared_gate, 4, hidden)
        last = 5 + 2 * self.config.num_experts
        fill(self.logit_bias, last, 100)
        fill(self.w_latent_in, last + 1, hidden)
        fill(self.w_latent_out, last + 2, self.config.row_size)
        if self.tid2eid is not None:
            drawn = torch.Generator().manual_seed(seed)
            shape = len(self.tid2eid), self.config.all_experts
            table = torch.rand(shape, generator=drawn, dtype=torch.float32, device="cpu")
            self.tid2eid.copy_(table.argsort(1)[:, : self.config.top_k])
        behind, gate = last + 3 + 2 * self.config.num_experts, self.config.const_expert_gate
        fill(self.const_expert_alpha_1, behind, self.config.row_size if gate else 4)
        fill(self.const_expert_alpha_2, behind + 1, self.config.row_size if gate else 4)
        fill(self.const_expert_v, behind + 2, 1)
        first = self.dispatcher.rank * self.dispatcher.local_experts
        for local, expert in enumerate(self._physical[first : first + self.dispatcher.local_experts]):
            fill(self.w_gate_up[local], 5 + 2 * expert, self.config.row_size)
            fill(self.w_down[local], 6 + 2 * expert, self.config.moe_intermediate_size)
            if self.gate_up_bias is not None and self.down_bias is not None:
                fill(self.gate_up_bias[local], last + 3 + 2 * expert, 100)
                fill(self.down_bias[local], last + 4 + 2 * expert, 100)
        return self

    @with_typed_errors
    @torch.no_grad()
    def quantize_(self, bits: int = 8, groups: tuple[int, int] = (1, 1)) -> MoELayer:
        """Quantize the routed experts' weights to int8 with one scale per output channel (W8A8), or to int4 (W4A8).

        From then on dispatch sends int8 rows with one scale each (quant_mode 2). A layer that is already quantized is
        unchanged. Returns self.

        Args:
            bits: 8 or 4. Eight int4 values are packed per int32, with scales (L, G, 2I) and (L, G, R) and fp32 buffers
                w_gate_up_correction (L, 2I) and w_down_correction (L, R): `quantize_weight_int4`.
            groups: with 4 bits: scale groups of the rows of w_gate_up and w_down; divisors of R and I.

        Raises:
            ArgumentError: the layer is trainable or sharded, its experts have biases, bits or groups are not valid.
        """
        need(bits in (4, 8), "bits", "is {}; it must be 8 or 4", bits)
        rule = "is {}; int8 weights have one scale per channel: pass (1, 1), or bits=4"
        need(bits == 4 or tuple(groups) == (1, 1), "groups", rule, groups)
        rule = "is True; quantized weights have no gradient: build the layer with trainable=False"
        need(not self.w_gate_up.requires_grad, "trainable", rule)
        need(self.gate_up_bias is None, "expert_bias", "is True; int8 rows take no bias: do not quantize this layer")
        if self.quant_mode:
            return self
        sharded = hasattr(self.w_down, "device_mesh")
        need(not sharded, "w_down", "is sharded by fully_shard: call quantize_() before fully_shard")
        for name, count in zip(_EXPERTS, groups, strict=True):
            weight = getattr(self, name)
            rule = "is {}; it must divide {} rows of {}"
            need(count > 0 and weight.shape[1] % count == 0, "groups", rule, count, weight.shape[1], name)
            made = quantize_weight(weight) if bits == 8 else quantize_weight_int4(weight, weight.shape[1] // count)
            setattr(self, name, Codes(made[0]))
            setattr(self, f"{name}_scale", made[1])
            setattr(self, f"{name}_correction", made[2] if len(made) > 2 else None)
        self._fit_scales()
        self._watch.renew(self)
        return self

    @property
    def _int4(self) -> bool:
        return self.w_down_correction is not None

    def _fit_scales(self) -> None:
        """Cast the scales: the NPU needs the output dtype for the second int8 product, int64 for int4; else fp32."""
        if self.w_down_scale is None or self.w_gate_up_scale is None:
            return
        if self._int4:
            for name in _EXPERTS:
                setattr(self, f"{name}_scale", self._int4_scale(getattr(self, f"{name}_scale")))
        else:
            narrow = self.w_down_scale.device.type == "npu" and self.dtype == torch.bfloat16
            self.w_down_scale = self.w_down_scale.to(torch.bfloat16 if narrow else torch.float32)

    def _int4_scale(self, scale: Tensor) -> Tensor:
        on_npu = self.w_down.device.type == "npu"
        if (scale.dtype == torch.int64) == on_npu:
            return scale
        return bits_of(scale) if on_npu else scale_of_bits(scale)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Quantize floats for quantized weights; codes need their scales and quantized weights."""
        for name in _EXPERTS:
            own = {part: getattr(self, f"{name}{part}") for part in ("", "_scale", "_correction")}
            given = state_dict.get(prefix + name)
            if self.quant_mode:
                quantize_for(state_dict, prefix + name, self.dtype, {k: v for k, v in own.items() if v is not None})
                if self._int4 and given is not None:
                    state_dict[f"{prefix}{name}_scale"] = self._int4_scale(state_dict[f"{prefix}{name}_scale"])
            elif given is not None:
                rule = "is {}, the layer's weights are {}: call quantize_() before load_state_dict"
                coded = given.dtype in (torch.int8, torch.int32)
                need(not coded, prefix + name, rule, str(given.dtype).removeprefix("torch."), self.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.quant_mode:
            keep_codes(self, *_EXPERTS)
            self._watch.renew(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        """Move and cast the layer. Gate, scales and codes keep their dtypes; ``dtype`` follows the other weights."""
        dtype = fn(self.gate_weight.new_empty(0, dtype=self.dtype)).dtype
        _need_floats("dtype", dtype)
        kept = [self.gate_weight, self.gate_bias, self.logit_bias, self.w_gate_up_scale, self.w_down_scale]
        kept += [self.w_gate_up_correction, self.w_down_correction]
        kept += [self.w_gate_up, self.w_down] if self.quant_mode else []
        super()._apply(without_casts(fn, kept), recurse)
        self.dtype = dtype
        if self.quant_mode:
            keep_codes(self, *_EXPERTS)
            self._fit_scales()
            self._watch.renew(self)
        return self

    @property
    def quant_mode(self) -> int:
        """The quant_mode passed to dispatch: 2 (int8 rows) after ``quantize_``, else 0."""
        return 0 if self.w_gate_up_scale is None else 2

    def forward(
        self,
        x: Tensor,
        x_active_mask: Tensor | None = None,
        *,
        global_bs: int | None = None,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output, with the shape and dtype of x.

        Args:
            x: (..., H), in the layer's dtype; the leading dimensions together are BS. Under torch.autocast, which
                has no effect inside the layer, x may be bf16, fp16 or fp32 and is cast.
            x_active_mask: bool, (...,) or (..., K); inactive tokens produce zeros and their values are not used.
            global_bs: 0: all ranks have the same BS. Else W * (largest BS). None: the layer's default.
            input_ids: (...,) integers, the tokens' ids; required by router "hash", else ignored.

        Raises:
            ArgumentError: x or the mask has the wrong shape or dtype, or as `route` and `send`.
            Other errors: those of the dispatcher.
        """
        need_tensor("x", x)
        if autocasts(x):  # in another dtype the router would choose other experts
            with torch.autocast(x.device.type, enabled=False):
                own = x.to(self.dtype) if x.dtype in ROW_DTYPES else x
                return MoELayer.forward(self, own, x_active_mask, global_bs=global_bs, input_ids=input_ids).to(x.dtype)
        made = self.prepared(x, x_active_mask, input_ids=input_ids)
        largest = self.global_bs if global_bs is None else global_bs
        sent = self.send(made.entering, made.ids, made.weights, made.mask, global_bs=largest)
        rows = self.run_experts(sent)
        shared = self.run_shared(made.tokens)
        out = self.dispatcher.combine(rows, sent, made.weights, **self.local_addends(made.entering, shared))
        if self.leaves_apart:
            out = self.leave(out, shared)
            if made.active is not None:
                out = out.masked_fill(~made.active[:, None], 0.0)
        return out.view_as(x)

    def prepared(self, x: Tensor, x_active_mask: Tensor | None = None, *, input_ids: Tensor | None = None) -> Prepared:
        """Route the tokens; return them with the first four arguments of `send`.

        Args:
            x, x_active_mask, input_ids: as for ``forward``.

        Raises ArgumentError as ``forward``.
        """
        hidden = self.config.hidden_size
        fits = x.dim() >= 1 and x.size(-1) == hidden and x.dtype == self.dtype
        need(fits, "x", "is {} {}; need (..., {}) {}", x.shape, x.dtype, hidden, self.dtype)
        tokens = x.reshape(-1, hidden)
        mask, active = x_active_mask, None
        hashed = input_ids if self.config.router == "hash" else None
        for name, values, last in (("x_active_mask", mask, (self.config.top_k,)), ("input_ids", hashed, ())):
            if values is not None and x.dim() > 2:  # a count would also fit another order, (S, B) for x (B, S, H)
                shapes = (tuple(x.shape[:-1]), (tokens.shape[0],))
                need_shape(name, values, *shapes, *((*shape, *last) for shape in shapes))
        if mask is not None:
            mask, active = self._masks(mask, tokens.size(0))
            # Values of inactive tokens must not enter products: 0 * NaN would reach the gradients of all weights.
            tokens = tokens.masked_fill(~active[:, None], 0.0)
            if hashed is not None and hashed.numel() == active.shape[0]:
                input_ids = hashed.reshape(-1).masked_fill(~active, 0)
        tokens = self._jittered(tokens)
        weights, ids = self.route(tokens) if input_ids is None else self.route(tokens, input_ids)
        if self.copies is not None:
            ids = remap(
                ids,
                self.copies,
                source_rank=self.dispatcher.rank,
                world_size=self.dispatcher.world_size,
                replicas=self.dispatcher.num_experts,
            )
        return Prepared(tokens, active, *self.enter(tokens, ids, weights, mask))

    def _masks(self, mask: Tensor, bs: int) -> tuple[Tensor, Tensor]:
        """Return the mask as (BS,) or (BS, K), and the active tokens (BS,)."""
        topk = self.config.top_k
        need_dtype("x_active_mask", mask, torch.bool)
        pairs = mask.numel() == bs * topk and mask.dim() > 1 and mask.size(-1) == topk
        rule = "is {}; need one value per token ({}) or per routed token ({}, {})"
        need(pairs or mask.numel() == bs, "x_active_mask", rule, mask.shape, bs, bs, topk)
        mask = mask.reshape((bs, topk) if pairs else (bs,))
        return mask, mask.any(1) if pairs else mask

    def _jittered(self, tokens: Tensor) -> Tensor:
        """Return the tokens (BS, H), in training multiplied by the noise of input_jitter."""
        noise = self.config.input_jitter
        if noise and self.draws:
            # Phi-3.5-MoE's block and its router each multiply, and the experts receive the router's result.
            for _ in range(2 if self.config.router == "sparsemixer" else 1):
                tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - noise, 1.0 + noise)
        return tokens

    @property
    def draws(self) -> bool:
        """Whether a forward draws random numbers: trainable until ``eval()``, with router "sparsemixer" or jitter."""
        drawing = self.config.router == "sparsemixer" or self.config.input_jitter > 0
        return drawing and self.training and self.gate_weight.requires_grad

    @property
    def leaves_apart(self) -> bool:
        """Whether combine's result is not yet the output: `leave` must project or sum it, or add the shared expert."""
        if self.shared_gate_up is not None and not self.dispatcher.fuses_shared_expert:
            return True
        return self.w_latent_out is not None or self.config.rows_of_a_token > 1

    @without_autocast
    def enter(
        self, tokens: Tensor, ids: Tensor, weights: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the rows to dispatch for tokens (BS, H), projected to R elements, their ids, weights and mask.

        The shapes are (BS, R), (BS, K), (BS, K). Router "llama4", whose weights multiply the rows, needs a row per
        routed token: (BS * K, R), (BS * K, 1), (BS * K, 1), mask (BS * K,); combine's weights are then 1.
        """
        if self.config.router == "llama4":
            topk = ids.size(1)
            pairs = tokens.float()[:, None] * weights[..., None]
            tokens, ids = pairs.to(tokens.dtype).flatten(0, 1), ids.reshape(-1, 1)
            weights = torch.ones_like(weights).reshape(-1, 1)
            if mask is not None:
                mask = (mask if mask.dim() > 1 else mask[:, None].expand(-1, topk)).reshape(-1)
        return (tokens if self.w_latent_in is None else tokens @ self.w_latent_in), ids, weights, mask

    def send(
        self, entering: Tensor, ids: Tensor, weights: Tensor, mask: Tensor | None = None, *, global_bs: int = 0
    ) -> Dispatched:
        """Dispatch the result of `enter`, as int8 rows for quantized experts.

        Args:
            entering, ids, weights, mask: rows (BS, R), their experts (BS, K), combine's weights, and the active mask.
            global_bs: as in ``forward``, in tokens.

        Raises:
            ArgumentError: quantized weights were converted to floats, or a scale was written without its weight.
            Other errors: those of `Dispatcher.dispatch`.
        """
        if self.quant_mode:
            self._watch.check(self)
        each = self.config.rows_of_a_token
        with nullcontext() if each == 1 or torch.compiler.is_compiling() else rows_named(each, entering, global_bs):
            return self.dispatcher.dispatch(
                entering,
                ids,
                expert_scales=weights if self.dispatcher.weighs_first else None,
                x_active_mask=mask,
                quant_mode=self.quant_mode,
                global_bs=global_bs * each,
            )

    def local_addends(self, entering: Tensor, shared: Tensor | None) -> dict[str, Tensor | None]:
        """Return combine's keyword arguments for the addends of this rank.

        They are the dispatched rows ``entering`` (BS, R) and the factors of const experts, if the layer has copy or
        const experts, and the output of the ``shared`` expert (BS, H) unless `leave` adds it.
        """
        addends: dict[str, Tensor | None] = {} if self.leaves_apart else {"shared_expert_x": shared}
        if self.config.special.need_rows:
            constants = ("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")
            addends |= {"ori_x": entering} | {name: getattr(self, name) for name in constants}
        return addends

    @without_autocast
    def leave(self, out: Tensor, shared: Tensor | None) -> Tensor:
        """Return the output (BS, H): combine's ``out`` summed by token, projected to H, plus ``shared`` unless None."""
        if self.config.rows_of_a_token > 1:
            out = out.view(-1, self.config.rows_of_a_token, out.size(1)).float().sum(1).to(out.dtype)
        out = out if self.w_latent_out is None else out @ self.w_latent_out
        return out if shared is None else (out.float() + shared.float()).to(out.dtype)  # rounds a second time

    @without_autocast
    def route(self, tokens: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights (BS, K) fp32 and expert ids (BS, K) int32 for tokens (BS, H).

        Only the product with gate_weight is in ``router_dtype``; all later arithmetic is fp32. Among equal scores the
        lowest id is chosen, except by a softmax or llama4 router in bf16 or fp16, where ties are frequent: there
        torch.topk decides, as in transformers. ``replay`` may replace the ids, ``capture`` stores them. Router "hash"
        needs ``input_ids``, one per token.

        Raises ArgumentError if a weight is on meta, a shape does not fit, or the ids of ``replay`` are invalid.
        """
        need_values(self, tokens)
        logits = functional.linear(tokens.to(self.gate_weight.dtype), self.gate_weight, self.logit_bias).float()
        router = ROUTES[self.config.router]
        weights, ids = replayed(self.replay, lambda given: router(self, logits, Hints(input_ids, given)))
        if self.capture is not None:
            self.capture(ids)
        return weights, ids

    def run_experts(self, sent: Dispatched) -> Tensor:
        """Run the expert MLP on the A rows of ``sent.expand_x``; return (A, R) in the layer's dtype, for combine."""
        quantized = self.quant_mode != 0
        weights: tuple[Tensor, Tensor] = (self.w_gate_up, self.w_down)
        if quantized:
            weights = (plain(self.w_gate_up), plain(self.w_down))
        # With autograd, rows must not be written into preallocated memory.
        leaves = (*weights, self.gate_up_bias, self.down_bias, sent.expand_x, sent.dynamic_scales)
        out = None if wants_gradient(leaves) else self.dispatcher.empty_expert_out(sent, self.dtype)
        return grouped_mlp(
            sent.expand_x,
            *weights,
            sent.expert_token_nums,
            dynamic_scales=sent.dynamic_scales if quantized else None,
            w_gate_up_scale=self.w_gate_up_scale,
            w_down_scale=self.w_down_scale,
            output_dtype=self.dtype,
            out=out,
            activation=self.activation,
            gate_up_bias=self.w_gate_up_correction if self._int4 else self.gate_up_bias,
            down_bias=self.w_down_correction if self._int4 else self.down_bias,
        )

    @without_autocast
    def run_shared(self, tokens: Tensor) -> Tensor | None:
        """Run the dense shared expert on (BS, H) tokens; return (BS, H), or None if the layer has none."""
        if self.shared_gate_up is None or self.shared_down is None:
            return None
        count = torch.full((1,), tokens.size(0), dtype=torch.int64, device=tokens.device)
        out = grouped_mlp(tokens, self.shared_gate_up[None], self.shared_down[None], count, activation=self.activation)
        if self.shared_gate is not None:
            gate = torch.sigmoid(tokens.float() @ self.shared_gate.float())
            out = (out.float() * gate[:, None]).to(out.dtype)
        return out

    def extra_repr(self) -> str:
        """Return the config, dtype or quantization, rank and dispatcher as text, for print(layer)."""
        mode = ("W4A8" if self._int4 else "W8A8") if self.quant_mode else str(self.dtype).removeprefix("torch.")
        rank, world = self.dispatcher.rank, self.dispatcher.world_size
        return f"{self.config}, {mode}, rank {rank} of {world}, {type(self.dispatcher).__name__}"
