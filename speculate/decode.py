"""Decoding of one prompt: by the target alone, and speculatively (DFLASH.md, "Inference loop and the metric").

Both give the same tokens, greedily, or tokens of the same distribution; the second needs fewer target passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from speculate.sampling import GREEDY, Chooser, Draft
from speculate.target import LiveTarget, TargetSequence


class Proposer(Protocol):
    """What decoding needs of a drafter; `BlockDrafter` is the one."""

    block_size: int

    def extend(self, features_TF: Tensor) -> None: ...

    def propose(self, anchor_token_id: int, num_drafted: int) -> Draft: ...


@dataclass(frozen=True, kw_only=True)
class Round:
    """One target pass over a block."""

    num_committed: int  # tokens gained: the accepted ones and the target's own next (the bonus)
    num_accepted: int  # drafted tokens among them

    @property
    def is_clipped(self) -> bool:
        """Whether the answer ended before a drafted token was rejected: then there was no bonus."""
        return self.num_accepted == self.num_committed


@dataclass(frozen=True, kw_only=True)
class Decoded:
    token_ids: list[int]  # the answer, its end token included
    rounds: list[Round]  # the first token of an answer comes from the prompt's pass, which is no round


def decode_plainly(
    target: LiveTarget,
    prompt_ids: list[int],
    max_new_tokens: int,
    begun: Sequence[int] = (),
    *,
    chooser: Chooser = GREEDY,
) -> list[int]:
    """The target's own answer, one token at a time; or how it goes on with one that has `begun`."""
    sequence = TargetSequence(target)
    token_ids, new = [*begun], [*prompt_ids, *begun]
    while not (token_ids and _has_ended(token_ids, target, max_new_tokens)):
        logits_TV, _ = sequence.run(new, num_choices=1)
        new = chooser.choose(logits_TV)
        token_ids += new
    return token_ids


def decode_speculatively(
    target: LiveTarget, drafter: Proposer, prompt_ids: list[int], max_new_tokens: int, *, chooser: Chooser = GREEDY
) -> Decoded:
    """Such an answer in rounds of one block each. `drafter` is new to the sequence.

    As published clients do, the last blocks are no longer than what may still come.
    """
    sequence = TargetSequence(target)
    logits_TV, features_TF = sequence.run(prompt_ids, num_choices=1)
    token_ids = chooser.choose(logits_TV)
    drafter.extend(features_TF)
    rounds = []
    while not _has_ended(token_ids, target, max_new_tokens):
        num_left = max_new_tokens - len(token_ids)
        draft = drafter.propose(token_ids[-1], min(drafter.block_size - 1, num_left))
        num_verified = len(draft.token_ids) + 1
        logits_TV, features_TF = sequence.run([token_ids[-1], *draft.token_ids], num_choices=num_verified)
        kept = chooser.judge(draft, logits_TV)
        committed = clip(kept, num_left, target.stop_ids)
        token_ids += committed
        sequence.rewind(num_verified - len(committed))
        drafter.extend(features_TF[: len(committed)])
        rounds.append(Round(num_committed=len(committed), num_accepted=min(len(kept) - 1, len(committed))))
    return Decoded(token_ids=token_ids, rounds=rounds)


def clip(token_ids: list[int], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first that ends an answer, and no more than `max_tokens`."""
    end = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in stop_ids), len(token_ids))
    return token_ids[: min(end, max_tokens)]


def _has_ended(token_ids: list[int], target: LiveTarget, max_new_tokens: int) -> bool:
    return len(token_ids) >= max_new_tokens or token_ids[-1] in target.stop_ids
