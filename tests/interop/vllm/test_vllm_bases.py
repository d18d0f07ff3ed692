"""vLLM's parts are of the classes of the caller's release; a pair is selected, or refused."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_runs import Clusters
from vllm_parts import KINDS, E, pair, part_of, three_calls

from ascend_moe.errors import ArgumentError
from ascend_moe.interop import vllm
from ascend_moe.interop.vllm import bases, make_experts, make_prepare_finalize


def mock_mk(*, newest: bool) -> Any:
    """A module of abstract classes with the names of one of vLLM's releases."""

    def abstract(*names: str) -> type:
        return type("Base", (ABC,), {name: abstractmethod(lambda self: None) for name in names})

    way = (
        "prepare",
        "finalize",
        "activation_format",
        "topk_indices_dtype",
        "max_num_tokens_per_rank",
        "num_dispatchers",
    )
    experts = ("workspace_shapes", "apply", "finalize_weight_and_reduce_impl")
    own = {"FusedMoEActivationFormat": bases.FusedMoEActivationFormat, "ExpertTokensMetadata": SimpleNamespace}
    if not newest:
        old = ("activation_formats", "supports_chunking", "supports_expert_map")
        own |= {"FusedMoEPrepareAndFinalize": abstract(*way)}
        own |= {"FusedMoEPermuteExpertsUnpermute": abstract(*experts, *old)}
        own |= {"FusedMoEModularKernel": vllm.FusedMoEModularKernel}
        return SimpleNamespace(**own)
    asked = ("current_device", "no_act_and_mul", "quant_scheme", "activation", "parallel_config")
    own |= {"FusedMoEPrepareAndFinalize": abstract(*way)}
    own |= {"FusedMoEPrepareAndFinalizeModular": abstract(*way, "output_is_reduced")}
    own |= {"FusedMoEExpertsModular": abstract(*experts, "activation_format", *(f"_supports_{name}" for name in asked))}
    own |= {"FusedMoEKernel": lambda way, experts: (way, experts)}
    return SimpleNamespace(**own)


@pytest.mark.parametrize("newest", [False, True])
def test_classes_are_of_the_callers_bases(clusters: Clusters, newest: bool) -> None:
    mk, war = mock_mk(newest=newest), SimpleNamespace(TopKWeightAndReduceDelegate=lambda: "theirs")
    names = ("FusedMoEPrepareAndFinalizeModular", "FusedMoEExpertsModular")
    old = ("FusedMoEPrepareAndFinalize", "FusedMoEPermuteExpertsUnpermute")

    def run(rank: int, group: str) -> None:
        for kind in KINDS:
            config = {"group_name": group, "rank": 0, "world": 1, "num_experts": E, "kind": kind, "mk": mk, "war": war}
            way = vllm.maybe_make_prepare_finalize(config)
            experts = vllm.select_gemm_impl(config, way)
            for made, name in zip((way, experts), names if newest else old, strict=True):
                assert isinstance(made, getattr(mk, name))
            assert experts.finalize_weight_and_reduce_impl() == "theirs"
            assert way.activation_format == experts.activation_format() == experts.activation_formats[0]
            assert (way.num_dispatchers(), way.output_is_reduced()) == (1, True)
            assert way.max_num_tokens_per_rank() == (512 if kind in ("mc2", "batched") else None)
            assert not experts.supports_chunking() and experts.supports_expert_map() and experts.a2_scale is None
            assert experts._supports_activation(SimpleNamespace(value="silu")) and not experts._supports_activation(
                "situ"
            )
            int8 = SimpleNamespace(dtype=torch.int8)
            assert experts._supports_quant_scheme(None, None) and experts._supports_quant_scheme(int8, int8)
            assert not experts._supports_quant_scheme(int8, None)
        kernel = vllm.select(config)
        assert kernel[0].handle.max_tokens == 512 if newest else isinstance(kernel, vllm.FusedMoEModularKernel)

    clusters[1].run(run)
    with pytest.raises(ArgumentError, match="mk has none of FusedMoEPrepareAndFinalizeModular"):
        make_prepare_finalize(torch, None, "g", 0, 1, E)


def test_ours_have_the_same_names() -> None:
    way, experts = pair("mc2", 0, 1, "a group that is not opened yet")
    assert isinstance(way, vllm.FusedMoEPrepareAndFinalize) and isinstance(way, vllm.FusedMoEPrepareAndFinalizeModular)
    assert isinstance(experts, vllm.FusedMoEPermuteExpertsUnpermute) and isinstance(
        experts, vllm.FusedMoEExpertsModular
    )
    base = vllm.FusedMoEPrepareAndFinalize
    assert way.has_prepare_no_receive() and not base.has_prepare_no_receive(way)
    assert inspect.signature(base.prepare_no_receive) == inspect.signature(type(way).prepare_no_receive).replace(
        return_annotation="ReceiverType"
    )
    with pytest.raises(NotImplementedError, match="has no prepare_no_receive; call prepare"):
        base.prepare_no_receive(way, *[None] * 7)
    meta = vllm.ExpertTokensMetadata.make_from_list([1, 0, 4], "cpu")
    assert meta.expert_num_tokens.tolist() == [1, 0, 4] and meta.expert_num_tokens_cpu.dtype == torch.int32


def test_selection_and_handles(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        manager = vllm.All2AllManager(group, rank, 2)
        handle = manager.get_handle({"num_experts": E})
        assert handle is manager.get_handle({"kind": "batched", "num_experts": E, "max_num_tokens": 512})
        assert handle is not manager.get_handle({"num_experts": E, "max_num_tokens": 16})
        others = [manager.get_handle({"kind": kind, "num_experts": E}) for kind in ("alltoall", "allgather")]
        assert len({id(each) for each in (handle, *others)}) == 3
        assert others[0] is manager.get_handle({"kind": "alltoall", "num_experts": E, "max_num_tokens": 16})
        kernel = vllm.select(vllm.MoEKernelConfig(group, rank, 2, E, manager=manager))
        assert kernel.prepare_finalize.handle is handle
        part = part_of(rank, 2, 4)
        assert torch.equal(kernel(*part.inputs()), three_calls(part, rank, 2, group, 4))
        own = vllm.init_prepare_finalize({"group_name": group, "rank": rank, "world": 2, "num_experts": E})
        assert type(own) is type(kernel) and torch.equal(own(*part.inputs()), kernel(*part.inputs()))
        big = vllm.select(SimpleNamespace(group_name=group, rank=rank, world=2, num_experts=E, max_num_tokens=9000))
        assert big.prepare_finalize.max_num_tokens_per_rank() is None
        assert torch.equal(big(*part.inputs()), kernel(*part.inputs()))
        manager.destroy()
        assert handle is not manager.get_handle({"num_experts": E})
        for wrong, rule in (({"kinds": "mc2"}, "kwargs is 'kinds'"), ({"kind": "pplx", "num_experts": E}, "'pplx'")):
            with pytest.raises(ArgumentError, match=rule):
                manager.get_handle(wrong)
        for config, rule in (({"group_name": group}, "config has no rank, which"), ({"ranks": 2}, "config is 'ranks'")):
            with pytest.raises(ArgumentError, match=rule):
                vllm.select(config)

    clusters[2].run(run)


def test_what_does_not_fit_is_not_joined(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        for kind in KINDS:
            way, _ = pair(kind, 0, 1, group)
            wrong = "standard" if kind == "batched" else "batched"
            with pytest.raises(ArgumentError, match=r"fused_experts do not fit: Ascend.* rows; make both"):
                vllm.FusedMoEModularKernel(way, make_experts(None, None, None, None, E, wrong))
            config = vllm.MoEKernelConfig(group, 0, 1, E, kind=kind, experts_kind=wrong)
            with pytest.raises(ArgumentError, match="do not fit"):
                vllm.select(config)

    clusters[1].run(run)
    for rank, world, kind, rule in (
        (0, 3, "mc2", "num_experts is 8, not a positive multiple of the 3 ranks"),
        (2, 2, "mc2", "rank is 2; it must be 0..1, one of the 2 ranks"),
        (0, 1, "pplx", "kind is 'pplx'; need one of mc2, alltoall, allgather, batched"),
        (0, 1, "alltoall", "group_ep is 'nobody', which names no open group"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            make_prepare_finalize(None, None, "nobody", rank, world, E, kind)
    with pytest.raises(ArgumentError, match=r"max_num_tokens is 5000; need 1\.\.4096"):
        make_prepare_finalize(None, None, "nobody", 0, 1, E, max_num_tokens=5000)
