"""Block attention in Triton, forward and backward: flash attention over one contiguous context range per block.

A query tile holds M query rows of one row of tokens and one key-value head: neighbouring blocks, every slot, all query
heads that share the key-value head. Anchors are sorted, so neighbours share nearly all their context, which is read
once for the tile. For the gradient of the context's keys and values, a tile of context is read by a contiguous run of
query rows; nothing is added atomically, so results are the same bits every time. Softmax statistics and accumulators
are fp32, in base 2.

Symbols: R rows, T context tokens, N blocks, B slots, h query heads, g key-value heads (G; HG = h / g), d head
dim (D). All tensors are contiguous: q, out [R, N, B, h, d]; ck, cv [R, T, g, d]; bk, bv [R, N, B, g, d]; start, end
[R, N] int32; lse, delta [R, N, B, h] fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def _query_rows(first, r, kv, N, B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, M: tl.constexpr):
    """Of query rows first..first+M−1: their block, slot, offset in q (in heads), and whether they exist."""
    row = first + tl.arange(0, M)
    exists = row < N * B * HG
    row = tl.where(exists, row, 0)
    head_offset = ((r * N * B) + row // HG).to(tl.int64) * (G * HG) + kv * HG + row % HG
    return row // (B * HG), row // HG % B, head_offset, exists


@triton.jit
def _own_keys(first_block, r, kv, N, B: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Of S block keys from `first_block` on: their block, slot, offset in bk (in heads), and whether they exist."""
    s = tl.arange(0, S)
    block = first_block + s // B
    exists = block < N
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
def _context_tiles(first, last, exists, TILE: tl.constexpr):
    """Where the context tiles of these query rows begin, where those begin and end that all rows see whole, the end."""
    begin = tl.min(first) // TILE * TILE
    end = tl.max(last)
    whole_begin = (tl.max(tl.where(exists, first, 0)) + TILE - 1) // TILE * TILE
    whole_begin = tl.minimum(whole_begin, tl.maximum(begin, end))
    whole_end = tl.maximum(whole_begin, tl.min(tl.where(exists, last, end)) // TILE * TILE)
    return begin, whole_begin, whole_end, end


@triton.jit
def _load_context(context, t, T, G: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """Context keys or values [TILE, D] at slots t; where the tile is WHOLE, no slot is beyond the row."""
    at = t[:, None] * (G * D) + tl.arange(0, D)
    if WHOLE:
        return tl.load(context + at)
    return tl.load(context + at, mask=(t < T)[:, None], other=0.0)


@triton.jit
def _attend(
    maximum, total, accumulated, query, context_key, context_value, t0, first, last, T, scale,
    G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile of context more, of which each row sees first ≤ t < last, or, where it is WHOLE, all."""
    t = t0 + tl.arange(0, TILE)
    key = _load_context(context_key, t, T, G, D, WHOLE)
    value = _load_context(context_value, t, T, G, D, WHOLE)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if not WHOLE:
        sees = (t[None, :] >= first[:, None]) & (t[None, :] < last[:, None])
        scores = tl.where(sees, scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    rescale = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    total = total * rescale + tl.sum(weights, 1)
    accumulated = accumulated * rescale[:, None]
    accumulated = tl.dot(weights.to(value.dtype), value, accumulated, input_precision="ieee")
    return new_maximum, total, accumulated


@triton.jit
def _add_query_gradient(
    d_query, query, d_output, log_total, row_delta, context_key, context_value, t0, first, last, T, scale,
    G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    t = t0 + tl.arange(0, TILE)
    key = _load_context(context_key, t, T, G, D, WHOLE)
    value = _load_context(context_value, t, T, G, D, WHOLE)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    weights = tl.exp2(scores - log_total[:, None])
    if not WHOLE:
        weights = tl.where((t[None, :] >= first[:, None]) & (t[None, :] < last[:, None]), weights, 0.0)
    d_weights = tl.dot(d_output, tl.trans(value), input_precision="ieee")
    d_scores = weights * (d_weights - row_delta[:, None])
    return tl.dot(d_scores.to(key.dtype), key, d_query, input_precision="ieee")


@triton.jit
def _add_key_gradients(
    d_key, d_value, key, value, q, d_out, lse, delta, head_offset, exists, sees, scale,
    D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What M query rows give to the gradients of keys that they see: those in `sees` [keys, M], or, if WHOLE, all."""
    at = head_offset[:, None] * D + tl.arange(0, D)
    if WHOLE:
        query = tl.load(q + at)
        d_output = tl.load(d_out + at)
        log_total = tl.load(lse + head_offset)
        row_delta = tl.load(delta + head_offset)
    else:
        query = tl.load(q + at, mask=exists[:, None], other=0.0)
        d_output = tl.load(d_out + at, mask=exists[:, None], other=0.0)
        log_total = tl.load(lse + head_offset, mask=exists, other=0.0)
        row_delta = tl.load(delta + head_offset, mask=exists, other=0.0)
    scores = tl.dot(key, tl.trans(query), input_precision="ieee") * scale
    weights = tl.exp2(scores - log_total[None, :])
    if not WHOLE:
        weights = tl.where(sees, weights, 0.0)
    d_value = tl.dot(weights.to(value.dtype), d_output, d_value, input_precision="ieee")
    d_weights = tl.dot(value, tl.trans(d_output), input_precision="ieee")
    d_scores = weights * (d_weights - row_delta[None, :])
    d_key = tl.dot(d_scores.to(key.dtype), query, d_key, input_precision="ieee")
    return d_key, d_value


@triton.jit
def _add_context_gradients(
    d_key, d_value, key, value, q, d_out, lse, delta, start, end, first_row, t, r, kv, N, scale,
    B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    block, slot, head_offset, exists = _query_rows(first_row, r, kv, N, B, HG, G, M)
    sees = exists[None, :]
    if not WHOLE:
        first, last = _context_range(start, end, r * N, block, slot, exists, WINDOW)
        sees = (t[:, None] >= first[None, :]) & (t[:, None] < last[None, :])
    return _add_key_gradients(
        d_key, d_value, key, value, q, d_out, lse, delta, head_offset, exists, sees, scale, D, WHOLE
    )


@triton.jit
def _forward_kernel(
    q, ck, cv, bk, bv, start, end, out, lse,
    N, T, scale,
    B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    # The last anchors of a document have most to read: they begin first.
    kv, tile, r = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, D)
    block, slot, head_offset, exists = _query_rows(tile * M, r, kv, N, B, HG, G, M)
    query = tl.load(q + head_offset[:, None] * D + columns, mask=exists[:, None], other=0.0)

    key_block, key_slot, key_offset, key_exists = _own_keys(tile * M // (B * HG), r, kv, N, B, G, S)
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
    begin, whole_begin, whole_end, stop = _context_tiles(first, last, exists, TILE)
    for t0 in range(begin, whole_begin, TILE):
        maximum, total, accumulated = _attend(
            maximum, total, accumulated, query, context_key, context_value, t0, first, last, T, scale, G, D, TILE, False
        )  # fmt: skip
    for t0 in range(whole_begin, whole_end, TILE):
        maximum, total, accumulated = _attend(
            maximum, total, accumulated, query, context_key, context_value, t0, first, last, T, scale, G, D, TILE, True
        )  # fmt: skip
    for t0 in range(whole_end, stop, TILE):
        maximum, total, accumulated = _attend(
            maximum, total, accumulated, query, context_key, context_value, t0, first, last, T, scale, G, D, TILE, False
        )  # fmt: skip

    tl.store(out + head_offset[:, None] * D + columns, accumulated / total[:, None], mask=exists[:, None])
    tl.store(lse + head_offset, maximum + tl.log2(total), mask=exists)


@triton.jit
def _query_gradient_kernel(
    q, ck, cv, bk, bv, start, end, out, lse, d_out, delta, dq,
    N, T, scale, natural_scale,
    B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, and delta: of each query row, the dot product of output and gradient."""
    # The last anchors of a document have most to read: they begin first.
    kv, tile, r = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, D)
    block, slot, head_offset, exists = _query_rows(tile * M, r, kv, N, B, HG, G, M)
    at = head_offset[:, None] * D + columns
    query = tl.load(q + at, mask=exists[:, None], other=0.0)
    d_output = tl.load(d_out + at, mask=exists[:, None], other=0.0)
    output = tl.load(out + at, mask=exists[:, None], other=0.0)
    row_delta = tl.sum(output.to(tl.float32) * d_output.to(tl.float32), 1)
    tl.store(delta + head_offset, row_delta, mask=exists)
    log_total = tl.load(lse + head_offset, mask=exists, other=0.0)

    key_block, key_slot, key_offset, key_exists = _own_keys(tile * M // (B * HG), r, kv, N, B, G, S)
    key_at = key_offset[:, None] * D + columns
    own_key = tl.load(bk + key_at, mask=key_exists[:, None], other=0.0)
    own_value = tl.load(bv + key_at, mask=key_exists[:, None], other=0.0)
    own_sees = _sees_slots(block, slot, exists, key_block, key_slot, key_exists, CAUSAL, WINDOW)
    own_scores = tl.dot(query, tl.trans(own_key), input_precision="ieee") * scale
    own_weights = tl.where(own_sees & exists[:, None], tl.exp2(own_scores - log_total[:, None]), 0.0)
    own_d_weights = tl.dot(d_output, tl.trans(own_value), input_precision="ieee")
    own_d_scores = (own_weights * (own_d_weights - row_delta[:, None])).to(own_key.dtype)
    d_query = tl.dot(own_d_scores, own_key, input_precision="ieee")

    row_offset = (r.to(tl.int64) * T * G + kv) * D
    context_key, context_value = ck + row_offset, cv + row_offset
    first, last = _context_range(start, end, r * N, block, slot, exists, WINDOW)
    begin, whole_begin, whole_end, stop = _context_tiles(first, last, exists, TILE)
    for t0 in range(begin, whole_begin, TILE):
        d_query = _add_query_gradient(
            d_query, query, d_output, log_total, row_delta, context_key, context_value, t0, first, last, T, scale,
            G, D, TILE, False,
        )  # fmt: skip
    for t0 in range(whole_begin, whole_end, TILE):
        d_query = _add_query_gradient(
            d_query, query, d_output, log_total, row_delta, context_key, context_value, t0, first, last, T, scale,
            G, D, TILE, True,
        )  # fmt: skip
    for t0 in range(whole_end, stop, TILE):
        d_query = _add_query_gradient(
            d_query, query, d_output, log_total, row_delta, context_key, context_value, t0, first, last, T, scale,
            G, D, TILE, False,
        )  # fmt: skip

    tl.store(dq + at, d_query * natural_scale, mask=exists[:, None])


@triton.jit
def _own_gradient_kernel(
    q, bk, bv, lse, d_out, delta, dbk, dbv,
    N, scale, natural_scale,
    B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, BLOCKS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of BLOCKS blocks, which only their own queries read."""
    tile, kv, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, D)
    key_block, key_slot, key_offset, key_exists = _own_keys(tile * BLOCKS, r, kv, N, B, G, S)
    key_exists = key_exists & (tl.arange(0, S) < BLOCKS * B)
    key_at = key_offset[:, None] * D + columns
    key = tl.load(bk + key_at, mask=key_exists[:, None], other=0.0)
    value = tl.load(bv + key_at, mask=key_exists[:, None], other=0.0)
    d_key = tl.zeros((S, D), tl.float32)
    d_value = tl.zeros((S, D), tl.float32)
    for first in range(tile * BLOCKS * B * HG, (tile + 1) * BLOCKS * B * HG, M):
        block, slot, head_offset, exists = _query_rows(first, r, kv, N, B, HG, G, M)
        sees = _sees_slots(block, slot, exists, key_block, key_slot, key_exists, CAUSAL, WINDOW) & exists[:, None]
        d_key, d_value = _add_key_gradients(
            d_key, d_value, key, value, q, d_out, lse, delta, head_offset, exists, tl.trans(sees), scale, D, False
        )

    tl.store(dbk + key_at, d_key * natural_scale, mask=key_exists[:, None])
    tl.store(dbv + key_at, d_value, mask=key_exists[:, None])


@triton.jit
def _context_gradient_kernel(
    q, ck, cv, start, end, lse, d_out, delta, dck, dcv,
    N, T, scale, natural_scale,
    B: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, NEXT_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of context keys and values: a sum over the run of query rows that read it."""
    kv, context_tile, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    if WINDOW > 0:
        first_of_block += B - 1  # of the last slot, whose window begins last
    sees_whole = reads & (first_of_block <= t0) & (last_of_block >= t0 + TILE)
    begin = tl.min(tl.where(reads, n, N)) * (B * HG)
    stop = tl.max(tl.where(reads, n + 1, 0)) * (B * HG)
    # The rows that see the whole tile follow one another; of their M-row tiles those count that lie among them.
    whole_begin = begin + tl.cdiv(tl.min(tl.where(sees_whole, n, N)) * (B * HG) - begin, M) * M
    whole_begin = tl.minimum(whole_begin, tl.maximum(begin, stop))
    whole_end = begin + (tl.max(tl.where(sees_whole, n + 1, 0)) * (B * HG) - begin) // M * M
    whole_end = tl.maximum(whole_begin, whole_end)

    d_key = tl.zeros((TILE, D), tl.float32)
    d_value = tl.zeros((TILE, D), tl.float32)
    for first_row in range(begin, whole_begin, M):
        d_key, d_value = _add_context_gradients(
            d_key, d_value, key, value, q, d_out, lse, delta, start, end, first_row, t, r, kv, N, scale,
            B, HG, G, D, M, WINDOW, False,
        )  # fmt: skip
    for first_row in range(whole_begin, whole_end, M):
        d_key, d_value = _add_context_gradients(
            d_key, d_value, key, value, q, d_out, lse, delta, start, end, first_row, t, r, kv, N, scale,
            B, HG, G, D, M, WINDOW, True,
        )  # fmt: skip
    for first_row in range(whole_end, stop, M):
        d_key, d_value = _add_context_gradients(
            d_key, d_value, key, value, q, d_out, lse, delta, start, end, first_row, t, r, kv, N, scale,
            B, HG, G, D, M, WINDOW, False,
        )  # fmt: skip

    tl.store(dck + at, d_key * natural_scale, mask=(t < T)[:, None])
    tl.store(dcv + at, d_value, mask=(t < T)[:, None])


def _launch(q: Tensor, ck: Tensor, *, query_rows: int, num_warps: int, num_stages: int) -> dict[str, int]:
    """A kernel's constants and launch settings, measured best on an H200 at head dim 128 in bf16.

    Larger heads take shorter tiles and no pipeline, so that all fits shared memory.
    """
    _, _, B, h, d = q.shape
    g = ck.shape[2]
    shrink = max(1, d * q.element_size() // 256)
    return {
        "B": B,
        "HG": h // g,
        "G": g,
        "D": d,
        "M": max(16, query_rows // shrink),
        "TILE": max(16, 64 // shrink),
        "num_warps": num_warps if shrink == 1 else 4,  # 8 on the then smaller tiles reads out of bounds (triton 3.6)
        "num_stages": num_stages if shrink == 1 else 1,
    }


def _spanned_keys(launch: dict[str, int]) -> int:
    """Block keys that a query tile can see: of all blocks that its M rows touch, to the next power of two."""
    rows_of_block, M = launch["B"] * launch["HG"], launch["M"]
    is_aligned = M % rows_of_block == 0 or rows_of_block % M == 0
    num_blocks = max(1, M // rows_of_block) if is_aligned else (M + rows_of_block - 2) // rows_of_block + 1
    return max(16, triton.next_power_of_2(num_blocks * launch["B"]))


@torch.library.custom_op("dflash::block_attention", mutates_args=())
def block_attention_kernel(
    q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, start: Tensor, end: Tensor, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse): lse [R, N, B, h] fp32 is the base-2 logarithm of each softmax's denominator. window 0: none."""
    R, N, _, _, d = q.shape
    launch = _launch(q, ck, query_rows=128, num_warps=8, num_stages=3)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    num_tiles = triton.cdiv(N * launch["B"] * launch["HG"], launch["M"])
    _forward_kernel[(launch["G"], num_tiles, R)](
        q, ck, cv, bk, bv, start, end, out, lse, N, ck.shape[1], d**-0.5 * LOG2_E,
        **launch, S=_spanned_keys(launch), CAUSAL=causal, WINDOW=window,
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
    scales = (d**-0.5 * LOG2_E, d**-0.5)
    launch = _launch(q, ck, query_rows=128, num_warps=8, num_stages=3)
    num_tiles = triton.cdiv(N * B * launch["HG"], launch["M"])
    _query_gradient_kernel[(launch["G"], num_tiles, R)](
        q, ck, cv, bk, bv, start, end, out, lse, d_out, delta, dq, N, T, *scales,
        **launch, S=_spanned_keys(launch), CAUSAL=causal, WINDOW=window,
    )  # fmt: skip
    launch = _launch(q, ck, query_rows=64, num_warps=4, num_stages=2)
    _context_gradient_kernel[(launch["G"], triton.cdiv(T, launch["TILE"]), R)](
        q, ck, cv, start, end, lse, d_out, delta, dck, dcv, N, T, *scales,
        **launch, NEXT_N=triton.next_power_of_2(N), WINDOW=window,
    )  # fmt: skip
    del launch["TILE"]
    num_blocks = max(1, 32 // B)
    _own_gradient_kernel[(triton.cdiv(N, num_blocks), launch["G"], R)](
        q, bk, bv, lse, d_out, delta, dbk, dbv, N, *scales,
        **launch, S=max(16, triton.next_power_of_2(num_blocks * B)), BLOCKS=num_blocks, CAUSAL=causal, WINDOW=window,
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
