"""The built-in operators of the virtual NPU under an unmodified torch_npu: as on the CPU, or an error."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch_npu
from npu_runs import raises, record_operators, run_checks, unexpected
from operator_cases import Case, cases, difference, problem_of

from ascend_vnpu import library_folder, operators

NPU = "npu:0"


def on_both(case: Case) -> str:
    """Returns what differs between the CPU and the NPU."""
    expected, found = case.results("cpu"), case.results(NPU)
    if {tensor.device.type for tensor in found} != {"npu"}:
        return f"results are on {[tensor.device for tensor in found]}"
    return difference(expected, [tensor.cpu() for tensor in found], case.exact)


def check_the_comparison_sees_differences() -> None:
    one = [torch.ones(3, dtype=torch.bfloat16)]
    assert difference(one, [torch.ones(3, dtype=torch.bfloat16)]) == ""
    assert difference(one, [torch.tensor([1, 1, 1.0078125], dtype=torch.bfloat16)]) != ""
    for other in ([torch.ones(3)], [torch.ones(4, dtype=torch.bfloat16)], [1.05 * one[0]], []):
        assert difference(one, other, exact=False) != ""


def check_torchs_operators_give_what_they_give_on_the_cpu() -> None:
    found = {case.name: problem_of(on_both, case) for case in cases()}
    assert not any(found.values()), {name: problem for name, problem in found.items() if problem}
    assert len(found) > 5000, len(found)


def bad_index() -> torch.Tensor:
    """An error that only the data show."""
    return torch.embedding(torch.ones(3, 4).npu(), torch.tensor([1, 7]).npu())


def check_an_error_in_the_data_is_raised_once_by_whatever_waits() -> None:
    event = torch.npu.Event()
    waits: list[Callable[[torch.Tensor], object]] = [
        lambda y: y.cpu(),
        lambda y: y.sum().item(),
        lambda y: torch.npu.current_stream().synchronize(),
        lambda y: (event.record(), event.synchronize()),
        lambda y: torch.npu.synchronize(),
    ]
    for wait in waits:
        with raises(r"aclnnEmbedding: IndexError: index out of range in self|507035"):
            wait(bad_index())
        torch.npu.synchronize()
        assert (torch.ones(3).npu() + 1).tolist() == [2.0, 2.0, 2.0]


def check_an_operator_that_is_not_there_is_named() -> None:
    x, w = torch.ones(2, 4, dtype=torch.float16).npu(), torch.ones(4, 4, dtype=torch.float16).npu()
    with raises(r"aclnnFFN\w* or aclnnFFN\w*GetWorkspaceSize not in libopapi.so"):
        torch_npu.npu_ffn(x, w, w, "relu")
    with raises(r"operator Elu has no aclnn entry here"):
        torch.nn.functional.elu(torch.ones(3).npu())
    assert (torch.ones(1).npu() * 3).item() == 3


def check_threads_compute_side_by_side() -> None:
    def work(seed: int) -> None:
        torch.npu.set_device(0)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            a = torch.randint(-4, 5, (8, 8), generator=generator).float()
            assert torch.equal((a.npu() @ a.npu() + seed).cpu(), a @ a + seed)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def check_calls_leave_no_memory_behind() -> None:
    x = torch.ones(64, 64).npu()

    def resident() -> int:
        torch.npu.synchronize()
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def calls(number: int) -> None:
        for _ in range(number):
            y = x[x[:, 0] > 0]
            torch.stack([y, y + 1]).sum((0, 1))

    calls(50)
    for _ in range(10000):  # torch_npu's queue is a ring of 8192 entries: touch them all
        x + 1
    # A leak would grow in every round: 32 bytes of each of 1000 operators.
    growths = []
    for _ in range(4):
        before = resident()
        calls(150)
        growths.append(resident() - before)
    assert min(growths) < 32 << 10, growths


def check_random_numbers_follow_the_seed() -> None:
    n, threes, twos, quarters = (1000,), *(torch.full((1000,), v, device=NPU) for v in (3.0, 2.0, 0.25))
    draws: list[tuple[Callable[[], torch.Tensor], float, float]] = [  # each with its mean and deviation
        (lambda: torch.randn(n, device=NPU), 0, 1),
        (lambda: torch.rand(n, device=NPU), 0.5, 0.289),
        (lambda: torch.randint(0, 5, n, device=NPU), 2, 1.414),
        (lambda: torch.randperm(50, device=NPU), 24.5, 14.577),
        (lambda: torch.empty(n, device=NPU).normal_(3, 2), 3, 2),
        (lambda: torch.normal(threes, 2.0), 3, 2),
        (lambda: torch.normal(3.0, twos), 3, 2),
        (lambda: torch.normal(threes, twos), 3, 2),
        (lambda: torch.normal(3.0, 2.0, n, device=NPU), 3, 2),
        (lambda: torch.bernoulli(quarters), 0.25, 0.433),
        (lambda: torch.empty(n, device=NPU).bernoulli_(0.25), 0.25, 0.433),
        (lambda: torch.multinomial(torch.ones(8, device=NPU), 8), 3.5, 2.449),
        (lambda: torch.empty(n, dtype=torch.int32, device=NPU).random_(), 2**30, 2**30 / 3**0.5),
    ]
    seen: list[list[torch.Tensor]] = []
    for _ in range(2):
        torch.manual_seed(7)
        seen.append([draw().cpu() for draw, _, _ in (*draws, draws[0])])
    assert all(torch.equal(one, two) for one, two in zip(*seen, strict=True))
    for number, (found, (_, mean, deviation)) in enumerate(zip(seen[0], draws, strict=False)):
        assert abs(float(found.double().mean()) - mean) < 0.2 * deviation, number
        assert 0.9 * deviation < float(found.double().std()) < 1.1 * deviation, number
    _, uniform, integers, order, *_, chosen, _, other = seen[0]
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    assert integers.unique().tolist() == [0, 1, 2, 3, 4] and sorted(order.tolist()) == list(range(50))
    assert sorted(chosen.tolist()) == list(range(8)) and not torch.equal(seen[0][0], other)


def check_a_captured_graph_computes_anew_at_each_replay() -> None:
    if os.environ.get("TASK_QUEUE_ENABLE") == "2":
        return  # torch_npu refuses to capture in this mode
    graph, x, y = torch.npu.NPUGraph(), torch.ones(4).npu(), torch.zeros(4).npu()
    with torch.npu.graph(graph):
        y.copy_(x * 2 + 1)
        noise = torch.cat([torch.rand(4, device=NPU), torch.randn(4, device=NPU)])
        dice = torch.randint(0, 1 << 20, (4,), device=NPU)
    seen = []
    for value in (5, 7):
        x.fill_(value)
        graph.replay()
        seen.append((y.tolist(), noise.cpu(), dice.cpu()))
    assert [first for first, _, _ in seen] == [[11.0] * 4, [15.0] * 4]
    assert not (seen[0][1] == seen[1][1]).any() and not torch.equal(seen[0][2], seen[1][2])


def check_a_default_device_does_not_reach_the_arithmetic() -> None:
    torch.set_default_device("npu")
    try:
        x = torch.arange(6.0).reshape(2, 3)
        assert x.device.type == "npu"
        assert torch.bincount(torch.tensor([1, 1, 3])).tolist() == [0, 2, 0, 1]
        assert torch.nn.functional.one_hot(torch.tensor([1]), 3).tolist() == [[0, 1, 0]]
        assert torch.nn.functional.layer_norm(x, (3,)).device.type == "npu"
    finally:
        torch.set_default_device("cpu")


def check_norms_and_quantization_follow_their_formulas() -> None:
    x, gamma = torch.randn(4, 8), torch.rand(8)
    want = torch.nn.functional.rms_norm(x, (8,), gamma, eps=1e-3)
    y, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), epsilon=1e-3)
    assert torch.allclose(y.cpu(), want, atol=1e-6) and rstd.shape == (4, 1)
    assert torch.allclose(rstd.cpu(), torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3), atol=1e-6)
    y, _, total = torch_npu.npu_add_rms_norm(x.npu(), x.npu(), gamma.npu(), 1e-3)
    assert torch.equal(total.cpu(), x + x)
    assert torch.allclose(y.cpu(), torch.nn.functional.rms_norm(x + x, (8,), gamma, eps=1e-3), atol=1e-6)
    scale, offset = torch.full((8,), 30.0), torch.full((8,), 2.0)
    codes = torch_npu.npu_quantize(x.npu(), scale.npu(), offset.npu(), torch.qint8, -1, False)
    assert torch.equal(codes.cpu(), (x * 30 + 2).round().clamp(-128, 127).to(torch.int8))
    zero = torch.full((8,), 3, dtype=torch.int32)
    codes = torch_npu.npu_quantize(x.npu(), (scale / 1000).npu(), zero.npu(), torch.qint8, 1, True)
    assert torch.equal(codes.cpu(), ((x / 0.03).round() + 3).clamp(-128, 127).to(torch.int8))


def check_operators_are_exported_registered_and_called_by_torch_npu() -> None:
    """After all other checks: only a call by torch_npu shows a wrong type in the table of entries."""
    path = library_folder() / "libopapi.so"
    exported = re.findall(rb"(?<=\0)((?:aclnn|Atb)\w+)GetWorkspaceSize(?=\0)", path.read_bytes())
    entries = {name for name in operators.OPERATORS if not name.startswith("atb")}  # ATB's operations have none
    assert {name.decode() for name in exported} == entries
    library = ctypes.CDLL(str(path))
    for name in entries:
        assert hasattr(library, name) and hasattr(library, f"{name}GetWorkspaceSize"), name
    if not {"TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING"} & set(os.environ):  # other modes call fewer
        assert not unexpected("plain"), unexpected("plain")


if __name__ == "__main__":
    record_operators()
    run_checks()
