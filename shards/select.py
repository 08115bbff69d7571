"""Which documents of the data go into a cache: each once, and of each source as many as the mix asks for."""

import numpy as np

from shards.config import did_you_mean, near
from shards.documents import Tokenised
from shards.errors import UsageError


def select(tokenised: Tokenised, mix: dict[str, float]) -> Tokenised:
    """Leave out what repeats an earlier document token by token, then what `mix` has no use for.

    With a mix the supervised tokens of the sources stand in the ratio of their weights. The source that is scarcest
    for its weight is used whole; of the others documents are left out in the order in which they would be shuffled.
    """
    tokenised = tokenised.without(_repeats(tokenised), "duplicate")
    return tokenised.without(_exceeds(tokenised, mix), "mix") if mix else tokenised


def _repeats(tokenised: Tokenised) -> np.ndarray:
    """bool [D]: has the token ids of a document before it."""
    order = np.lexsort(tokenised.content.T)  # is stable: copies stay in the order of their records
    ordered = tokenised.content[order]
    is_repeat = np.zeros(len(tokenised), bool)
    is_repeat[order[1:]] = (ordered[1:] == ordered[:-1]).all(1)
    return is_repeat


def _exceeds(tokenised: Tokenised, mix: dict[str, float]) -> np.ndarray:
    """bool [D]: beyond its source's share."""
    _check_names(tokenised.sources, mix)
    weights = np.array([mix[name] for name in tokenised.sources])
    supervised = np.bincount(tokenised.source, tokenised.num_supervised, minlength=len(weights))
    is_used = weights > 0
    budgets = np.rint(weights * np.min(supervised[is_used] / weights[is_used], initial=np.inf, where=True))
    is_over = np.zeros(len(tokenised), bool)
    for source, budget in enumerate(budgets):
        own = np.flatnonzero(tokenised.source == source)
        own = own[np.argsort(tokenised.order[own], kind="stable")]
        is_over[own] = np.cumsum(tokenised.num_supervised[own], dtype=np.int64) > budget
    return is_over


def _check_names(sources: tuple[str, ...], mix: dict[str, float]) -> None:
    for name in mix:
        if name not in sources:
            hint = did_you_mean(near(name, sources)) or f"; its sources are {', '.join(sources)}"
            raise UsageError(f"data.mix names the source {name!r}, of which the data has no documents{hint}")
    if unnamed := [name for name in sources if name not in mix]:
        raise UsageError(
            f"data.mix has no weight for the source {unnamed[0]!r} of the data: each needs one, and 0 leaves it out"
        )
