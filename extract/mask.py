"""Which tokens of a chat are supervised: answers and their end-of-turn tokens, as DFLASH.md ("Loss mask") has it."""

from collections.abc import Sequence

import numpy as np

from shards.documents import LeftOut


def mask_answers(token_ids: list[int], prompts: Sequence[Sequence[list[int]]], end_of_turn_id: int) -> np.ndarray:
    """The loss mask of a chat, uint8 [tokens], found by comparing prefixes.

    For each answer, in order, `prompts` has what may come before it; the first that is a proper prefix of `token_ids`
    counts, and one must be. An answer goes to its first `end_of_turn_id`, which must come before the next answer.
    """
    starts = [next((len(p) for p in choices if token_ids[: len(p)] == p), None) for choices in prompts]
    limits = [*starts, len(token_ids)][1:]
    loss_mask = np.zeros(len(token_ids), np.uint8)
    for start, limit in zip(starts, limits, strict=True):
        if start is None or limit is None or start >= limit:
            raise LeftOut("answer_unclear")
        if end_of_turn_id not in token_ids[start:limit]:
            raise LeftOut("answer_without_end")
        loss_mask[start : token_ids.index(end_of_turn_id, start) + 1] = 1
    return loss_mask


def mask_marked(token_ids: list[int], marks: list[int], end_of_turn_id: int) -> np.ndarray:
    """The loss mask of a chat whose template marks what is generated, uint8 [tokens].

    Each marked stretch goes to its first `end_of_turn_id`, or to the one that follows it: templates differ in whether
    they mark that, and the newline after it.
    """
    loss_mask = np.zeros(len(token_ids), np.uint8)
    edges = np.flatnonzero(np.diff(marks, prepend=0, append=0))
    for start, stop in edges.reshape(-1, 2).tolist():
        if end_of_turn_id not in token_ids[start : stop + 1]:
            raise LeftOut("answer_without_end")
        loss_mask[start : token_ids.index(end_of_turn_id, start) + 1] = 1
    return loss_mask
