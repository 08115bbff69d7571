"""All that a training process keeps on its device, allocated once and wired together."""

import torch

from train.config import RunConfig
from train.drafter import Drafter
from train.optimizer import FlatParameters
from train.ranks import Ranks
from train.staging import StagedRows
from train.step import BlockPass, HeldoutStep, TrainStep
from train.target_head import TargetHead

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}  # of weights and activations


class Trainer:
    """A drafter with fresh weights, its optimizer state, the staged rows, and the captured steps over them."""

    def __init__(self, config: RunConfig, head: TargetHead, ranks: Ranks, *, num_steps: int) -> None:
        device = ranks.device
        self.head = head
        self.rows = StagedRows.allocate(
            num_rows=config.train.rows_per_micro_step,
            num_tokens=config.cache.row_tokens,
            num_layers=len(config.drafter.target_layer_ids),
            hidden_size=config.target.hidden_size,
            codec=config.cache.codec,
            device=device,
        )
        with device:
            self.drafter = Drafter(config.drafter, config.target.hidden_size)
        for layer in self.drafter.layers:
            layer.self_attn.use_kernel = config.train.attention == "kernel"
            layer.recompute = config.train.recompute
        self.drafter.init_weights(config.train.seed)
        self.flat = FlatParameters(
            self.drafter,
            dtype=DTYPES[config.train.precision],
            device=device,
            accumulates=config.train.num_micro_steps(ranks.world_size) > 1,
        )
        if config.train.precision == "fp8":
            for linear in self.flat.linears:
                linear.refresh_float8()
        block_pass = BlockPass(config, self.drafter, head, self.rows)
        self.step = TrainStep(config, block_pass, self.flat, ranks, num_steps=num_steps)
        self.heldout_step = HeldoutStep(block_pass, device)
