"""Which documents go into a cache: each once, and of each source as many as the mix asks for."""

import numpy as np
import pytest

from shards.documents import Batch, Collector, Document, Limits, Tokenised
from shards.errors import UsageError
from shards.select import select

LIMITS = Limits(row_tokens=1 << 17, over_length="drop", min_supervised_tokens=1, mask_token_id=1, vocab_size=1 << 20)


def collect(*documents: tuple[str, list[int]], seed: int = 0) -> Tokenised:
    """Documents by source and token ids, all supervised."""
    collector = Collector(None)
    wholes = [
        Document(record=i, source=source, token_ids=np.array(ids, np.int32), loss_mask=np.ones(len(ids), np.uint8))
        for i, (source, ids) in enumerate(documents)
    ]
    collector.add(Batch.of(wholes, LIMITS, seed))
    return collector.finish()


def sources_of(tokenised: Tokenised) -> list[str]:
    return [tokenised.sources[source] for source in tokenised.source]


def test_of_copies_the_first_is_used() -> None:
    tokenised = select(collect(("b", [5, 6]), ("a", [7, 8]), ("a", [5, 6]), ("a", [5, 6, 7]), ("b", [7, 8])), {})
    assert tokenised.record.tolist() == [0, 1, 3]
    assert tokenised.left_out_record.tolist() == [2, 4]
    assert tokenised.num_left_out == {"duplicate": 2}


def test_a_source_of_copies_only_is_none() -> None:
    tokenised = select(collect(("b", [5, 6]), ("a", [5, 6]), ("c", [7, 8])), {})
    assert tokenised.sources == ("b", "c")
    assert sources_of(tokenised) == ["b", "c"]


def many(num_documents: int, source: str, first: int) -> list[tuple[str, list[int]]]:
    """With 10 to 49 tokens."""
    return [(source, list(range(first + 100 * i, first + 100 * i + 10 + i % 40))) for i in range(num_documents)]


@pytest.mark.parametrize(
    ("weights", "whole"), [((1.0, 1.0), "b"), ((3.0, 1.0), "b"), ((8.0, 1.0), "a"), ((1.0, 0.0), "a")]
)
def test_supervised_tokens_stand_in_the_ratio_of_the_weights(weights: tuple[float, float], whole: str) -> None:
    """a has four times the tokens of b. One of them is used whole, the other to within its longest document."""
    documents = [*many(400, "a", 10), *many(100, "b", 500_000)]
    every, mixed = collect(*documents), select(collect(*documents), dict(zip("ab", weights, strict=True)))
    tokens = {name: sum(len(ids) for source, ids in documents if source == name) for name in "ab"}
    kept = dict.fromkeys("ab", 0)
    for name, count in zip(sources_of(mixed), mixed.num_supervised.tolist(), strict=True):
        kept[name] += count
    assert kept[whole] == tokens[whole]
    if weights[1]:
        unit = tokens[whole] / weights["ab".index(whole)]
        for name, weight in zip("ab", weights, strict=True):
            assert 0 <= unit * weight - kept[name] < 50
    else:
        assert kept["b"] == 0
    assert mixed.num_left_out == {"mix": len(every) - len(mixed)}


def test_the_seed_chooses_who_is_left_out() -> None:
    documents = [*many(40, "a", 10), *many(20, "b", 500_000)]
    first, same, other = (select(collect(*documents, seed=seed), {"a": 1, "b": 1}) for seed in (0, 0, 1))
    assert first.record.tolist() == same.record.tolist() != other.record.tolist()


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"a": 1.0}, "data.mix has no weight for the source 'b' of the data: each needs one, and 0 leaves it out"),
        (
            {"a": 1.0, "b": 1.0, "zzz": 1.0},
            "names the source 'zzz', of which the data has no documents; its sources are",
        ),
    ],
)
def test_every_source_has_a_weight(mix: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        select(collect(("a", [5, 6]), ("b", [7, 8])), mix)
    assert message in str(raised.value)


def test_nothing_selects_nothing() -> None:
    assert len(select(collect(), {})) == 0
