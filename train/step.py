"""The step: rows in, updated weights out, as one function over fixed tensors.

A micro-step is anchors → blocks → drafter → head loss → backward into the gradient sums; an update is reduction →
norm → clip → AdamW → metrics. On CUDA both are captured in one graph when a step is one micro-step, else in two. On
the CPU the same functions are called. Nothing here reads a device value on the host.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from train.anchors import select_anchors
from train.blocks import Blocks, accepted_lengths, build_blocks, slot_weights
from train.config import RunConfig
from train.decode import decode_features
from train.drafter import Drafter
from train.faults import Faults
from train.graph import prepare
from train.head import head_loss
from train.metrics import Metrics
from train.optimizer import Counters, FlatParameters, Schedule, adamw_step
from train.ranks import Ranks
from train.staging import StagedRows
from train.target_head import TargetHead

if find_spec("triton"):  # it comes with torch's CUDA builds only; train/preflight.py refuses fp8 without it
    from train.float8 import Float8

HELDOUT_SEED = 0  # held-out anchors never change, so that evaluations compare


class BlockResult(NamedTuple):
    """What the blocks of a micro-step came to. Only `loss_sum` carries a gradient."""

    loss_sum: Tensor  # fp32 scalar: Σ w·CE, unnormalised
    weight_sum: Tensor  # fp32 scalar: Σ w
    is_correct_RNB: Tensor  # bool: slot predicted right; the anchor's entry is False
    supervised_RNB: Tensor  # bool
    accepted_RN: Tensor  # int64: simulated acceptance length
    document_ids_RN: Tensor  # int32
    is_block_RN: Tensor  # bool: False for padding blocks


class BlockPass:
    """The forward pass over the blocks of the staged rows, shared by training and held-out evaluation."""

    def __init__(self, config: RunConfig, drafter: Drafter, head: TargetHead, rows: StagedRows) -> None:
        self.config = config
        self.drafter = drafter
        self.head = head
        self.rows = rows
        self.lm_head_float8 = Float8.of(head.lm_head_VH) if config.train.precision == "fp8" else None
        self.slot_weights_B = slot_weights(config.drafter.block_size, config.gamma).to(rows.epoch.device)

    def draw_blocks(self, *, seed: int, epoch: Tensor | int) -> tuple[Tensor, Tensor, Blocks]:
        """The anchors of the staged rows, int64 [R, N], which of them are no padding, bool [R, N], and their blocks."""
        rows = self.rows
        anchors_RN, is_block_RN = select_anchors(
            loss_mask_RT=rows.loss_mask_RT,
            document_ids_RT=rows.document_ids_RT,
            row_ids_R=rows.row_ids_R,
            seed=seed,
            epoch=epoch,
            num_anchors=self.config.train.num_anchors,
        )
        blocks = build_blocks(
            input_ids_RT=rows.input_ids_RT,
            position_ids_RT=rows.position_ids_RT,
            document_ids_RT=rows.document_ids_RT,
            loss_mask_RT=rows.loss_mask_RT,
            anchors_RN=anchors_RN,
            is_block_RN=is_block_RN,
            block_size=self.config.drafter.block_size,
            mask_token_id=self.config.target.mask_token_id,
        )
        return anchors_RN, is_block_RN, blocks

    def __call__(self, *, seed: int, epoch: Tensor | int) -> BlockResult:
        """Draw anchors with `seed` and `epoch`, draft their blocks and compare them with what was there."""
        rows = self.rows
        anchors_RN, is_block_RN, blocks = self.draw_blocks(seed=seed, epoch=epoch)
        features_RTF = decode_features(
            self.config.cache.codec, rows.codes_RKTC, rows.scales_RKTG, self.drafter.fc.weight.dtype
        )
        hidden_RNBH = self.drafter(
            self.head.embed(blocks.token_ids_RNB),
            blocks.position_ids_RNB,
            self.drafter.encode_context(features_RTF, rows.position_ids_RT),
            blocks.context_start_RN,
            blocks.context_end_RN,
        )
        weights_RNB = self.slot_weights_B * blocks.supervised_RNB
        loss = head_loss(
            hidden_RNBH[:, :, 1:].flatten(0, 2),  # slot 0 is known: no row in the head
            blocks.labels_RNB[:, :, 1:].flatten(),
            weights_RNB[:, :, 1:].flatten(),
            self.head.lm_head_VH,
            lm_head_float8=self.lm_head_float8,
            output_multiplier=self.head.output_multiplier,
            final_logit_softcapping=self.head.final_logit_softcapping,
        )
        is_correct_RNB = torch.zeros_like(blocks.supervised_RNB)
        is_correct_RNB[:, :, 1:] = loss.is_correct_M.view_as(is_correct_RNB[:, :, 1:])
        return BlockResult(
            loss_sum=loss.weighted_sum,
            weight_sum=weights_RNB.sum(),
            is_correct_RNB=is_correct_RNB,
            supervised_RNB=blocks.supervised_RNB,
            accepted_RN=accepted_lengths(is_correct_RNB, blocks.supervised_RNB),
            document_ids_RN=rows.document_ids_RT.gather(1, anchors_RN),
            is_block_RN=is_block_RN,
        )


class TrainStep:
    """One optimizer step over `num_micro_steps` loads of the staged rows."""

    def __init__(
        self, config: RunConfig, block_pass: BlockPass, flat: FlatParameters, ranks: Ranks, *, num_steps: int
    ) -> None:
        device = ranks.device
        self.config = config
        self.block_pass = block_pass
        self.flat = flat
        self.ranks = ranks
        self.num_micro_steps = config.train.num_micro_steps(ranks.world_size)
        self.schedule = Schedule(
            lr=config.train.lr,
            num_steps=num_steps,
            num_warmup_steps=round(config.train.warmup_fraction * num_steps),
            final_fraction=config.train.final_lr_fraction,
        )
        self.counters = Counters.zeros(device)
        self.sums = torch.zeros(2, device=device)  # Σ w·CE and Σ w of the step, fp32
        self.metrics = Metrics(config.drafter.block_size, device)
        self.faults = Faults(config.train.rows_per_micro_step, device)
        self.grad_norm = torch.zeros((), device=device)
        capture = config.train.capture
        if self.num_micro_steps == 1:
            self.whole_step = prepare(self._add_gradients_and_update, "training step", device, capture=capture)
        else:
            self._micro_step = prepare(self._add_gradients, "micro-step", device, capture=capture)
            self._update = prepare(self._update_weights, "update", device, capture=capture)
        for counter in self.counters:  # warming up counted steps on empty rows
            counter.zero_()
        self.metrics.reset()
        self.faults.reset()

    def micro_step(self, index: int) -> None:
        """Run micro-step `index` of the step on the rows that are staged; the last one also updates."""
        is_last = index == self.num_micro_steps - 1
        if self.num_micro_steps == 1:
            self.whole_step()
        else:
            self._micro_step()
            if is_last:
                self._update()

    def _add_gradients_and_update(self) -> None:
        self._add_gradients()
        self._update_weights()

    def _add_gradients(self) -> None:
        result = self.block_pass(seed=self.config.train.seed, epoch=self.block_pass.rows.epoch)
        self.flat.add_gradients(result.loss_sum)
        self.sums += torch.stack((result.loss_sum.detach(), result.weight_sum))
        self.metrics.add(result)
        self.faults.note_loss(result.loss_sum.detach(), self.block_pass.rows.row_ids_R, self.counters)

    def _update_weights(self) -> None:
        self.ranks.sum_(self.flat.gradients)
        self.ranks.sum_(self.sums)
        settings = self.config.train
        norm = adamw_step(
            self.flat,
            self.counters,
            *self.sums,
            schedule=self.schedule,
            betas=settings.betas,
            eps=settings.eps,
            clip_norm=settings.clip_norm,
        )
        self.grad_norm.copy_(norm)
        self.faults.note_step(self.counters)
        if self.flat.accumulates:
            self.flat.gradients.zero_()
        self.sums.zero_()


class HeldoutStep:
    """The blocks of the staged held-out rows, without gradient; `result` holds the last run's, until the next."""

    def __init__(self, block_pass: BlockPass, device: torch.device) -> None:
        self.block_pass = block_pass
        self.run = prepare(self._evaluate, "held-out step", device, capture=block_pass.config.train.capture)

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.result = self.block_pass(seed=HELDOUT_SEED, epoch=0)
