"""Block attention in Triton, forward and backward: flash attention over one contiguous context range per block.

A program's query tile holds P neighbouring blocks of one row, with all query heads of one key-value head: P·B·(h/g)
query rows. Anchors are sorted, so neighbours share nearly all their context, which is read once for the tile. For the
gradient of the context's keys and values, a tile of context is read by a contiguous run of blocks; nothing is added
atomically, so results are the same bits every time. Softmax statistics and accumulators are fp32, in base 2.

Symbols: R rows, T context tokens, N blocks, B slots, h query heads, g key-value heads, d head dim. All tensors are
contiguous. q, out [R, N, B, h, d]; ck, cv [R, T, g, d]; bk, bv [R, N, B, g, d]; start, end [R, N] int32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def _query_tile(tile, r, kv, N, B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, P: tl.constexpr, M: tl.constexpr):
    """Of each of the M query rows: its block, slot, offset in q (in heads), and whether it exists."""
    m = tl.arange(0, M)
    block = tile * P + m // (B * HG)
    slot = (m // HG) % B
    exists = (m < P * B * HG) & (block < N)
    block = tl.where(exists, block, 0)
    head_offset = ((r * N + block) * B + slot).to(tl.int64) * (G * HG) + kv * HG + m % HG
    return block, slot, head_offset, exists


@triton.jit
def _block_key_tile(tile, r, kv, N, B: tl.constexpr, G: tl.constexpr, P: tl.constexpr, S: tl.constexpr):
    """Of each of the S block keys that a query tile may see: its block, slot, offset in bk, and whether it exists."""
    s = tl.arange(0, S)
    block = tile * P + s // B
    exists = (s < P * B) & (block < N)
    offset = ((r * N + tl.where(exists, block, 0)) * B + s % B).to(tl.int64) * G + kv
    return block, s % B, offset, exists


@triton.jit
def _sees_slots(block, slot, exists, key_block, key_slot, key_exists, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which block keys [M, S] each query row sees. A row that does not exist sees all, so that no sum is empty."""
    sees = (block[:, None] == key_block[None, :]) & key_exists[None, :]
    if CAUSAL:
        sees = sees & (key_slot[None, :] <= slot[:, None])
    if WINDOW > 0:
        sees = sees & (tl.abs(key_slot[None, :] - slot[:, None]) < WINDOW)
    return sees | (exists == 0)[:, None]


@triton.jit
def _context_range(start, end, row_offset, block, slot, exists, WINDOW: tl.constexpr):
    """First and end context slot of each query row; an empty range where the row does not exist."""
    first = tl.load(start + row_offset + block)
    last = tl.load(end + row_offset + block)
    if WINDOW > 0:
        first = tl.maximum(first, last + slot - WINDOW + 1)
    first = tl.where(exists, first, 2147483647)
    last = tl.where(exists, last, 0)
    return first, last


@triton.jit
def _forward_kernel(
    q, ck, cv, bk, bv, start, end, out, lse,
    N, T, scale,
    B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, M: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tile, kv, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, D)
    block, slot, head_offset, exists = _query_tile(tile, r, kv, N, B, HG, G, P, M)
    query = tl.load(q + head_offset[:, None] * D + columns, mask=exists[:, None], other=0.0)

    key_block, key_slot, key_offset, key_exists = _block_key_tile(tile, r, kv, N, B, G, P, S)
    own_key = tl.load(bk + key_offset[:, None] * D + columns, mask=key_exists[:, None], other=0.0)
    own_value = tl.load(bv + key_offset[:, None] * D + columns, mask=key_exists[:, None], other=0.0)
    own_scores = tl.dot(query, tl.trans(own_key), input_precision="ieee") * scale
    own_sees = _sees_slots(block, slot, exists, key_block, key_slot, key_exists, CAUSAL, WINDOW)
    own_scores = tl.where(own_sees, own_scores, -float("inf"))
    maximum = tl.max(own_scores, 1)
    own_weights = tl.exp2(own_scores - maximum[:, None])
    total = tl.sum(own_weights, 1)
    accumulated = tl.dot(own_weights.to(own_value.dtype), own_value, input_precision="ieee")

    row_offset = (r.to(tl.int64) * T * G + kv) * D
    context_key, context_value = ck + row_offset, cv + row_offset
    first, last = _context_range(start, end, r * N, block, slot, exists, WINDOW)
    for t0 in range(tl.min(first) // TILE * TILE, tl.max(last), TILE):
        t = t0 + tl.arange(0, TILE)
        at_context = t[:, None] * (G * D) + columns
        key = tl.load(context_key + at_context, mask=(t < T)[:, None], other=0.0)
        value = tl.load(context_value + at_context, mask=(t < T)[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        sees = (t[None, :] >= first[:, None]) & (t[None, :] < last[:, None])
        scores = tl.where(sees, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        rescale = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * rescale + tl.sum(weights, 1)
        accumulated = accumulated * rescale[:, None]
        accumulated = tl.dot(weights.to(value.dtype), value, accumulated, input_precision="ieee")
        maximum = new_maximum

    tl.store(out + head_offset[:, None] * D + columns, accumulated / total[:, None], mask=exists[:, None])
    tl.store(lse + head_offset, maximum + tl.log2(total), mask=exists)


@triton.jit
def _query_gradient_kernel(
    q, ck, cv, bk, bv, start, end, out, lse, d_out, delta, dq, dbk, dbv,
    N, T, scale, natural_scale,
    B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, M: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and of the blocks' own keys and values, which no other program touches."""
    tile, kv, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, D)
    block, slot, head_offset, exists = _query_tile(tile, r, kv, N, B, HG, G, P, M)
    at = head_offset[:, None] * D + columns
    query = tl.load(q + at, mask=exists[:, None], other=0.0)
    d_output = tl.load(d_out + at, mask=exists[:, None], other=0.0)
    output = tl.load(out + at, mask=exists[:, None], other=0.0)
    row_delta = tl.sum(output.to(tl.float32) * d_output.to(tl.float32), 1)
    tl.store(delta + head_offset, row_delta, mask=exists)
    log_total = tl.load(lse + head_offset, mask=exists, other=0.0)

    key_block, key_slot, key_offset, key_exists = _block_key_tile(tile, r, kv, N, B, G, P, S)
    key_at = key_offset[:, None] * D + columns
    own_key = tl.load(bk + key_at, mask=key_exists[:, None], other=0.0)
    own_value = tl.load(bv + key_at, mask=key_exists[:, None], other=0.0)
    own_sees = _sees_slots(block, slot, exists, key_block, key_slot, key_exists, CAUSAL, WINDOW)
    own_scores = tl.dot(query, tl.trans(own_key), input_precision="ieee") * scale
    own_weights = tl.where(own_sees & exists[:, None], tl.exp2(own_scores - log_total[:, None]), 0.0)
    own_d_weights = tl.dot(d_output, tl.trans(own_value), input_precision="ieee")
    own_d_scores = (own_weights * (own_d_weights - row_delta[:, None])).to(own_key.dtype)
    d_key = tl.dot(tl.trans(own_d_scores), query, input_precision="ieee") * natural_scale
    d_value = tl.dot(tl.trans(own_weights.to(own_value.dtype)), d_output, input_precision="ieee")
    tl.store(dbk + key_at, d_key, mask=key_exists[:, None])
    tl.store(dbv + key_at, d_value, mask=key_exists[:, None])
    d_query = tl.dot(own_d_scores, own_key, input_precision="ieee")

    row_offset = (r.to(tl.int64) * T * G + kv) * D
    context_key, context_value = ck + row_offset, cv + row_offset
    first, last = _context_range(start, end, r * N, block, slot, exists, WINDOW)
    for t0 in range(tl.min(first) // TILE * TILE, tl.max(last), TILE):
        t = t0 + tl.arange(0, TILE)
        at_context = t[:, None] * (G * D) + columns
        key = tl.load(context_key + at_context, mask=(t < T)[:, None], other=0.0)
        value = tl.load(context_value + at_context, mask=(t < T)[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        sees = (t[None, :] >= first[:, None]) & (t[None, :] < last[:, None])
        weights = tl.where(sees, tl.exp2(scores - log_total[:, None]), 0.0)
        d_weights = tl.dot(d_output, tl.trans(value), input_precision="ieee")
        d_scores = weights * (d_weights - row_delta[:, None])
        d_query = tl.dot(d_scores.to(key.dtype), key, d_query, input_precision="ieee")

    tl.store(dq + at, d_query * natural_scale, mask=exists[:, None])


@triton.jit
def _context_gradient_kernel(
    q, ck, cv, start, end, lse, d_out, delta, dck, dcv,
    N, T, scale, natural_scale,
    B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, NEXT_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of context keys and values: a sum over the run of query tiles that read it."""
    context_tile, kv, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, D)
    t0 = context_tile * TILE
    t = t0 + tl.arange(0, TILE)
    at = ((r * T + t).to(tl.int64) * G + kv)[:, None] * D + columns
    key = tl.load(ck + at, mask=(t < T)[:, None], other=0.0)
    value = tl.load(cv + at, mask=(t < T)[:, None], other=0.0)

    n = tl.arange(0, NEXT_N)
    first_of_block = tl.load(start + r * N + n, mask=n < N, other=0)
    last_of_block = tl.load(end + r * N + n, mask=n < N, other=0)
    if WINDOW > 0:
        first_of_block = tl.maximum(first_of_block, last_of_block - WINDOW + 1)
    reads = (first_of_block < t0 + TILE) & (last_of_block > t0)
    first_tile = tl.min(tl.where(reads, n // P, 2147483647))
    end_tile = tl.max(tl.where(reads, n // P + 1, 0))

    d_key = tl.zeros((TILE, D), tl.float32)
    d_value = tl.zeros((TILE, D), tl.float32)
    for tile in range(first_tile, end_tile):
        block, slot, head_offset, exists = _query_tile(tile, r, kv, N, B, HG, G, P, M)
        query_at = head_offset[:, None] * D + columns
        query = tl.load(q + query_at, mask=exists[:, None], other=0.0)
        d_output = tl.load(d_out + query_at, mask=exists[:, None], other=0.0)
        log_total = tl.load(lse + head_offset, mask=exists, other=0.0)
        row_delta = tl.load(delta + head_offset, mask=exists, other=0.0)
        first, last = _context_range(start, end, r * N, block, slot, exists, WINDOW)
        scores = tl.dot(key, tl.trans(query), input_precision="ieee") * scale
        sees = (t[:, None] >= first[None, :]) & (t[:, None] < last[None, :])
        weights = tl.where(sees, tl.exp2(scores - log_total[None, :]), 0.0)
        d_value = tl.dot(weights.to(value.dtype), d_output, d_value, input_precision="ieee")
        d_weights = tl.dot(value, tl.trans(d_output), input_precision="ieee")
        d_scores = weights * (d_weights - row_delta[None, :])
        d_key = tl.dot(d_scores.to(key.dtype), query, d_key, input_precision="ieee")

    tl.store(dck + at, d_key * natural_scale, mask=(t < T)[:, None])
    tl.store(dcv + at, d_value, mask=(t < T)[:, None])


def _shape(q: Tensor, ck: Tensor, *, query_rows: int) -> dict[str, int]:
    """The kernels' constants: as many neighbouring blocks in a query tile as `query_rows` hold, at least one."""
    _, _, B, h, d = q.shape
    g = ck.shape[2]
    rows_per_block = B * (h // g)
    P = max(1, query_rows // rows_per_block)
    M = max(16, triton.next_power_of_2(P * rows_per_block))
    return {"B": B, "HG": h // g, "G": g, "D": d, "P": P, "M": M}


def _launch(q: Tensor, ck: Tensor, *, query_rows: int, num_warps: int, num_stages: int) -> dict[str, int]:
    """A kernel's constants and launch settings, measured best on an H200 at head dim 128 in bf16.

    Larger heads and query tiles take shorter context tiles and no pipeline, so that all fits shared memory.
    """
    shape = _shape(q, ck, query_rows=query_rows)
    shrink = max(1, q.shape[-1] * q.element_size() // 256) * max(1, shape["M"] // 128)
    tile = max(16, 64 // shrink)
    return shape | {"TILE": tile, "num_warps": num_warps, "num_stages": num_stages if shrink == 1 else 1}


@torch.library.custom_op("dflash::block_attention", mutates_args=())
def block_attention_kernel(
    q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, start: Tensor, end: Tensor, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse): lse [R, N, B, h] fp32 is the base-2 logarithm of each softmax's denominator. window 0: none."""
    R, N, B, _, d = q.shape
    launch = _launch(q, ck, query_rows=128, num_warps=8, num_stages=3)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(N, launch["P"]), launch["G"], R)
    S = max(16, triton.next_power_of_2(launch["P"] * B))
    _forward_kernel[grid](
        q, ck, cv, bk, bv, start, end, out, lse, N, ck.shape[1], d**-0.5 * LOG2_E,
        **launch, S=S, CAUSAL=causal, WINDOW=window,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("dflash::block_attention_backward", mutates_args=())
def block_attention_backward_kernel(
    q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, start: Tensor, end: Tensor,
    out: Tensor, lse: Tensor, d_out: Tensor, window: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, ck, cv, bk and bv."""
    R, N, B, _, d = q.shape
    T = ck.shape[1]
    dq, dck, dcv, dbk, dbv = (torch.empty_like(x) for x in (q, ck, cv, bk, bv))
    delta = torch.empty_like(lse)
    launch = _launch(q, ck, query_rows=128, num_warps=8, num_stages=3)
    S = max(16, triton.next_power_of_2(launch["P"] * B))
    scales = (d**-0.5 * LOG2_E, d**-0.5)
    _query_gradient_kernel[(triton.cdiv(N, launch["P"]), launch["G"], R)](
        q, ck, cv, bk, bv, start, end, out, lse, d_out, delta, dq, dbk, dbv, N, T, *scales,
        **launch, S=S, CAUSAL=causal, WINDOW=window,
    )  # fmt: skip
    launch = _launch(q, ck, query_rows=64, num_warps=4, num_stages=2)
    _context_gradient_kernel[(triton.cdiv(T, launch["TILE"]), launch["G"], R)](
        q, ck, cv, start, end, lse, d_out, delta, dck, dcv, N, T, *scales,
        **launch, NEXT_N=triton.next_power_of_2(N), CAUSAL=causal, WINDOW=window,
    )  # fmt: skip
    return dq, dck, dcv, dbk, dbv


@block_attention_kernel.register_fake
def _(q, ck, cv, bk, bv, start, end, window, causal):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@block_attention_backward_kernel.register_fake
def _(q, ck, cv, bk, bv, start, end, out, lse, d_out, window, causal):
    return tuple(torch.empty_like(x) for x in (q, ck, cv, bk, bv))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, d_out: Tensor, _d_lse: Tensor):
    gradients = block_attention_backward_kernel(*ctx.saved_tensors, d_out.contiguous(), ctx.window, ctx.causal)
    return *gradients, None, None, None, None


block_attention_kernel.register_autograd(_backward, setup_context=_save)
