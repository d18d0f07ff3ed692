"""What servers of models ask for: ATB's operators, attention over pages, Triton kernels, CANN's Python module."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found, unused-ignore]
from npu_runs import mixed, near, raises, record_operators, run_checks, unexpected
from torch.nn.functional import scaled_dot_product_attention

from ascend_vnpu import triton

Tensor = torch.Tensor
PAGE, HEADS, KV_HEADS, SIZE = 4, 4, 2, 8
TABLE = torch.tensor([[2, 5, 0], [1, 4, 3]], dtype=torch.int32)  # pages of two sequences


def rows_of(cache: Tensor, sequence: int, count: int) -> Tensor:
    return cache[TABLE[sequence].long()].flatten(0, 1)[:count]


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float = SIZE**-0.5) -> Tensor:
    """(T, N, D) of the last tokens of a sequence, each of which sees all before it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
    seen = torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(k.shape[1] - len(q))
    return scaled_dot_product_attention(q.transpose(0, 1), k, v, seen, scale=scale).transpose(0, 1)


def caches() -> tuple[Tensor, Tensor]:
    return mixed(6, PAGE, KV_HEADS, SIZE), mixed(6, PAGE, KV_HEADS, SIZE) + 1


def check_rotary_embedding_of_halves_and_of_pairs() -> None:
    positions = torch.tensor([3, 0, 6])
    angle = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    table = torch.cat((angle.cos(), angle.sin()), -1)
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    for halves in (True, False):
        query, key = mixed(3, HEADS * SIZE), mixed(3, KV_HEADS * SIZE)
        mine = [query.npu(), key.npu()]
        torch_npu._npu_rotary_embedding(positions.npu(), *mine, SIZE, table.npu(), halves)
        for found, x in zip(mine, (query, key), strict=True):
            heads = x.reshape(3, -1, SIZE)
            first, second = heads.chunk(2, -1) if halves else (heads[..., ::2], heads[..., 1::2])
            turned = (first * cos - second * sin, second * cos + first * sin)
            near(found, (torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)).reshape(x.shape))


def check_rows_go_to_their_slots_and_come_back() -> None:
    keys, values = (x.npu() for x in caches())
    new = mixed(3, KV_HEADS, SIZE), mixed(3, KV_HEADS, SIZE) - 1
    slots = torch.tensor([9, -1, 22], dtype=torch.int32).npu()  # no slot: padding
    new_rows = [x.npu() for x in new]
    torch_npu._npu_reshape_and_cache(*new_rows, keys, values, slots)
    for found, before, rows in zip((keys, values), caches(), new, strict=True):
        before.view(-1, KV_HEADS, SIZE)[[9, 22]] = rows[[0, 2]]
        near(found, before, 0)
    again = [x.npu() for x in caches()]
    scattered = {"key_cache": again[0], "value_cache": again[1], "slot_mapping": slots}
    torch_npu.npu_scatter_pa_kv_cache(*new_rows, **scattered, cache_mode="Norm")
    for found, other in zip(again, (keys, values), strict=True):
        near(found, other.cpu(), 0)
    with raises("not PA_NZ"):
        torch_npu.npu_scatter_pa_kv_cache(*new_rows, **scattered)
    lengths, starts = (torch.tensor(x, dtype=torch.int32).npu() for x in ([5, 6], [4, 0]))
    places = [torch.empty(11, KV_HEADS, SIZE).npu() for _ in range(4)]
    more = {"seq_starts": starts, "key": places[0], "value": places[1]}
    torch_npu.atb.npu_paged_cache_load(keys, values, TABLE.npu(), lengths, **more)
    sums = {"seq_offset": starts, "is_seq_lens_cumsum": True}
    ends = torch.tensor([0, 5, 11], dtype=torch.int32).npu()
    torch_npu.npu_gather_pa_kv_cache(keys, values, TABLE.npu(), ends, *places[2:], **sums)
    for found, cache in zip(places, (keys.cpu(), values.cpu()) * 2, strict=True):
        near(found, torch.cat((rows_of(cache, 0, 9)[4:], rows_of(cache, 1, 6))), 0)
    flat = keys.view(-1, KV_HEADS, SIZE)
    torch_npu.npu_scatter_nd_update_(flat, torch.tensor([[7], [2]]).npu(), new_rows[0][:2])
    near(flat[[7, 2]], new[0][:2], 0)


def check_attention_over_pages() -> None:
    keys, values = caches()
    query, lengths = mixed(2, HEADS, SIZE), [9, 6]
    want = [attended(query[i : i + 1], *(rows_of(x, i, lengths[i]) for x in (keys, values))) for i in range(2)]
    out = torch.empty(2, HEADS, SIZE).npu()
    cached = keys.npu(), values.npu()
    counts = torch.tensor(lengths, dtype=torch.int32)
    torch_npu._npu_paged_attention(query.npu(), *cached, KV_HEADS, HEADS, SIZE**-0.5, TABLE.npu(), counts, out)
    near(out, torch.cat(want))
    with raises("no such operation of ATB|failed"):
        torch_npu._npu_group_topk(mixed(2, 8).half().npu(), 2, 1, 2)


def check_sequences_one_behind_the_other() -> None:
    keys, values = caches()
    query, ends, lengths = mixed(5, HEADS, SIZE), [3, 5], [9, 6]
    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1).npu()
    given = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": SIZE**-0.5, "sparse_mode": 3}
    given |= {"atten_mask": mask, "input_layout": "TND", "actual_seq_lengths": ends, "softmax_lse_flag": True}
    parts = [query[:3], query[3:]]
    rows = [[rows_of(x, i, lengths[i]) for x in (keys, values)] for i in range(2)]
    want = torch.cat([attended(q, *row) for q, row in zip(parts, rows, strict=True)])
    paged = {"block_table": TABLE.npu(), "block_size": PAGE, "actual_seq_lengths_kv": lengths}
    cached = [x.flatten(2).npu() for x in (keys, values)]
    near(torch_npu.npu_fused_infer_attention_score(query.npu(), *cached, **given, **paged)[0], want)
    by_heads = [x.transpose(1, 2).contiguous().npu() for x in (keys, values)]
    near(torch_npu.npu_fused_infer_attention_score(query.npu(), *by_heads, **given, **paged)[0], want)
    whole = [torch.cat([row[i] for row in rows]).npu() for i in range(2)]
    out, lse = torch_npu.npu_fused_infer_attention_score(query.npu(), *whole, **given, actual_seq_lengths_kv=[9, 15])
    near(out, want)
    scores = query[0] @ rows[0][0][:7].repeat_interleave(2, 1).permute(1, 2, 0) * SIZE**-0.5
    near(lse[0, :, 0], scores.diagonal(dim1=0, dim2=1).T.logsumexp(-1) if scores.dim() == 3 else scores, 1e-4)


def check_attention_over_latent_pages() -> None:
    """Queries of all heads over one latent key, which is the value too, and a rotary one; some see no keys."""
    latent, rope = mixed(6, PAGE, 1, 16), mixed(6, PAGE, 1, SIZE)
    query, turned, lengths = mixed(2, HEADS, 1, 16), mixed(2, HEADS, 1, SIZE), [9, 0]
    given = {"query_rope": turned.npu(), "key_rope": rope.transpose(1, 2).contiguous().npu(), "softmax_scale": 0.3}
    given |= {"num_query_heads": HEADS, "num_key_value_heads": 1, "input_layout": "BNSD_NBSD", "block_size": PAGE}
    given |= {"block_table": TABLE.npu(), "actual_seq_kvlen": lengths, "return_softmax_lse": True}
    keys = latent.transpose(1, 2).contiguous().npu()
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(query.npu(), keys, keys, **given)
    whole = torch.cat((query, turned), -1)[0].transpose(0, 1)
    rows = rows_of(latent, 0, 9)
    near(out[:, 0], attended(whole, torch.cat((rows, rows_of(rope, 0, 9)), -1), rows, 0.3).transpose(0, 1))
    assert not out[:, 1].any() and lse[1].isposinf().all() and lse[0].isfinite().all()


def check_parts_of_attention_make_the_whole() -> None:
    query, keys, values = mixed(2, HEADS, SIZE), mixed(7, HEADS, SIZE), mixed(7, HEADS, SIZE) + 1
    given = {"num_heads": HEADS, "scale": SIZE**-0.5, "input_layout": "TND", "softmax_lse_flag": True}
    parts = []
    for part in (slice(0, 3), slice(3, 7), slice(3, 3)):
        places = {"actual_seq_lengths": [2], "actual_seq_lengths_kv": [part.stop - part.start]}
        rows = [x[part if part.stop > part.start else slice(0, 1)].npu() for x in (keys, values)]
        parts.append(torch_npu.npu_fused_infer_attention_score(query.npu(), *rows, **given, **places))
    sums = [lse.reshape(-1) for _, lse in parts]
    out, _ = torch_npu.npu_attention_update(sums, [out.reshape(-1, SIZE) for out, _ in parts], 0)
    want = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (query, keys, values))).transpose(0, 1)
    near(out.view(want.shape), want)
    _, total = torch_npu.npu_attention_update(sums, [out.reshape(-1, SIZE) for out, _ in parts], 1)
    near(total, torch.stack([x.cpu() for x in sums[:2]]).logsumexp(0))
    no_keys, _ = torch_npu.npu_attention_update(sums[2:] * 2, [parts[2][0].reshape(-1, SIZE)] * 2, 0)
    assert not no_keys.any()


def check_latent_rows_go_to_their_slots() -> None:
    kv, gamma, angle = mixed(3, 1, 1, 16 + SIZE), mixed(16), mixed(3, 1, 1, SIZE // 2)
    cos, sin = (torch.cat((x, x), -1) for x in (angle.cos(), angle.sin()))
    pairs = kv[..., 16:].unflatten(-1, (-1, 2)).mT.flatten(-2)  # all first coordinates, then all second ones
    turned = pairs * cos + torch.cat((-pairs[..., SIZE // 2 :], pairs[..., : SIZE // 2]), -1) * sin
    near(torch_npu.npu_interleave_rope(kv[..., 16:].contiguous().npu(), cos.npu(), sin.npu()), turned)
    latent = kv[..., :16] * (kv[..., :16].square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma
    caches = torch.zeros(6, PAGE, 1, SIZE).npu(), torch.zeros(6, PAGE, 1, 16).npu()
    places = torch.tensor([9, -1, 22]).npu(), *caches
    given = {"epsilon": 1e-6, "cache_mode": "PA", "is_output_kv": True}
    found = torch_npu.npu_kv_rmsnorm_rope_cache(*(x.npu() for x in (kv, gamma, cos, sin)), *places, **given)
    for cache, rows, out in zip(caches, (turned, latent), found[2:], strict=True):
        want = torch.zeros(6 * PAGE, rows.shape[-1])
        want[[9, 22]] = rows.flatten(0, 2)[[0, 2]]
        near(out, rows)
        near(cache.flatten(0, 2), want)


def check_norm_of_a_sum_is_quantized() -> None:
    x1, x2, gamma, beta = mixed(3, 16), mixed(3, 16) + 1, mixed(16), mixed(16).flip(0)
    more = {"beta": beta.npu(), "epsilon": 1e-6, "output_mask": [True, False]}
    mine = (x.npu() for x in (x1, x2, gamma))
    codes, _, total, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(*mine, **more)
    want = torch.nn.functional.rms_norm(x1 + x2, [16], gamma, 1e-6) + beta
    near(total, x1 + x2)
    near(scale, want.abs().amax(1) / 127, 1e-6)
    near(codes.cpu() * scale.cpu()[:, None], want, float(scale.max()) * 0.51)


def check_product_of_transposed_batches() -> None:
    left, right = mixed(3, 2, 4), mixed(3, 4, 5)
    near(torch_npu.npu_transpose_batchmatmul(left.npu(), right.npu(), perm_y=(1, 0, 2)), (left @ right).transpose(0, 1))
    given = {"perm_x1": (1, 0, 2), "perm_x2": (0, 2, 1), "perm_y": (1, 0, 2)}
    turned = left.transpose(0, 1).contiguous().npu(), right.mT.contiguous().npu()
    near(torch_npu.npu_transpose_batchmatmul(*turned, **given), (left @ right).transpose(0, 1))


def check_attention_of_a_graph_gets_new_lengths() -> None:
    keys, values = caches()
    query, lengths = mixed(2, HEADS, SIZE), [9, 6]
    given = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": SIZE**-0.5, "input_layout": "TND"}
    paged = {"block_table": TABLE.npu(), "block_size": PAGE, "actual_seq_lengths": [1, 2]}
    cached, mine = [x.flatten(2).npu() for x in (keys, values)], query.npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out, _ = torch_npu.npu_fused_infer_attention_score(
            mine, *cached, **given, **paged, actual_seq_lengths_kv=[1, 1]
        )
    for counts in (lengths, [4, 11]):
        graph.replay()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": counts}])
        want = [attended(query[i : i + 1], *(rows_of(x, i, counts[i]) for x in (keys, values))) for i in range(2)]
        near(out, torch.cat(want))


def check_product_that_is_added() -> None:
    x, weight, total = mixed(2, 4).half(), mixed(2, 3).half(), mixed(4, 3)
    mine = total.npu()
    torch_npu._npu_matmul_add_fp32(x.npu(), weight.npu(), mine)
    near(mine, total + x.float().T @ weight.float(), 1e-5)


def check_triton_kernels_run_without_triton() -> None:
    placeholders: Any = SimpleNamespace(), SimpleNamespace(constexpr=None)
    triton.install(*placeholders)
    tl = placeholders[1]

    @placeholders[0].jit  # type: ignore[untyped-decorator, unused-ignore]
    def doubled(source: Any, out: Any, count: int, BLOCK: int) -> None:
        places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(source + places, mask=places < count, other=0)
        least = tl.min(tl.where(places < count, places, count), axis=0)
        values = tl.gather(values, places - least, 0)
        tl.store(out + places, values * 2 + tl.num_programs(0), mask=places < count)

    x = torch.arange(12, dtype=torch.int32).npu()[2:]
    out = torch.full((12,), -1, dtype=torch.int64).npu()
    doubled[(3,)](x, out, 9, BLOCK=4)
    assert out.tolist() == [2 * (i + 2) + 3 for i in range(9)] + [-1] * 3


def check_memory_of_expandable_segments_counts() -> None:
    torch.npu.empty_cache()
    before, total = torch.npu.mem_get_info()
    x = torch.ones(64 << 20, dtype=torch.uint8).npu()
    assert before - torch.npu.mem_get_info()[0] >= x.numel() and total >= before
    del x
    torch.npu.synchronize()
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == before


def check_cann_module_acl_copies() -> None:
    rt = importlib.import_module("acl").rt
    source, out = torch.arange(8).npu(), torch.zeros(8, dtype=torch.int64)
    assert rt.memcpy(out.data_ptr(), 64, source.data_ptr(), 64, 2) == 0 and out.tolist() == list(range(8))
    assert rt.memcpy(out.data_ptr(), 8, source.data_ptr(), 64, 2) != 0


def check_torch_npu_has_called_them_all() -> None:
    """Only a call by torch_npu shows a wrong layout in the table of operations."""
    assert not unexpected("serving"), unexpected("serving")


if __name__ == "__main__":
    record_operators()
    run_checks()
