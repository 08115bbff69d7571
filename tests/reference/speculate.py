"""Speculative decoding with no cache of any kind: every pass of target and drafter runs over the whole sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.drafter import Packing, Shape, Weights, drafter_forward

Target = Callable[[Sequence[int]], tuple[Tensor, Sequence[Tensor]]]  # ids → logits [T, V], hidden states L+1 × [T, H]


@dataclass(frozen=True, kw_only=True)
class RoundTrace:
    drafted: list[int]
    committed: list[int]


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A drafter with what its target lends it; the embedding and the head are [V, H]."""

    weights: Weights
    shape: Shape
    block_size: int
    target_layer_ids: Sequence[int]
    mask_token_id: int
    embedding: Tensor
    head: Tensor

    def propose(self, target: Target, committed: Sequence[int], num_drafted: int) -> list[int]:
        """Greedy tokens for the slots after the last committed token, which has no feature yet."""
        context = committed[:-1]
        _, hidden_states = target(context)
        features = torch.cat([hidden_states[layer + 1] for layer in self.target_layer_ids], dim=1).double()
        block = [committed[-1]] + [self.mask_token_id] * num_drafted
        # The anchor needs a slot of the row: its feature is there and must not be seen.
        unseen = torch.full_like(features[:1], float("nan"))
        row = Packing(
            document_ids=[0] * len(committed), positions=list(range(len(committed))), anchors=[len(committed) - 1]
        )
        hidden = drafter_forward(
            self.weights,
            self.shape,
            features_TF=torch.cat((features, unseen)),
            embeddings_NBH=self.embedding.double()[block][None],
            row=row,
        )
        return (hidden[0, 1:] @ self.head.double().T).argmax(dim=1).tolist()


def decode(
    target: Target,
    propose: Callable[[list[int], int], list[int]],
    prompt: Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> list[RoundTrace]:
    """All rounds of one greedy answer. `propose` takes the committed tokens and how many to draft.

    The first trace has the token that the prompt's own pass gives, and no draft.
    """
    tokens = list(prompt)
    end = len(prompt) + max_new_tokens
    tokens.append(int(target(tokens)[0][-1].argmax()))
    traces = [RoundTrace(drafted=[], committed=tokens[-1:])]
    while len(tokens) < end and tokens[-1] not in stop_ids:
        drafted = propose(tokens, min(block_size - 1, end - len(tokens)))
        logits, _ = target(tokens + drafted)
        committed = []
        for i in range(len(drafted) + 1):
            own = int(logits[len(tokens) - 1 + i].argmax())
            committed.append(own)
            is_last = len(tokens) + len(committed) == end or own in stop_ids
            if is_last or i == len(drafted) or drafted[i] != own:
                break
        tokens += committed
        traces.append(RoundTrace(drafted=drafted, committed=committed))
    return traces
