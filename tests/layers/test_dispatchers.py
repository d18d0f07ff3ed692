"""The torch.distributed dispatchers against the reference, bit for bit, and their errors on every rank."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from bad_arguments import refused
from gloo_ranks import threads
from op_runs import RankRun, check_sums

import ascend_moe.reference as ref
from ascend_moe import npu, plan
from ascend_moe.call import MOST_SPECIAL, SpecialExperts
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import AllGatherDispatcher, AllToAllDispatcher, Dispatched, MC2Dispatcher
from ascend_moe.dispatchers.base import PendingCall
from ascend_moe.dispatchers.rows import quantize_dispatch_rows
from ascend_moe.errors import ConfigMismatch, InvalidExpertId, RoutingOverflow
from ascend_moe.reference.cases import Case, draw

KINDS = [AllToAllDispatcher, AllGatherDispatcher]
WINDOWS = ["v1", "v1 started", "v2", "v2 started"]
SEEDS = range(60)


def make_case(seed: int, world: int) -> Case:
    """Any kind of call. Rows of any length will do here, and more ids a token than there are experts."""
    case = draw(
        seed,
        world=(world,),
        contract=(2,),
        width=(16, 32, 48, 7),
        batch=(1, 3, 6),
        tp_world_size=(0,),
        tail=(False,),
        comm_quant_mode=(0,),
        batches=("equal", "unequal", "zero rank"),
        ids=("distinct", "any", "minus", "hot", "mixed", "bad", "overflow"),
    )
    if case.world != world or (seed % 12 == 0 and case.ids != "bad"):  # an overflow takes two ranks
        return replace(case, world=world, ids="any", topk=8)
    return case


def call(dispatcher: Any, case: Case, rank: int) -> tuple[Dispatched, torch.Tensor, torch.Tensor]:
    """One rank's dispatch, experts and combine: (dispatched, expert rows, result)."""
    one = case.inputs[rank]
    sent = dispatcher.dispatch(
        one.x,
        one.expert_ids,
        scales=one.scales,
        x_active_mask=one.x_active_mask,
        quant_mode=case.quant_mode,
        expert_token_nums_type=case.expert_token_nums_type,
        expert_scales=one.expert_scales if case.weights else None,
        **({"max_tokens": case.global_bs // case.world} if rank % 2 else {"global_bs": case.global_bs}),
    )
    rows = case.expert_rows(rank, sent.expand_x, sent.dynamic_scales, sent.ep_recv_counts)
    rows = torch.cat([rows, torch.full((3, case.hidden), float("nan"), dtype=rows.dtype)])
    weights = None if case.plain else one.expert_scales
    return sent, rows, dispatcher.combine(rows, sent, weights, **one.local_addends)


def numbers(case: Case) -> dict[str, int]:
    """The case's special experts, as the dispatchers take them."""
    return dict(zip(SpecialExperts._fields, case.special, strict=True))


class InTwoSteps:
    """A dispatcher's begin and finish as its calls."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return self._dispatcher.begin_dispatch(*args, **kwargs).finish()

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        started = self._dispatcher.begin_combine(*args, **kwargs)
        assert started.finish() is started.finish()
        return started.finish()


def outcome(dispatcher: Any, case: Case, rank: int) -> Any:
    try:
        return call(dispatcher, case, rank)
    except (InvalidExpertId, RoutingOverflow) as error:
        return error


def check_outcomes(case: Case, outcomes: list[Any], contract: str = "v1") -> None:
    """Every rank equals the reference, or raises the error that the reference predicts."""
    fault = case.fault()
    if fault is not None:
        named = {name: value for name, value in vars(fault).items() if value is not None and name != "kind"}
        for found in outcomes:
            assert type(found).__name__ == fault.kind, f"{case}: {found!r}, expected {fault}"
            assert found.details | named == found.details
        return
    errors = [found for found in outcomes if isinstance(found, BaseException)]
    assert not errors, f"{case}: {errors[0]!r}"
    expected, none, runs = case.dispatched(), torch.empty(0, dtype=torch.int32), []
    for rank, (sent, rows, result) in enumerate(outcomes):
        seven = (sent.expand_x, sent.dynamic_scales, sent.expand_idx, sent.expert_token_nums)
        seven += (sent.ep_recv_counts, none, sent.expand_scales)
        report = ref.validate("dispatch", seven, expected[rank], rank=rank, contract=contract)
        assert report.ok, f"{case}: {report.text}"
        runs.append(RankRun(seven, rows, result, []))
    check_sums(case, runs, expected)


@pytest.mark.parametrize("contract", ["v1", "v2"])
def test_counts_with_weights_have_one_number_a_local_expert_and_rank(contract: str, clusters: Any) -> None:
    """From 8 ranks on the op's tensor is longer."""

    def body(rank: int, group: str) -> torch.Tensor:
        dispatcher = MC2Dispatcher(group, 8, rank, 16, contract)
        ids, weights = torch.tensor([[rank, 15], [0, rank]], dtype=torch.int32), torch.ones(2, 2)
        sent = dispatcher.dispatch(torch.ones(2, 32), ids, expert_scales=weights)
        dispatcher.combine(sent.expand_x, sent, weights)
        return sent.ep_recv_counts

    counts = clusters[8].run(body)
    assert {len(each) for each in counts} == {16} and sum(int(each[-1]) for each in counts) == 32


def made(way: Any, rank: int, group: Any, case: Case) -> Any:
    """A dispatcher of ``KINDS``, or of windows by its contract, whose calls may begin and finish."""
    if way in KINDS:
        return way(group, case.experts, **numbers(case))
    contract, _, started = way.partition(" ")
    dispatcher = MC2Dispatcher(group, case.world, rank, case.experts, contract, **numbers(case))
    assert dispatcher.sends_first == (contract == "v2")
    return InTwoSteps(dispatcher) if started else dispatcher


@pytest.mark.parametrize(
    ("way", "world", "over"), [*product(KINDS, (1, 2, 3), ("gloo",)), *product((*KINDS, *WINDOWS), (2,), ("windows",))]
)
def test_every_dispatcher_equals_the_reference(way: Any, world: int, over: str, clusters: Any) -> None:
    """Over a process group, and over the windows of threads that have none; errors on every rank."""
    cases, kinds = [make_case(seed * 10 + world, world) for seed in SEEDS], set()
    for case in cases:
        kinds |= {case.mask, case.ids, case.quant, case.dtype, case.batches, f"shared {case.shared}"}
        kinds |= {name for name, number in numbers(case).items() if number and case.fault() is None}
        kinds |= {f"alphas {case.alphas}"} if case.const_expert_num else set()
    wanted = {"token", "pair", "minus", "hot", "smooth", "shared 2", "fp16", "unequal", "zero rank"}
    wanted |= {"bad", "overflow", "alphas 1", "alphas 2", *SpecialExperts._fields}
    assert wanted <= kinds or world == 1, f"the cases leave out {wanted - kinds}"
    if way in WINDOWS:  # they take rows of whole 32 bytes, and K up to E
        cases = [case for case in cases if case.hidden % 16 == 0 and case.topk <= case.experts]
        if way.startswith("v1"):  # its combine takes no shared expert, and knows no special ones
            cases = [replace(case, shared=0) for case in cases if not sum(case.special)]
    ranks = threads(world) if over == "gloo" else clusters[world]
    by_rank = ranks.run(lambda rank, group: [outcome(made(way, rank, group, case), case, rank) for case in cases])
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        check_outcomes(case, outcomes, way[:2] if way in WINDOWS else "v1")


def test_windows_survive_calls_that_are_refused(clusters: Any) -> None:
    refused("contract", MC2Dispatcher, "g", 2, 0, 4, "v3")
    refused("zero_copy", MC2Dispatcher, "g", 2, 0, 4, zero_copy=True, contract="v1")
    refused("zero_copy", MC2Dispatcher, "g", 2, 0, 4, zero_copy=True, comm_alg="window")
    refused("comm_alg", MC2Dispatcher, "g", 2, 0, 4, contract="v1", comm_alg="direct")
    refused("const_expert_num", MC2Dispatcher, "g", 2, 0, 4, contract="v1", const_expert_num=2)
    refused("copy_expert_num", MC2Dispatcher, "g", 2, 0, 4, copy_expert_num=-1)

    def body(rank: int, group_ep: str) -> torch.Tensor:
        one, other = (MC2Dispatcher(group_ep, 2, rank, 4, contract) for contract in ("v1", "v2"))
        sent = one.dispatch(**arguments())
        combined = (sent.expand_x, sent, torch.ones(2, 2))
        refused("dispatched", other.combine, *combined)
        refused("shared_expert_x", one.combine, *combined, shared_expert_x=torch.ones(2, 16))
        refused("ori_x", one.combine, *combined, ori_x=torch.ones(2, 16))
        return one.combine(*combined)

    for result in clusters[2].run(body):
        assert torch.equal(result, torch.full((2, 16), 2.0))


def arguments(bs: int = 2, topk: int = 2, hidden: int = 16, experts: int = 4) -> dict[str, Any]:
    ids = torch.arange(bs * topk, dtype=torch.int32).view(bs, topk) % experts
    return {"x": torch.ones(bs, hidden), "expert_ids": ids}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "change", "ours", "theirs"),
    [
        ("H", arguments(hidden=24), 16, 24),
        ("K", arguments(topk=3), 2, 3),
        ("E", {"experts": 6}, 4, 6),
        ("maxBS", arguments(bs=3), 2, 3),
        ("maxBS", {"global_bs": 10}, 2, 5),
        ("dtype", {"x": torch.ones(2, 16, dtype=torch.float16)}, "float32", "float16"),
        ("quant_mode", {"quant_mode": 2}, 0, 2),
        ("expert_scales", {"expert_scales": torch.ones(2, 2)}, "None", "given"),
        ("copy_expert_num", {"special": {"copy_expert_num": 3}}, 0, 3),
    ],
)
def test_ranks_that_differ_get_an_error_and_go_on(
    kind: Any, field: str, change: dict[str, Any], ours: Any, theirs: Any
) -> None:
    def body(rank: int, group: Any) -> Any:
        given = {"experts": 4, **arguments(), **(change if rank == 1 else {})}
        dispatcher = kind(group, given.pop("experts"), **given.pop("special", {}))
        with pytest.raises(ConfigMismatch) as caught:
            dispatcher.dispatch(**given)
        sound = kind(group, 4).dispatch(**arguments())  # the group is still usable
        return caught.value, int(sound.ep_recv_counts[-1])

    (zero, rows0), (one, rows1) = threads(2).run(body)
    assert (zero.field, zero.rank, zero.ours, zero.theirs) == (field, 1, ours, theirs)
    assert (one.field, one.rank, one.ours, one.theirs) == (field, 0, theirs, ours)
    assert field in str(zero) and str(ours) in str(zero) and str(theirs) in str(zero)
    assert field != "maxBS" or f"the largest batch on every rank, here {2 * max(ours, theirs)}" in str(zero)
    assert rows0 + rows1 == 8


BAD: list[tuple[str, dict[str, Any]]] = [
    ("x", {"x": None}),
    ("x", {"x": torch.ones(2, 16, 1)}),
    ("x", {"x": torch.ones(2, 16, dtype=torch.float64)}),
    ("expert_ids", {"expert_ids": [[0, 1], [1, 2]]}),
    ("expert_ids", {"expert_ids": torch.zeros(2, 2, dtype=torch.int64)}),
    ("expert_ids", {"expert_ids": torch.zeros(3, 2, dtype=torch.int32)}),
    ("expert_ids", {"expert_ids": torch.zeros(2, 0, dtype=torch.int32)}),
    ("quant_mode", {"quant_mode": 1}),
    ("scales", {"scales": torch.ones(4, 16)}),
    ("scales", {"scales": torch.ones(3, 16), "quant_mode": 2}),
    ("x_active_mask", {"x_active_mask": torch.ones(2)}),
    ("x_active_mask", {"x_active_mask": torch.ones(3, dtype=torch.bool)}),
    ("global_bs", {"global_bs": 3}),
    ("global_bs", {"global_bs": 2}),
    ("global_bs", {"global_bs": -4}),
    ("global_bs", {"global_bs": 4.0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 2, "global_bs": 4}),
    ("expert_scales", {"expert_scales": torch.ones(2, 3)}),
    ("expert_scales", {"expert_scales": torch.ones(2, 2).half()}),
    ("expert_token_nums_type", {"expert_token_nums_type": 2}),
]


@pytest.mark.parametrize("kind", KINDS)
def test_argument_error_then_retry(kind: Any) -> None:
    """A rank that alone sees a mistake raises before it sends; its corrected call joins the others."""

    def body(rank: int, group: Any) -> list[int]:
        dispatcher, totals = kind(group, 4), []
        for argument, change in BAD:
            if rank == 1:
                refused(argument, dispatcher.dispatch, **{**arguments(), **change})
            totals.append(int(dispatcher.dispatch(**arguments()).ep_recv_counts[-1]))
        return totals

    assert [sum(pair) for pair in zip(*threads(2).run(body), strict=True)] == [8] * len(BAD)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_of_combine_are_refused(kind: Any) -> None:
    own = {"ori_x": torch.ones(2, 16), "const_expert_v": torch.ones(1, 16)}
    own |= dict.fromkeys(("const_expert_alpha_1", "const_expert_alpha_2"), torch.ones(1))

    def body(rank: int, group: Any) -> torch.Tensor:
        dispatcher = kind(group, 2, **SpecialExperts(1, 1, 1).given)
        sent = dispatcher.dispatch(torch.ones(2, 16), torch.tensor([[0, 3], [4, 1]], dtype=torch.int32))
        good = {"expert_out": sent.expand_x, "dispatched": sent, "expert_scales": torch.ones(2, 2), **own}
        for argument, value in [
            ("expert_out", sent.expand_x[:-1]),
            ("expert_out", sent.expand_x[:, :8]),
            ("expert_out", sent.expand_x.half()),
            ("dispatched", Dispatched(*[torch.empty(0)] * 6)),
            ("dispatched", type(sent)(**{**vars(sent), "handle": None})),
            ("expert_scales", torch.ones(2, 3)),
            ("expert_scales", torch.ones(2, 2, dtype=torch.bfloat16)),
            ("shared_expert_x", torch.ones(2, 8)),
            *((name, None) for name in own),
            ("ori_x", torch.ones(2, 8)),
            ("ori_x", torch.ones(2, 16).half()),
            ("const_expert_alpha_1", torch.ones(2)),
            ("const_expert_alpha_2", torch.ones(1, 16)),
            ("const_expert_v", torch.ones(1)),
            ("const_expert_w", torch.ones(1)),
        ]:
            refused(argument, dispatcher.combine, **{**good, argument: value})
        return dispatcher.combine(**good, shared_expert_x=torch.ones(1, 2, 16))

    for result in threads(2).run(body):
        assert torch.equal(result, torch.tensor([[3.0], [4.0]]).expand(2, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_ids_are_not_looked_at(kind: Any) -> None:
    """test_every_dispatcher_equals_the_reference has the errors of ids that count."""
    bad, mask = torch.tensor([[0, 1], [7, -1]], dtype=torch.int32), torch.tensor([True, False])

    def body(rank: int, group: Any) -> int:
        smooth = {"scales": torch.ones(2, 16), "quant_mode": 2} if rank else {"quant_mode": 2}  # rows of pairs
        sent = kind(group, 2).dispatch(torch.ones(2, 16), bad, x_active_mask=mask, **smooth)
        return int(sent.ep_recv_counts[-1])

    assert threads(2).run(body) == [2, 2]


def test_wrong_arguments_of_constructors_are_refused() -> None:
    group = threads(2).groups[0]
    for kind in KINDS:
        refused("num_experts", kind, group, 3, says="multiple of the 2 ranks")
        refused("process_group", kind, None, 4, says="init_process_group")
    refused("num_experts", AllToAllDispatcher, group, 4096, says="2048")
    # Only windows have buffers for rows, and only where they were asked to.
    sent = Dispatched(*[torch.empty(0)] * 6)
    for dispatcher in (AllGatherDispatcher(group, 2), MC2Dispatcher("g", 2, 0, 4)):
        assert dispatcher.empty_expert_out(sent, torch.float32) is None


def test_a_misspelt_option_of_a_call_names_the_call() -> None:
    dispatcher = MC2Dispatcher("g", 2, 0, 4)
    for call in (dispatcher.dispatch, dispatcher.begin_dispatch):
        said = rf"^MC2Dispatcher\.{call.__name__}\(\) got an unexpected .* 'quant_mod'\. Did you mean 'quant_mode'\?$"
        with pytest.raises(TypeError, match=said):
            call(torch.ones(2, 16), torch.zeros(2, 1, dtype=torch.int32), quant_mod=2)
    for wrong, right in (("quant_mod", "quant_mode"), ("zero_copi", "zero_copy")):
        with pytest.raises(TypeError, match=rf"^MC2Dispatcher\(\) got .* '{wrong}'\. Did you mean '{right}'\?$"):
            MC2Dispatcher("g", 2, 0, 4, **{wrong: 1})


def test_special_rows_are_quantized_as_the_reference_does() -> None:
    tiny, huge, inf, nan = 1e-45, 3e38, float("inf"), float("nan")
    rows = [[0.0, -0.0], [tiny, -tiny], [huge, -huge], [inf, 1], [-inf, inf], [nan, 2], [nan, nan], [nan, 0]]
    rows += [[127, 0.5], [127, 1.5], [127, -2.5], [1 / 3, 1 / 7], [1e-40, 1]]
    table = torch.cat([torch.tensor(rows), torch.randn(200, 2, generator=torch.Generator().manual_seed(0))])
    codes, scales = quantize_dispatch_rows(table)
    for row, code, scale in zip(table, codes, scales, strict=True):
        want_code, want_scale = ref.quantize_row(row.numpy())
        assert code.tolist() == want_code.tolist(), row
        torch.testing.assert_close(scale, torch.tensor(want_scale), rtol=0, atol=0, equal_nan=True)


def test_rows_need_no_alignment() -> None:
    """Rows that start at an odd address still travel as words."""
    flat = torch.arange(1 + 2 * 6, dtype=torch.bfloat16)

    def body(rank: int, group: Any) -> torch.Tensor:
        dispatcher = AllToAllDispatcher(group, 2)
        sent = dispatcher.dispatch(flat[1:].view(2, 6), torch.tensor([[0], [1]], dtype=torch.int32))
        odd = torch.empty(1 + sent.expand_x.numel(), dtype=torch.bfloat16)
        odd[1:] = sent.expand_x.reshape(-1)
        return dispatcher.combine(odd[1:].view_as(sent.expand_x), sent, torch.ones(2, 1))

    for result in threads(2).run(body):
        assert torch.equal(result, flat[1:].view(2, 6))


def test_one_rank_alone_may_smooth_its_rows() -> None:
    """Its rows differ by expert, those of the others do not; both collectives bring the same bits."""
    gen = torch.Generator().manual_seed(3)
    xs = [torch.randn(4, 32, generator=gen).bfloat16() for _ in range(2)]
    ids = [torch.randint(-1, 4, (4, 2), dtype=torch.int32, generator=gen) for _ in range(2)]
    scales = torch.rand(4, 32, generator=gen) + 0.5

    def body(kind: Any, rank: int, group: Any) -> list[torch.Tensor]:
        dispatcher = kind(group, 4)
        sent = dispatcher.dispatch(xs[rank], ids[rank], scales=scales if rank else None, quant_mode=2)
        rows = (sent.expand_x.float() * sent.dynamic_scales[:, None]).bfloat16()
        return [sent.expand_x, sent.dynamic_scales, dispatcher.combine(rows, sent, torch.ones(4, 2))]

    ways = [threads(2).run(functools.partial(body, kind)) for kind in KINDS]
    for one, other in zip(*ways, strict=True):
        assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(one, other, strict=True))
    plain, _ = quantize_dispatch_rows(xs[0])
    first = [token for token in range(4) for each in ids[0][token].tolist() if each == 0]
    assert torch.equal(ways[0][0][0][: len(first)], plain[first])


@pytest.mark.parametrize("kind", [*KINDS, MC2Dispatcher.from_group])
def test_rows_are_kept_for_the_weights_gradients_only(kind: Any, group_ep: str) -> None:
    """combine without them keeps no rows until its backward."""
    dispatcher, kept = kind(group_ep, 2), []

    x = torch.randn(3, 16).requires_grad_()
    sent = dispatcher.dispatch(x, torch.tensor([[0], [1], [1]], dtype=torch.int32))
    for wanting in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.shape) or each, lambda each: each):
            dispatcher.combine(sent.expand_x, sent, torch.ones(3, 1, requires_grad=wanting))
        assert (torch.Size([3, 16]) in kept) == wanting


def test_the_old_name_of_a_dispatcher_still_works() -> None:
    from ascend_moe import dispatchers

    with pytest.warns(DeprecationWarning, match="WindowDispatcher is MC2Dispatcher now"):
        assert dispatchers.WindowDispatcher is MC2Dispatcher
    with pytest.raises(AttributeError, match="has no attribute 'NoDispatcher'"):
        _ = dispatchers.NoDispatcher


def test_the_most_tokens_and_special_experts_of_a_call_are_those_of_the_rules() -> None:
    limits = plan.limits()
    assert (MC2Dispatcher.max_batch, MOST_SPECIAL) == (limits["batch"], limits["special_experts"])


def test_the_call_that_has_only_sent_is_received_once_by_whoever_comes_first() -> None:
    received: list[str] = []

    def finish(name: str) -> str:
        received.append(name)
        if name == "lost":
            raise ValueError(name)
        return name

    way = PendingCall()
    way.wait()
    first = way.sent(lambda: finish("first"))
    way.wait()
    assert received == ["first"] and first() == first() == "first"
    second = way.sent(lambda: finish("second"))
    assert second() == "second" and received == ["first", "second"]
    lost = way.sent(lambda: finish("lost"))
    for again in (way.wait, lost):
        with pytest.raises(ValueError, match="lost"):
            again()
    way.wait()
    hook = PendingCall.of(Place("shared", 2, 0)).sent(lambda: finish("another object's"))
    PendingCall.of(Place("shared", 2, 1)).wait()
    assert received == ["first", "second", "lost", "lost"]
    PendingCall.of(Place("shared", 2, 0)).wait()
    assert hook() == "another object's" and received[4:] == ["another object's"]


@pytest.mark.parametrize("seed", range(60))
def test_no_option_is_lost_when_a_dispatcher_moves(seed: int) -> None:
    """A dispatcher that has moved has every attribute of one that is made for the new place."""
    draw = random.Random(seed)
    given: dict[str, Any] = {"contract": draw.choice(["v1", "v2"]), "ops": draw.choice([None, npu])}
    given["comm_quant_mode"] = draw.choice([0, 2])
    if given["contract"] == "v2":
        given["comm_alg"] = draw.choice(["", "auto", "direct", "window", "hierarchy"])
        names = [f"{kind}_expert_num" for kind in ("zero", "copy", "const")]
        given |= {name: draw.randrange(3) for name in draw.sample(names, draw.randrange(4))}
        may_lend = given["comm_alg"] in ("", "auto", "direct") and not given["comm_quant_mode"]
        given["zero_copy"] = may_lend and draw.random() < 0.5
    local, before, after = draw.randrange(1, 5), draw.randrange(2, 9), draw.randrange(1, 9)
    source = MC2Dispatcher("one", before, draw.randrange(before), local * before, **given)
    kept, rank = dict(vars(source)), draw.randrange(after)
    expected = MC2Dispatcher("another", after, rank, local * after, **given)
    assert vars(source.moved(Place("another", after, rank))) == vars(expected) and vars(source) == kept
