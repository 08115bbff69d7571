"""One target with one drafter: prompts decoded both ways and timed, and their answers replayed for comparison."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from shards.sections import SpeculateConfig
from speculate.acceptance import Acceptance, measure
from speculate.decode import Decoded, Proposer, Round, decode_plainly, decode_speculatively
from speculate.drafting import BlockDrafter
from speculate.prompts import Prompt
from speculate.replay import KnownAnswer, PromptLookup, replay, replay_everywhere
from speculate.sampling import Chooser
from speculate.target import LiveTarget
from train.drafter import Drafter
from train.published import DraftCheckpoint
from train.target_head import TargetHead

OFFLINE, LOOKUP, UNTRAINED, OTHER_CONTEXT = "offline", "prompt_lookup", "untrained", "other_context"


@dataclass(frozen=True, kw_only=True)
class Answer:
    plain_ids: list[int]
    plain_s: float
    decoded: Decoded
    decoded_s: float


@dataclass(frozen=True, kw_only=True)
class Session:
    target: LiveTarget
    drafter: Drafter
    head: TargetHead
    checkpoint: DraftCheckpoint
    settings: SpeculateConfig
    chooser: Chooser

    def decode(self, prompt: Prompt, max_new_tokens: int) -> Answer:
        """By the target alone, then speculatively. Both end in a copy from the device, so the clock waits for it."""
        started = time.perf_counter()
        plain_ids = decode_plainly(self.target, prompt.token_ids, max_new_tokens, chooser=self.chooser)
        middle = time.perf_counter()
        proposer = self._proposer(self.drafter)
        decoded = decode_speculatively(self.target, proposer, prompt.token_ids, max_new_tokens, chooser=self.chooser)
        ended = time.perf_counter()
        return Answer(plain_ids=plain_ids, plain_s=middle - started, decoded=decoded, decoded_s=ended - middle)

    def replay(self, known: Sequence[KnownAnswer], *, show_progress: bool) -> dict[str, Acceptance]:
        """Of greedy answers, by name: this drafter after every token, and what others would have got accepted.

        The others: prompt lookup, this drafter with weights as at the beginning of a run, and this one with the
        features of the next answer in the place of its own, for which there must be two.
        """
        untrained = self._untrained()
        limit = self.settings.max_new_tokens
        rounds: dict[str, list[list[Round]]] = {name: [] for name in (OFFLINE, LOOKUP, UNTRAINED, OTHER_CONTEXT)}
        for i, answer in enumerate(tqdm(known, "replayed", unit="answer", disable=not show_progress)):
            lookup = PromptLookup([*answer.prompt_ids, *answer.answer_ids], self.checkpoint.drafter.block_size)
            other = answer.with_features_of(known[(i + 1) % len(known)])
            rounds[OFFLINE].append(replay_everywhere(self._proposer(self.drafter), answer))
            rounds[LOOKUP].append(replay(lookup, answer, limit))
            rounds[UNTRAINED].append(replay(self._proposer(untrained), answer, limit))
            rounds[OTHER_CONTEXT].append(replay(self._proposer(self.drafter), other, limit))
        if len(known) < 2:
            del rounds[OTHER_CONTEXT]
        return {name: measure(of_answers, self.checkpoint.drafter.block_size) for name, of_answers in rounds.items()}

    def _proposer(self, drafter: Drafter) -> Proposer:
        return BlockDrafter(drafter, self.head, self.checkpoint.mask_token_id, self.chooser)

    def _untrained(self) -> Drafter:
        weight = self.drafter.norm.weight
        drafter = Drafter(self.checkpoint.drafter, self.checkpoint.hidden_size)
        drafter.init_weights(0)
        return drafter.to(weight.device, weight.dtype).eval()
