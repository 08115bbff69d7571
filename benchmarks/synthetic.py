"""Rows and heads of random numbers at a given shape, for measuring and testing the step without a cache."""

import torch
from torch import Tensor

from train.config import RunConfig
from train.ranks import Ranks
from train.staging import StagedRows
from train.target_head import TargetHead
from train.trainer import DTYPES, Trainer


def random_head(config: RunConfig, device: torch.device, *, seed: int = 0) -> TargetHead:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (config.target.vocab_size, config.target.hidden_size)
    dtype = DTYPES[config.train.precision]
    embed_tokens, lm_head = (
        (0.02 * torch.randn(shape, generator=generator, device=device)).to(dtype) for _ in range(2)
    )
    return TargetHead(
        embed_tokens_VH=embed_tokens,
        lm_head_VH=lm_head,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )


def random_trainer(config: RunConfig, device: torch.device, *, num_steps: int = 1000) -> Trainer:
    """A one-rank trainer with a random head. `config.train` must be one micro-step a step."""
    ranks = Ranks(rank=0, world_size=1, device=device)
    return Trainer(config, random_head(config, device), ranks, num_steps=num_steps)


def fill_rows(rows: StagedRows, document_lengths: list[list[int]], vocab_size: int, *, seed: int) -> None:
    """Stage rows of fully supervised documents of these lengths, one list a row; row r is a function of seed + r.

    Features of a bf16 cache are normal; the codes of the others are uniform, with one scale that makes the rms about 1.
    """
    device = rows.epoch.device
    num_tokens = rows.input_ids_RT.shape[1]
    for row, lengths in enumerate(document_lengths):
        generator = torch.Generator(device).manual_seed(seed + row)
        document_ids_T, position_ids_T = lay_out(lengths, num_tokens, device)
        rows.row_ids_R[row] = seed + row
        rows.document_ids_RT[row] = document_ids_T
        rows.position_ids_RT[row] = position_ids_T
        rows.loss_mask_RT[row] = document_ids_T >= 0
        rows.input_ids_RT[row].random_(0, vocab_size, generator=generator)
        codes_KTC = rows.codes_RKTC[row]
        if codes_KTC.dtype == torch.uint16:
            for codes_TC in codes_KTC:
                features_TH = torch.randn(codes_TC.shape, generator=generator, device=device)
                codes_TC.copy_(features_TH.bfloat16().view(torch.uint16))
        else:
            codes = torch.iinfo(codes_KTC.dtype)
            codes_KTC.random_(codes.min, codes.max + 1, generator=generator)
            rms = {torch.int8: 2**8 / 12**0.5, torch.uint8: 2**4 / 12**0.5}[codes_KTC.dtype]
            rows.scales_RKTG[row] = torch.tensor(1 / rms, dtype=torch.bfloat16).view(torch.uint16)


def lay_out(document_lengths: list[int], num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """document_ids and position_ids, int64 [T], of documents one after the other, then padding."""
    assert sum(document_lengths) <= num_tokens
    document_ids_T = torch.full((num_tokens,), -1, device=device)
    position_ids_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    start = 0
    for document, length in enumerate(document_lengths):
        document_ids_T[start : start + length] = document
        position_ids_T[start : start + length] = torch.arange(length, device=device)
        start += length
    return document_ids_T, position_ids_T
