"""What a proposer would have got accepted of an answer that is known, without running the target again.

Greedy speculation always ends in the target's own answer, so the rounds of any proposer follow from that answer and its
features. This is how baselines are measured; and, with a block after every token, the acceptance length that training
reports on held-out documents, beside which the live one is put.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speculate.decode import Proposer, Round
from speculate.sampling import Draft, count_matching
from speculate.target import LiveTarget, TargetSequence

LOOKUP_LENGTHS = (3, 2, 1)  # tokens that must have been there before


@dataclass(frozen=True, kw_only=True)
class KnownAnswer:
    prompt_ids: list[int]
    answer_ids: list[int]
    features_TF: Tensor  # of the prompt and of the answer but for its last token, which nothing follows

    @classmethod
    def of(cls, target: LiveTarget, prompt_ids: list[int], answer_ids: list[int]) -> "KnownAnswer":
        """Its features are taken in one pass."""
        _, features_TF = TargetSequence(target).run([*prompt_ids, *answer_ids[:-1]], num_choices=1)
        return cls(prompt_ids=prompt_ids, answer_ids=answer_ids, features_TF=features_TF)

    def with_features_of(self, other: "KnownAnswer") -> "KnownAnswer":
        """With another answer's features, slot for slot, over again where that is shorter."""
        slots_T = torch.arange(len(self.features_TF), device=self.features_TF.device) % len(other.features_TF)
        return replace(self, features_TF=other.features_TF[slots_T])


def replay(proposer: Proposer, known: KnownAnswer, max_new_tokens: int) -> list[Round]:
    """The rounds of a decoding that gives the known answer. `proposer` is new to it."""
    rounds = []
    place = 0  # of the answer: its last committed token
    proposer.extend(known.features_TF[: len(known.prompt_ids)])
    while place < len(known.answer_ids) - 1:
        num_drafted = min(proposer.block_size - 1, max_new_tokens - place - 1)
        num_accepted = _count_accepted(proposer, known, place, num_drafted)
        num_committed = min(num_accepted + 1, len(known.answer_ids) - place - 1)
        rounds.append(Round(num_committed=num_committed, num_accepted=num_accepted))
        _extend(proposer, known, place, num_committed)
        place += num_committed
    return rounds


def replay_everywhere(proposer: Proposer, known: KnownAnswer) -> list[Round]:
    """A round after every token but the last, each with a whole block and its bonus, as training counts."""
    rounds = []
    proposer.extend(known.features_TF[: len(known.prompt_ids)])
    for place in range(len(known.answer_ids) - 1):
        num_accepted = _count_accepted(proposer, known, place, proposer.block_size - 1)
        rounds.append(Round(num_committed=num_accepted + 1, num_accepted=num_accepted))
        _extend(proposer, known, place, 1)
    return rounds


def _count_accepted(proposer: Proposer, known: KnownAnswer, place: int, num_drafted: int) -> int:
    drafted = proposer.propose(known.answer_ids[place], num_drafted).token_ids
    return count_matching(drafted, known.answer_ids[place + 1 :])


def _extend(proposer: Proposer, known: KnownAnswer, place: int, num_tokens: int) -> None:
    begin = len(known.prompt_ids) + place
    proposer.extend(known.features_TF[begin : begin + num_tokens])


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the last tokens, the longer the better (Saxena, 2023)."""

    def __init__(self, token_ids: Sequence[int], block_size: int) -> None:
        self.token_ids = list(token_ids)
        self.block_size = block_size
        self.num_context_tokens = 0

    def extend(self, features_TF: Tensor) -> None:
        self.num_context_tokens += len(features_TF)

    def propose(self, anchor_token_id: int, num_drafted: int) -> Draft:
        """From what is committed alone: the context and the anchor after it."""
        seen = [*self.token_ids[: self.num_context_tokens], anchor_token_id]
        for length in LOOKUP_LENGTHS:
            for begin in range(len(seen) - length - 1, -1, -1):
                if seen[begin : begin + length] == seen[-length:]:
                    return Draft(seen[begin + length :][:num_drafted])
        return Draft([])
