"""The tensors of one layer's MoE block: the required ones, and those of one rank's experts.

Every rank makes the same plan for all experts from names and headers, so missing or unused tensors raise the same error
on all ranks. Data are read for the rank's own experts only, except offsets that decide the format for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import Fp8Format
from ascend_moe.checkpoint.files import FLOATS, FP8, INTEGERS, CheckpointFiles, Part
from ascend_moe.checkpoint.quantized import Quantized
from ascend_moe.checkpoint.stored import Coded, Stored, float_matrix, fp4_matrix, mxfp4_matrix, with_fused_scales
from ascend_moe.errors import need
from ascend_moe.experts import Activation
from ascend_moe.experts.int4 import IN_WORD, correction_of, pack_int4
from ascend_moe.moe_config import ROUTERS, MoEConfig

#: Names of an expert's gate, up and down matrices; only the last two without a gate.
_EXPERT_STYLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
#: Names of the fused matrices of all experts: with a gate (``_wide`` 2), and without.
_FUSED = {
    2: (("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight")),
    1: (("experts.up_proj", "experts.down_proj"),),
}
#: Names of the correction bias, relative to the block or below the router.
_BIASES = (
    "{}.e_score_correction_bias",
    "router.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "{}.moe_statics.e_score_correction_bias",
    "{}.expert_bias",
    "{}.bias",
)
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_Matrix = tuple[Stored, int]  # with its row in fused tensors
_Finish = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Experts:
    """Storage of an expert's matrices, gate and up side by side."""

    gate_up: list[_Matrix]
    down: list[_Matrix]

    @property
    def kept(self) -> tuple[tuple[int, int], ...]:
        """Bits that a layer can keep of each matrix, and the groups of their scales."""
        return tuple((stored.bits, stored.groups) for stored, _ in (*self.gate_up, *self.down))


@dataclass(frozen=True)
class Block:
    """Reader of the tensors of one layer's MoE block.

    Attributes:
        prefix, router: name of the block, as model.layers.3.mlp, and of the router in it, as gate.
        dtype: dtype of the layer's weights; the router's are fp32.
        fp8, quantized: how the files store fp8, and int8 or other quantized, matrices.
        dequantize: convert all quantized experts to ``dtype``.
    """

    files: CheckpointFiles
    prefix: str
    router: str
    config: MoEConfig
    dtype: torch.dtype
    fp8: Fp8Format
    quantized: Quantized
    dequantize: bool = False

    def tensors(self, own: range) -> dict[str, Tensor]:
        """Read the layer's tensors, of the experts only those in ``own``; return them by MoELayer's parameter names.

        Raises:
            ArgumentError: a tensor of the block is missing, invalid or unused.
        """
        single, experts, shared, biases = self._single(), self._experts(), self._shared(), self._biases()
        matrices = [pair for expert in (*experts, *shared) for pair in (*expert.gate_up, *expert.down)]
        planned = [stored for stored, _ in (*single.values(), *matrices)]
        self._need_these([*(part for stored in planned for part in stored.parts), *biases.values()])
        tensors = {name: finish(stored.read(self.files)) for name, (stored, finish) in single.items()}
        config = self.config
        chosen = [experts[expert] for expert in own]
        tensors |= self._coded(experts, own) or self._floats(chosen, config.row_size, config.moe_intermediate_size)
        for name, part in biases.items():
            tensors[name] = self.files.take(part, (own.start, own.stop)).to(self.dtype)
        if shared:
            made = self._floats(shared, config.hidden_size, config.shared_intermediate_size)
            tensors |= {name.replace("w_", "shared_"): tensor[0] for name, tensor in made.items()}
        return tensors

    def kept_bits(self) -> int:
        """Return 8 or 4 if the layer keeps its experts in int8 or int4, or 0 if it converts them to floats.

        The result is equal on every rank: it depends on the names and headers of all experts, not on data.
        """
        self._single()
        return self._kept_bits(self._experts())

    # ---- the plan: the storage of each tensor

    def _single(self) -> dict[str, tuple[Stored, _Finish]]:
        """Return the router's tensors and the latent projections; check their headers."""
        config, dtype, router = self.config, self.dtype, f"{self.prefix}.{self.router}"
        experts, hidden, latent = config.all_experts, config.hidden_size, config.latent_size
        shapes = {"gate_weight": (f"{router}.weight", (experts, hidden))}
        if latent:
            shapes["w_latent_in"] = (f"{self.prefix}.fc1_latent_proj.weight", (latent, hidden))
            shapes["w_latent_out"] = (f"{self.prefix}.fc2_latent_proj.weight", (hidden, latent))
        if config.shared_intermediate_size and config.shared_expert_gate:
            shapes["shared_gate"] = (f"{self.prefix}.shared_expert_gate.weight", (1, hidden))
        finishes: dict[str, _Finish] = {
            "gate_weight": Tensor.float,
            "shared_gate": lambda value: value[0].to(dtype),
        }
        matrices = self._stored(dict(shapes.values()))
        made = {
            own: (matrices[name], finishes.get(own, lambda value: value.t().to(dtype).contiguous()))
            for own, (name, _) in shapes.items()
        }
        wide: _Finish = lambda value: value.float().reshape(experts)  # noqa: E731
        if ROUTERS[config.router].biased:
            names = [f"{self.prefix}.{name.format(self.router)}" for name in _BIASES]
            name = next((name for name in names if name in self.files), names[0])
            made["gate_bias"] = (_alone(Part(name, ((experts,), (1, experts)), FLOATS)), wide)
        if config.router_bias:
            made["logit_bias"] = (_alone(Part(f"{router}.bias", ((experts,),), FLOATS)), wide)
        if config.router == "hash":
            table = Part(f"{router}.tid2eid", ((config.vocab_size, config.top_k),), (torch.int64, torch.int32))
            made["tid2eid"] = (_alone(table), lambda ids: _expert_ids(table.name, ids, config.num_experts))
        for stored, _ in made.values():
            for part in stored.parts:
                self.files.check(part)  # config's number of experts must equal the tensor's
        return made

    def _stored(self, shapes: dict[str, tuple[int, int]]) -> dict[str, Stored]:
        """Return the storage of matrices (N, K), by name."""
        made = self.quantized.stored(self.files, shapes)
        for name, shape in shapes.items():
            fp4 = self.fp8.fp4_experts and ".experts." in name
            absent = name in self.files and not self.files.is_here(name)
            if name not in made and fp4 and (absent or self.files.dtype(name) in INTEGERS):
                made[name] = fp4_matrix(self.files, name, shape)
            elif name not in made:
                made[name] = self._with_fused_scales(name, shape) or float_matrix(self.files, name, shape, self.fp8)
        return made

    def _with_fused_scales(self, name: str, shape: tuple[int, int]) -> Stored | None:
        """Return the storage of an expert's fp8 matrix with fused scales, as transformers 5 saves it, or None."""
        base, _, part, _ = name.rsplit(".", 3)
        at = next((style.index(part) for style in _EXPERT_STYLES if part in style), 2)
        scales, place = f"{base}.{'down' if at == 2 else 'gate_up'}_proj_scale_inv", (0, 1) if at == 2 else (at, 2)
        if scales not in self.files or (self.files.is_here(name) and self.files.dtype(name) != FP8):
            return None
        return with_fused_scales(name, shape, scales, self.config.num_experts, place, self.fp8)

    def _experts(self) -> list[_Experts]:
        """Return the storage of each expert, from the names of tensors."""
        row, inner, base = self.config.row_size, self.config.moe_intermediate_size, f"{self.prefix}.experts"
        if (stored := self._fused(base, row, inner)) is not None:
            return [_Experts([(stored[0], e)], [(stored[1], e)]) for e in range(self.config.num_experts)]
        found = self._style([f"{base}.0"])
        if found is None:
            own, other = (style[2 - self._wide] for style in _EXPERT_STYLES)
            fused = f"{self.prefix}.{_FUSED[self._wide][0][0]}"
            wanted = f"{base}.0.{own}.weight (nor {base}.0.{other}.weight, nor the fused {fused})"
            raise self.files.missing(wanted, f"{self.prefix}.")
        return self._by_name([f"{base}.{expert}" for expert in range(self.config.num_experts)], found[1], row, inner)

    def _fused(self, base: str, row: int, inner: int) -> list[Stored] | None:
        """Return the storage of fused gate and up, and down, matrices of all experts, or None."""
        experts, width = self.config.num_experts, self._wide * inner
        if f"{base}.gate_up_proj_blocks" in self.files:
            sides = (
                mxfp4_matrix(f"{base}.gate_up_proj", (width, row)),
                mxfp4_matrix(f"{base}.down_proj", (row, inner)),
            )
            return [side.of_all(experts) for side in sides]
        for each in _FUSED[self._wide]:
            names = [f"{self.prefix}.{name}" for name in each]
            packed = any(f"{name}_packed" in self.files for name in names)
            integers = packed or any(self.files.is_here(n) and self.files.dtype(n) in INTEGERS for n in names)
            rule = "has integers in {} for all experts; int8 and int4 are read from experts.N.gate_proj.weight …, as "
            need(not integers, "directory", rule + "ModelSlim and compressed-tensors publish them", names[0])
            if names[0] in self.files:
                break
        else:
            return None
        # Either matrix may be square, but both only without a gate, so the two shapes determine the axis order.
        as_rows, as_columns = ((width, row), (row, inner)), ((row, width), (inner, row))
        there = [self.files.shape(name) for name in names]
        many = ((experts,), (self.config.all_experts,))  # LongCat's gate_up_proj has rows for its zero experts
        shapes = tuple(shape[1:] if shape[:1] in many else shape for shape in there)
        shown = " or ".join(f"{(experts, *first)} and {(experts, *last)}" for first, last in (as_rows, as_columns))
        rule = "has {} of {} and {} of {}; config.json's numbers make them {}: correct config.json, or pass config="
        need(shapes in (as_rows, as_columns), "directory", rule, names[0], there[0], names[1], there[1], shown)
        return [
            float_matrix(self.files, name, (shape[1], shape[2]), self.fp8).of_all(shape[0], shapes != as_rows)
            for name, shape in zip(names, there, strict=True)
        ]

    @property
    def _wide(self) -> int:
        """Number of matrices before the down matrix: gate and up, or up alone."""
        return 2 if Activation.of(self.config.activation).gated else 1

    def _style(self, bases: Iterable[str]) -> tuple[str, tuple[str, ...]] | None:
        """Return the first base with a matrix, and its naming style, or None."""
        for base in bases:
            for style in _EXPERT_STYLES:
                names = [f"{base}.{part}.weight" for part in style[2 - self._wide :]]
                if any(name in self.files or f"{name}_packed" in self.files for name in names):
                    return base, style
        return None

    def _by_name(self, bases: list[str], style: tuple[str, ...], row: int, inner: int) -> list[_Experts]:
        """Return the storage of experts with one tensor per matrix."""
        *first, last = style[2 - self._wide :]
        shapes = {f"{base}.{part}.weight": (inner, row) for base in bases for part in first}
        shapes |= {f"{base}.{last}.weight": (row, inner) for base in bases}
        stored = self._stored(shapes)
        return [
            _Experts([(stored[f"{base}.{part}.weight"], e) for part in first], [(stored[f"{base}.{last}.weight"], e)])
            for e, base in enumerate(bases)
        ]

    def _shared(self) -> list[_Experts]:
        """Return the storage of the dense shared expert, if any."""
        hidden, inner = self.config.hidden_size, self.config.shared_intermediate_size
        bases = [f"{self.prefix}.{base}" for base in _SHARED]
        base, style = self._style(bases) or (bases[0], _EXPERT_STYLES[0])
        return self._by_name([base], style, hidden, inner) if inner else []

    def _biases(self) -> dict[str, Part]:
        """Return the experts' biases, if any."""
        if not self.config.expert_bias:
            return {}
        sizes = {"gate_up": self._wide * self.config.moe_intermediate_size, "down": self.config.row_size}
        base, experts = f"{self.prefix}.experts", self.config.num_experts
        return {f"{p}_bias": Part(f"{base}.{p}_proj_bias", ((experts, size),), FLOATS) for p, size in sizes.items()}

    # ---- rules checked on all ranks

    def _need_these(self, parts: Iterable[Part]) -> None:
        """Raise ArgumentError unless the block has exactly these tensors, with fitting headers."""
        unique = dict.fromkeys(parts)
        for part in unique:
            self.files.check(part, of_others=True)
        known = {part.name for part in unique}
        # transformers writes gates of LongCat's zero experts.
        empty = range(self.config.num_experts, self.config.all_experts)
        unread = tuple(f"{self.prefix}.experts.{expert}." for expert in empty)
        rule = "has {}, which a layer with config.json's numbers does not use: correct config.json, or pass config="
        for name in self.files.below(f"{self.prefix}."):
            need(name in known or name.startswith(unread), "directory", rule, name)

    def _kept_bits(self, experts: list[_Experts]) -> int:
        kept = {expert.kept for expert in experts}
        if self.dequantize or self.config.expert_bias or len(kept) != 1:
            return 0
        (*first, down) = kept.pop()
        bits = {first[0][0], down[0]} if len(set(first)) == 1 else {0}
        sides = self.config.row_size, self._wide * self.config.moe_intermediate_size
        packs = all(side % IN_WORD == 0 for side in sides)
        return bits.pop() if bits == {8} or (bits == {4} and packs) else 0

    def _have_zeros(self, experts: list[_Experts]) -> bool:
        """Return whether every expert's zero is code 0; reads all offsets, so that all ranks agree."""
        zeros = [stored.zero for expert in experts for stored, _ in (*expert.gate_up, *expert.down)]
        rule = "has {} in a file that is missing, and every rank needs it: download it, or pass dequantize=True"
        for zero in filter(None, zeros):
            need(self.files.is_here(zero.name), "directory", rule, zero.name)
            if bool(self.files.take(zero).any()):
                return False
        return True

    # ---- the data of one rank

    def _coded(self, experts: list[_Experts], own: range) -> dict[str, Tensor] | None:
        """Return codes and scales of experts that stay int8 or int4, as after ``quantize_``; None: floats."""
        bits = self._kept_bits(experts)
        if not bits or not self._have_zeros(experts):
            return None
        made: dict[str, list[Tensor]] = {}
        for expert in own:
            for name, side in (("w_gate_up", experts[expert].gate_up), ("w_down", experts[expert].down)):
                coded = [stored.read_codes(self.files) for stored, _ in side]
                for part, tensor in _joined(name, coded, bits == 4).items():
                    made.setdefault(part, []).append(tensor)
        return {name: torch.stack(tensors) for name, tensors in made.items()}

    def _floats(self, experts: list[_Experts], row: int, inner: int) -> dict[str, Tensor]:
        """Return w_gate_up (L, R, 2I) and w_down (L, I, R) of experts."""
        made = {
            "w_gate_up": torch.empty(len(experts), row, self._wide * inner, dtype=self.dtype, device="cpu"),
            "w_down": torch.empty(len(experts), inner, row, dtype=self.dtype, device="cpu"),
        }
        for number, expert in enumerate(experts):
            for out, side in ((made["w_gate_up"][number], expert.gate_up), (made["w_down"][number], expert.down)):
                for part, (stored, place) in zip(out.chunk(len(side), 1), side, strict=True):
                    part.copy_(stored.read(self.files, place).t())
        return made


def _alone(part: Part) -> Stored:
    return Stored((part,), lambda value: value)


def _expert_ids(name: str, ids: Tensor, experts: int) -> Tensor:
    there = bool(((ids >= 0) & (ids < experts)).all())
    need(there, "directory", "has {} with ids that are not 0 .. {}: download it again", name, experts - 1)
    return ids.to(torch.int32)


def _joined(name: str, coded: list[Coded], int4: bool) -> dict[str, Tensor]:
    """Return one expert's codes (K, N) of matrices side by side, with their scales, and of int4 the correction."""
    codes = torch.cat([each.codes for each in coded]).t().contiguous()
    if not int4:
        return {name: codes, f"{name}_scale": torch.cat([each.scale.reshape(-1) for each in coded])}
    scale = torch.cat([each.scale for each in coded]).t().contiguous()
    given = [each.correction for each in coded if each.correction is not None]
    correction = torch.cat(given) if len(given) == len(coded) else correction_of(codes, scale)
    return {name: pack_int4(codes), f"{name}_scale": scale, f"{name}_correction": correction}
