"""A drafter that has half learnt a tiny target's answers, so that rounds of all lengths occur."""

from pathlib import Path

import torch
from torch.nn import functional

from shards.sections import DrafterConfig
from speculate.decode import decode_plainly
from speculate.target import LiveTarget, TargetSequence, read_architecture
from tests.speculate.tiny import PROMPTS, TARGETS, Scale, make_drafter, run_config
from train.drafter import Drafter
from train.export import export_drafter, exported_config
from train.published import DraftCheckpoint

CPU = torch.device("cpu")
NUM_TOKENS = 32  # of an answer
NUM_PASSES = 25


def fit(target_folder: Path, drafter_folder: Path, config: DrafterConfig, scale: Scale) -> Path:
    """Fit one by blocks after every token of the target's answers to PROMPTS, and export it."""
    run = run_config(target_folder, TARGETS["qwen3"], config)
    checkpoint = DraftCheckpoint.read(make_drafter(drafter_folder.with_name("random"), run, scale))
    target = LiveTarget.load(read_architecture(target_folder, None, CPU), checkpoint, CPU)
    head, drafter, block_size = target.head(checkpoint), Drafter(config, run.target.hidden_size), config.block_size
    drafter.init_weights(0)
    batches = []
    for prompt in PROMPTS:
        token_ids = torch.tensor(prompt + decode_plainly(target, prompt, NUM_TOKENS))
        _, features_TF = TargetSequence(target).run(token_ids.tolist(), num_choices=1)
        slots_NB = torch.arange(len(prompt), len(token_ids) - block_size)[:, None] + torch.arange(block_size)
        batches.append((features_TF.clone(), token_ids, slots_NB))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(NUM_PASSES):
        for features_TF, token_ids, slots_NB in batches:
            block_ids_NB = torch.full_like(slots_NB, checkpoint.mask_token_id)
            block_ids_NB[:, 0] = token_ids[slots_NB[:, 0]]
            ends_RN = slots_NB[None, :, 0].int()
            hidden_RNBH = drafter(
                head.embed(block_ids_NB)[None].detach(),
                slots_NB[None],
                drafter.encode_context(features_TF[None], torch.arange(len(features_TF))[None]),
                torch.zeros_like(ends_RN),
                ends_RN,
            )
            logits = functional.linear(hidden_RNBH[0, :, 1:], head.lm_head_VH.detach())
            optimizer.zero_grad()
            functional.cross_entropy(logits.flatten(0, 1), token_ids[slots_NB[:, 1:]].flatten()).backward()
            optimizer.step()
    drafter_folder.mkdir()
    export_drafter(drafter_folder, dict(drafter.state_dict()), run, exported_config(run, head))
    return drafter_folder
