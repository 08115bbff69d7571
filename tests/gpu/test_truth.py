"""The step on a GPU against the same step on the CPU, in fp32: anchors to the bit, losses and gradients by rounding.

The CPU's step is held to the fp64 oracles in tests/train; so is this one, through it.
"""

import pytest
import torch

from benchmarks.synthetic import fill_rows, random_head
from tests.gpu.test_captured_step import EXTREME_ROWS, VOCAB_SIZE, small_config
from train.anchors import select_anchors
from train.ranks import Ranks
from train.runtime import compute_on_one_thread_deterministically
from train.staging import StagedRows
from train.step import BlockPass, BlockResult
from train.target_head import TargetHead
from train.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def trainers() -> list[Trainer]:
    """One on each device, with the same weights, head and rows."""
    compute_on_one_thread_deterministically()
    torch._dynamo.reset()
    config = small_config(precision="fp32")
    head = random_head(config, CPU)
    tensors = {"embed_tokens_VH": head.embed_tokens_VH, "lm_head_VH": head.lm_head_VH}
    heads = [
        TargetHead(**(vars(head) | {name: tensor.to(device) for name, tensor in tensors.items()}))
        for device in (CPU, GPU)
    ]
    return [Trainer(config, h, Ranks(rank=0, world_size=1, device=h.lm_head_VH.device), num_steps=10) for h in heads]


def stage(trainers: list[Trainer], documents: list[int]) -> None:
    on_cpu, on_gpu = trainers
    fill_rows(on_cpu.rows, [documents], VOCAB_SIZE, seed=3)
    on_gpu.rows.copy_from(on_cpu.rows)


def draw(rows: StagedRows) -> list[torch.Tensor]:
    drawn = select_anchors(
        loss_mask_RT=rows.loss_mask_RT,
        document_ids_RT=rows.document_ids_RT,
        row_ids_R=rows.row_ids_R,
        seed=5,
        epoch=rows.epoch,
        num_anchors=64,
    )
    return [tensor.cpu() for tensor in drawn]


@pytest.mark.parametrize("documents", EXTREME_ROWS.values(), ids=EXTREME_ROWS)
def test_anchors_are_the_same_bits(trainers: list[Trainer], documents: list[int]) -> None:
    stage(trainers, documents)
    (on_cpu, valid_on_cpu), (on_gpu, valid_on_gpu) = (draw(trainer.rows) for trainer in trainers)
    assert torch.equal(on_cpu, on_gpu)
    assert torch.equal(valid_on_cpu, valid_on_gpu)


@pytest.mark.parametrize("documents", EXTREME_ROWS.values(), ids=EXTREME_ROWS)
def test_losses_and_gradients_agree(trainers: list[Trainer], documents: list[int]) -> None:
    stage(trainers, documents)
    results: list[BlockResult] = []
    gradients = []
    for trainer in trainers:
        block_pass: BlockPass = trainer.step.block_pass
        result = block_pass(seed=5, epoch=trainer.rows.epoch)
        trainer.flat.add_gradients(result.loss_sum)
        gradients.append({name: gradient_sum.view.cpu() for name, gradient_sum in trainer.flat.gradient_sums.items()})
        results.append(result)
    on_cpu, on_gpu = results
    torch.testing.assert_close(on_gpu.loss_sum.cpu(), on_cpu.loss_sum, rtol=1e-5, atol=1e-4)
    assert torch.equal(on_gpu.supervised_RNB.cpu(), on_cpu.supervised_RNB)
    torch.testing.assert_close(on_gpu.weight_sum.cpu(), on_cpu.weight_sum)
    for name, truth in gradients[0].items():
        atol = 2e-4 * truth.abs().max().item() + 1e-7
        torch.testing.assert_close(gradients[1][name], truth, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
