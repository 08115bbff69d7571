"""How large a plan is and what its cache will weigh, before anything is loaded."""

from collections.abc import Iterable

from shards.codec import CODECS, bytes_per_token
from shards.config import CacheConfig, TargetConfig
from shards.manifest import Plan

SLOT_BYTES = 3 * 4 + 2 * 1  # input, position and document id; loss mask and source id
SHARD_OVERHEAD_BYTES = 1 << 18  # metadata, checksums, indexes, and the last block of each file
TOKEN_BYTES = 5  # of plan/: id and loss mask; the columns of documents are small beside it
TOKENIZER_BYTES = 1 << 25
LEFT_OUT_BECAUSE = {  # by documents.Reason
    "empty": "no tokens",
    "template_refused": "refused by the chat template",
    "answer_spells_end": "an answer contains the token that ends it",
    "answer_unclear": "an answer can't be told from what is before it",
    "answer_without_end": "an answer has no end-of-turn token",
    "mask_token": "contains target.mask_token_id",
    "outside_embedding": "contains a token id without an embedding",
    "over_length": "longer than a row",
    "few_supervised": "fewer supervised tokens than data.min_supervised_tokens",
    "no_anchor": "no two supervised tokens side by side, so no block can start",
    "duplicate": "the same tokens as a record before it",
    "mix": "more than data.mix asks for",
}


def describe_plan(plan: Plan, row_tokens: int) -> str:
    """The plan in one sentence, with what was left out of it and why."""
    parts = [
        f"{plan.num_documents:,} documents ({plan.num_heldout_documents:,} held out)",
        f"{plan.num_tokens:,} tokens ({plan.num_supervised_tokens:,} supervised)",
        f"{plan.num_rows:,} rows {fill_of(plan, row_tokens):.1%} full",
        f"{plan.num_shards:,} shards",
    ]
    if plan.num_truncated:
        parts.append(f"{plan.num_truncated:,} truncated")
    parts += (f"left out: {text}" for text in describe_left_out(plan.num_left_out))
    return ", ".join(parts)


def describe_left_out(num_left_out: dict[str, int]) -> list[str]:
    return [f"{count:,} ({LEFT_OUT_BECAUSE.get(reason, reason)})" for reason, count in num_left_out.items()]


def fill_of(plan: Plan, row_tokens: int) -> float:
    return plan.num_tokens / (plan.num_rows * row_tokens)


def bytes_per_slot(target: TargetConfig, cache: CacheConfig) -> int:
    num_states = len(cache.layers) + cache.final_hidden
    return num_states * bytes_per_token(CODECS[cache.codec], target.hidden_size) + SLOT_BYTES


def target_bytes(target: TargetConfig) -> int:
    """Of target/: the embedding and a head of the same size, as if they were not tied."""
    value_bytes = {"float32": 4, "bfloat16": 2}[target.dtype]
    return 2 * target.vocab_size * target.hidden_size * value_bytes + TOKENIZER_BYTES


def shards_bytes(target: TargetConfig, cache: CacheConfig, plan: Plan, shards: Iterable[int]) -> int:
    """Of these shards of the plan, together."""
    row_bytes = cache.row_tokens * bytes_per_slot(target, cache)
    return sum(len(plan.shard_rows(shard)) * row_bytes + SHARD_OVERHEAD_BYTES for shard in shards)


def cache_bytes(target: TargetConfig, cache: CacheConfig, plan: Plan) -> int:
    """Of the whole cache."""
    shards = shards_bytes(target, cache, plan, range(plan.num_shards))
    return shards + target_bytes(target) + plan.num_tokens * TOKEN_BYTES


def size(num_bytes: float) -> str:
    """For people."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} TB"
