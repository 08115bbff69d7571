"""The step as a whole: loss and gradient against the fp64 oracles, and one result however the rows are shared out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.reference import anchors as reference_anchors
from tests.reference import blocks as reference_blocks
from tests.reference import loss as reference_loss
from tests.reference.drafter import Packing, Shape, drafter_forward
from tests.train.caches import TRAIN_ROWS, write_config
from tests.train.rows import Row, pack, stack
from train.config import RunConfig
from train.drafter import split_projections
from train.order import RowOrder
from train.ranks import Ranks
from train.staging import StagedRows
from train.step import BlockPass
from train.target_head import TargetHead
from train.trainer import DTYPES, Trainer

SEED, EPOCH = 5, 3
ROW_IDS = [100 + i for i in range(len(TRAIN_ROWS))]
CPU = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    return RunConfig.load(write_config(tmp_path_factory.mktemp("config") / "tiny.toml"), [f"train.seed={SEED}"])


@pytest.fixture(scope="module")
def rows(config) -> list[Row]:
    vocab_size = config.target.mask_token_id
    return [
        pack(lengths, config.cache.row_tokens, vocab_size=vocab_size, holes=0.1, seed=i)
        for i, lengths in enumerate(TRAIN_ROWS)
    ]


def random_head(config: RunConfig) -> TargetHead:
    generator = torch.Generator().manual_seed(3)
    shape, dtype = (config.target.vocab_size, config.target.hidden_size), DTYPES[config.train.precision]
    return TargetHead(
        embed_tokens_VH=torch.randn(shape, generator=generator).to(dtype),
        lm_head_VH=torch.randn(shape, generator=generator).to(dtype),
        input_embedding_scale=1.5,
        output_multiplier=0.5,
        final_logit_softcapping=8.0,
    )


def features(config: RunConfig, i: int) -> Tensor:
    """Of row i, exact in bf16: [K, T, H]."""
    shape = (len(config.drafter.target_layer_ids), config.cache.row_tokens, config.target.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + i)).bfloat16()


def new_trainer(config: RunConfig, *, num_steps: int = 10) -> Trainer:
    """With weights large enough that every part of the drafter matters."""
    trainer = Trainer(config, random_head(config), CPU, num_steps=num_steps)
    generator = torch.Generator().manual_seed(4)
    trainer.flat.masters.add_(0.2 * torch.randn(trainer.flat.masters.shape, generator=generator))
    trainer.flat.refresh_weights()
    return trainer


def stage(staged: StagedRows, config: RunConfig, rows: list[Row], indices: list[int]) -> None:
    """Put the rows of these indices into the staged tensors; an index of −1 is a row without supervised tokens."""
    staged.epoch.fill_(EPOCH)
    chosen = [rows[i] if i >= 0 else pack([], config.cache.row_tokens) for i in indices]
    staged.row_ids_R.copy_(torch.tensor([ROW_IDS[i] if i >= 0 else -1 for i in indices]))
    for name in ("input_ids", "position_ids", "document_ids", "loss_mask"):
        getattr(staged, f"{name}_RT").copy_(stack(chosen, name))
    staged.codes_RKTC.copy_(torch.stack([features(config, max(i, 0)) for i in indices]).view(torch.uint16))


def reference_sums(
    config: RunConfig, head: TargetHead, rows: list[Row], indices: list[int], weights: dict[str, Tensor]
) -> tuple[Tensor, float, list[list[int]]]:
    """Σ w·CE (differentiable in `weights`), Σ w, and the accepted length of every block, row by row."""
    drafter, gamma = config.drafter, config.train.gamma
    shape = Shape(
        num_heads=drafter.num_attention_heads,
        num_key_value_heads=drafter.num_key_value_heads,
        head_dim=drafter.head_dim,
        rope_theta=drafter.rope_theta,
        rms_norm_eps=drafter.rms_norm_eps,
        layer_types=["full_attention"] * drafter.num_layers,
        sliding_window=None,
        is_causal=None,
    )
    embed, lm_head = head.embed_tokens_VH.double(), head.lm_head_VH.double()
    loss_sum, weight_sum, accepted = torch.zeros((), dtype=torch.float64), 0.0, []
    for i in indices:
        row = rows[i]
        anchors = reference_anchors.choose(
            row.loss_mask,
            row.document_ids,
            row_id=ROW_IDS[i],
            seed=SEED,
            epoch=EPOCH,
            num_anchors=config.train.num_anchors,
        )
        accepted.append([])
        if not anchors:
            continue
        mask_tokens = [config.target.mask_token_id] * (drafter.block_size - 1)
        tokens = torch.tensor([[row.input_ids[anchor], *mask_tokens] for anchor in anchors])
        hidden = drafter_forward(
            weights,
            shape,
            features_TF=features(config, i).double().transpose(0, 1).flatten(1),
            embeddings_NBH=embed[tokens] * head.input_embedding_scale,
            row=Packing(document_ids=row.document_ids, positions=row.position_ids, anchors=anchors),
        )
        logits = reference_loss.logits(
            hidden, lm_head, multiplier=head.output_multiplier, softcap=head.final_logit_softcapping
        )
        for n, anchor in enumerate(anchors):
            supervised = reference_blocks.supervised_slots(
                row.loss_mask, row.document_ids, anchor=anchor, block_size=drafter.block_size
            )
            labels = [row.input_ids[min(anchor + j, len(row.input_ids) - 1)] for j in range(drafter.block_size)]
            slot_weights = [reference_blocks.slot_weight(j, gamma) * supervised[j] for j in range(drafter.block_size)]
            loss_sum = loss_sum + reference_loss.weighted_sum(logits[n], labels, slot_weights)
            weight_sum += sum(slot_weights)
            accepted[-1].append(reference_blocks.accepted_length(logits[n].argmax(dim=1).tolist(), labels, supervised))
    return loss_sum, weight_sum, accepted


def test_loss_and_gradient_equal_the_oracle(config, rows):
    """All six staged rows at once, among them one with a single block and one with none, in fp32 against fp64.

    Gradients are sums of up to 130 terms of magnitude ~1 through 2 layers: 1e-4 of the largest is some 100 roundings.
    """
    config = replace(config, train=replace(config.train, rows_per_micro_step=6))
    trainer, indices = new_trainer(config), [0, 1, 2, 3, 4, 5]
    stage(trainer.rows, config, rows, indices)
    result = BlockPass(config, trainer.drafter, trainer.head, trainer.rows)(seed=SEED, epoch=trainer.rows.epoch)
    trainer.flat.add_gradients(result.loss_sum)
    views = {name: gradient_sum.view for name, gradient_sum in trainer.flat.gradient_sums.items()}
    gradients = split_projections(views, config.drafter)

    parameters = split_projections(trainer.drafter.state_dict(), config.drafter)
    weights = {name: p.double().requires_grad_() for name, p in parameters.items()}
    loss_sum, weight_sum, accepted = reference_sums(config, trainer.head, rows, indices, weights)
    expected = torch.autograd.grad(loss_sum, list(weights.values()))

    assert float(result.weight_sum) == pytest.approx(weight_sum, rel=1e-6)
    assert result.loss_sum.item() == pytest.approx(loss_sum.item(), rel=1e-5)
    for r, lengths in enumerate(accepted):
        assert result.accepted_RN[r, : len(lengths)].tolist() == lengths
        assert int(result.is_block_RN[r].sum()) == len(lengths)
    for name, truth in zip(weights, expected, strict=True):
        worst = (gradients[name] - truth).abs().max().item()
        assert worst <= 1e-4 * truth.abs().max().item(), f"{name}: off by {worst}, largest {truth.abs().max().item()}"


def train_steps(config: RunConfig, rows: list[Row], *, rows_per_micro_step: int, steps: list[list[int]]) -> Trainer:
    settings = replace(config.train, rows_per_micro_step=rows_per_micro_step, rows_per_step=len(steps[0]))
    trainer = new_trainer(replace(config, train=settings))
    for indices in steps:
        for m in range(len(indices) // rows_per_micro_step):
            stage(trainer.rows, config, rows, indices[m * rows_per_micro_step :][:rows_per_micro_step])
            trainer.step.micro_step(m)
    return trainer


def test_micro_steps_equal_one_step(config, rows):
    """Rows differ in Σ w by a factor of 20 and one has none: only the global Σ w·CE / Σ w gives one result."""
    steps = [[0, 3, 4, 2, 7, 8], [5, 6, 9, 10, 1, 2], [4, 3, 2, 0, 8, 1]]
    whole = train_steps(config, rows, rows_per_micro_step=6, steps=steps)
    for rows_per_micro_step in (1, 2, 3):
        parts = train_steps(config, rows, rows_per_micro_step=rows_per_micro_step, steps=steps)
        assert parts.step.num_micro_steps == 6 // rows_per_micro_step
        torch.testing.assert_close(parts.flat.masters, whole.flat.masters, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts.step.grad_norm, whole.step.grad_norm, rtol=1e-4, atol=0)
        torch.testing.assert_close(parts.step.metrics.sums, whole.step.metrics.sums, rtol=1e-5, atol=1e-5)


def test_rows_that_fill_up_a_step_change_nothing(config, rows):
    """The last step of an epoch: its loss is that of the rows that it has."""
    filled = train_steps(config, rows, rows_per_micro_step=2, steps=[[0, 5, -1, -1]])
    without = train_steps(config, rows, rows_per_micro_step=2, steps=[[0, 5]])
    assert torch.equal(filled.flat.masters, without.flat.masters)
    assert torch.equal(filled.step.metrics.sums, without.step.metrics.sums)


def test_a_step_of_empty_rows_is_a_counted_no_op(config, rows):
    trainer = train_steps(config, rows, rows_per_micro_step=2, steps=[[0, 1]])
    before = trainer.flat.masters.clone()
    stage(trainer.rows, config, rows, [4, -1])  # documents of one token have no anchor
    trainer.step.micro_step(0)
    assert torch.equal(trainer.flat.masters, before)
    assert (trainer.step.counters.step, trainer.step.counters.num_empty) == (2, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_a_counted_no_op(config, rows, value):
    trainer = train_steps(config, rows, rows_per_micro_step=2, steps=[[0, 1]])
    before = {name: tensor.clone() for name, tensor in trainer.flat.state().items()}
    stage(trainer.rows, config, rows, [0, 1])
    trainer.rows.codes_RKTC.view(torch.bfloat16)[1, 0, 3, 5] = value
    trainer.step.micro_step(0)
    for name, tensor in trainer.flat.state().items():
        assert torch.equal(tensor, before[name]), name
    assert (trainer.step.counters.num_bad, trainer.step.counters.num_bad_in_a_row) == (1, 1)
    order = RowOrder(num_rows=len(rows), rows_per_step=2, seed=SEED)
    assert trainer.step.faults.read(CPU, order) == {"bad_step": 2, "bad_rows": [100, 101]}
    stage(trainer.rows, config, rows, [0, 1])
    trainer.step.micro_step(0)
    assert (trainer.step.counters.num_updates, trainer.step.counters.num_bad_in_a_row) == (2, 0)
    assert torch.isfinite(trainer.flat.masters).all()


def test_tensors_of_the_step_stay_where_they_are(config, rows):
    """Rows of extreme fill use the same addresses, which is what a captured graph relies on."""
    trainer = new_trainer(replace(config, train=replace(config.train, rows_per_micro_step=1, rows_per_step=1)))

    def addresses() -> list[int]:
        staged = [tensor.data_ptr() for tensor in vars(trainer.rows).values()]
        flat = [tensor.data_ptr() for tensor in (*trainer.flat.state().values(), trainer.flat.gradients)]
        return staged + flat + [p.data_ptr() for p in trainer.drafter.parameters()] + [trainer.step.sums.data_ptr()]

    before = addresses()
    for i in (0, 9, 3, 4):
        stage(trainer.rows, config, rows, [i])
        trainer.step.micro_step(0)
    assert addresses() == before


def test_config_file_of_the_tests_is_valid(tmp_path: Path):
    assert RunConfig.load(write_config(tmp_path / "tiny.toml")).gamma == 3.0


def test_bf16_steps_follow_fp32_ones(config, rows):
    """Summed in fp32 or, as one micro-step does, not summed at all: 3 steps stay within bf16's 2⁻⁸ of the largest."""
    steps = [[0, 3, 4, 2], [5, 6, 9, 10], [4, 3, 2, 0]]
    truth = train_steps(config, rows, rows_per_micro_step=4, steps=steps)
    bf16 = replace(config, train=replace(config.train, precision="bf16"))
    for rows_per_micro_step in (4, 2):
        trainer = train_steps(bf16, rows, rows_per_micro_step=rows_per_micro_step, steps=steps)
        assert trainer.flat.gradients.dtype == (torch.bfloat16 if rows_per_micro_step == 4 else torch.float32)
        assert torch.equal(trainer.flat.weights, trainer.flat.masters.bfloat16())
        torch.testing.assert_close(trainer.step.grad_norm, truth.step.grad_norm, rtol=0.02, atol=0)
        torch.testing.assert_close(trainer.step.metrics.sums[:2], truth.step.metrics.sums[:2], rtol=0.02, atol=0)


@pytest.mark.parametrize("recompute", ["mlp", "layer"])
def test_recomputing_changes_no_bit(config, rows, recompute):
    steps = [[0, 3, 4, 2], [5, 6, 9, 10]]
    kept = train_steps(config, rows, rows_per_micro_step=2, steps=steps)
    config = replace(config, train=replace(config.train, recompute=recompute))
    recomputed = train_steps(config, rows, rows_per_micro_step=2, steps=steps)
    assert torch.equal(recomputed.flat.masters, kept.flat.masters)


def test_recomputing_keeps_less(config, rows):
    """Bytes that autograd keeps of a forward pass."""
    kept = {}
    for recompute in ("none", "mlp", "layer"):
        settings = replace(config.train, recompute=recompute, rows_per_micro_step=2, rows_per_step=2)
        trainer = new_trainer(replace(config, train=settings))
        stage(trainer.rows, config, rows, [0, 3])
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            trainer.step.block_pass(seed=SEED, epoch=EPOCH)
        kept[recompute] = sum(saved.values())
    assert kept["layer"] < kept["mlp"] < kept["none"]
