"""The drafter's forward pass, fp32 against the fp64 oracle, and the independence of documents and blocks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shards.sections import DrafterConfig
from tests.reference.drafter import Packing, Shape, drafter_forward
from tests.train.rows import Row, pack, stack
from train.drafter import Drafter, join_projections, rotary_embedding, rotate, split_projections

HIDDEN = 20
FULL, SLIDING = "full_attention", "sliding_attention"
BASE = DrafterConfig(
    num_layers=2,
    block_size=4,
    target_layer_ids=(1, 3, 4),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=28,
    rope_theta=1e4,
)
VARIANTS = {
    "full": BASE,
    "full, causal": replace(BASE, is_causal=True),
    "sliding, then full": replace(BASE, layer_types=(SLIDING, FULL), sliding_window=5),
    "sliding, not causal": replace(BASE, layer_types=(SLIDING, SLIDING), sliding_window=5, is_causal=False),
    "window narrower than the block": replace(BASE, layer_types=(FULL, SLIDING), sliding_window=2),
    "one head": replace(BASE, num_attention_heads=1, num_key_value_heads=1),
    "no grouping": replace(BASE, num_key_value_heads=4),
    "one key-value head": replace(BASE, num_key_value_heads=1),
    "biases": replace(BASE, attention_bias=True),
    "block of 2": replace(BASE, block_size=2),
    "block of 7": replace(BASE, block_size=7),
    "one layer, one feature": replace(BASE, num_layers=1, target_layer_ids=(2,)),
    "large theta and eps": replace(BASE, rope_theta=1e7, rms_norm_eps=1e-2),
}
ROW = pack([9, 1, 12, 3], 28)
ANCHORS = [1, 7, 8, 10, 14, 20, 24]


def random_drafter(config: DrafterConfig) -> Drafter:
    """Every parameter random, norms and biases too, so that one that is left out shows."""
    drafter = Drafter(config, HIDDEN)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in drafter.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * values if "norm" in name else 0.3 * values
    return drafter


def random_inputs(config: DrafterConfig, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Features [1, T, K·H] and embeddings [1, N, B, H]."""
    generator = torch.Generator().manual_seed(2)
    features = 3 * torch.randn(1, len(ROW.input_ids), len(config.target_layer_ids) * HIDDEN, generator=generator)
    return features, torch.randn(1, num_blocks, config.block_size, HIDDEN, generator=generator)


def run(drafter: Drafter, features: Tensor, embeddings: Tensor, row: Row, anchors: list[int | None]) -> Tensor:
    """[N, B, H]; an anchor of None is a padding block."""
    starts = [0 if a is None else a - row.position_ids[a] for a in anchors]
    positions = [0 if a is None else row.position_ids[a] for a in anchors]
    slots = torch.arange(drafter.config.block_size)
    return drafter(
        embeddings,
        torch.tensor([positions])[:, :, None] + slots,
        drafter.encode_context(features, stack([row], "position_ids")),
        torch.tensor([starts]),
        torch.tensor([[a or 0 for a in anchors]]),
    )[0]


def reference_shape(config: DrafterConfig) -> Shape:
    return Shape(
        num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
        layer_types=config.layer_types or [FULL] * config.num_layers,
        sliding_window=config.sliding_window,
        is_causal=config.is_causal,
    )


def reference_weights(drafter: Drafter) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in split_projections(drafter.state_dict(), drafter.config).items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_equals_the_oracle(name):
    """Outputs are of unit scale and pass ≤ 2 layers of ≤ 60-term sums in fp32 (eps 6e-8): 1e-5 leaves a margin of 5."""
    config = VARIANTS[name]
    drafter, anchors = random_drafter(config), [*ANCHORS, None]
    features, embeddings = random_inputs(config, len(anchors))
    with torch.no_grad():
        output = run(drafter, features, embeddings, ROW, anchors)
    expected = drafter_forward(
        reference_weights(drafter),
        reference_shape(config),
        features_TF=features[0].double(),
        embeddings_NBH=embeddings[0].double(),
        row=Packing(document_ids=ROW.document_ids, positions=ROW.position_ids, anchors=anchors),
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_parameters_are_the_exported_ones():
    drafter = random_drafter(replace(BASE, num_layers=3))
    names = {"fc", "hidden_norm", "norm"}
    for i in range(3):
        names |= {f"layers.{i}.{name}" for name in ("input_layernorm", "post_attention_layernorm")}
        names |= {f"layers.{i}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        names |= {f"layers.{i}.self_attn.{name}" for name in ("q_norm", "k_norm")}
        names |= {f"layers.{i}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    published = split_projections(drafter.state_dict(), drafter.config)
    assert published.keys() == {f"{name}.weight" for name in names}
    assert len(names) == 11 * 3 + 3
    joined = join_projections(published)
    assert joined.keys() == drafter.state_dict().keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, FULL)])
def test_a_block_depends_on_its_own_document_before_the_anchor_and_on_itself_only(layer_types):
    """The gradient of one block's output reaches exactly the features and embeddings that it may see."""
    config = replace(BASE, layer_types=layer_types, sliding_window=20 if SLIDING in layer_types else None)
    drafter = random_drafter(config)
    features, embeddings = (x.requires_grad_() for x in random_inputs(config, len(ANCHORS)))
    output = run(drafter, features, embeddings, ROW, ANCHORS)
    for n, anchor in enumerate(ANCHORS):
        gradients = torch.autograd.grad(output[n].sum(), (features, embeddings), retain_graph=True)
        touched_tokens = gradients[0][0].abs().sum(dim=1).nonzero()[:, 0].tolist()
        assert touched_tokens == list(range(ROW.document_ids.index(ROW.document_ids[anchor]), anchor))
        assert gradients[1][0].abs().sum(dim=(1, 2)).nonzero()[:, 0].tolist() == [n]


def test_a_document_gives_the_same_output_alone_and_packed():
    """Bitwise it need not be: kernels may sum other lengths in another order."""
    drafter = random_drafter(BASE)
    features, embeddings = random_inputs(BASE, 2)
    packed = run(drafter, features, embeddings, ROW, [14, 20])
    alone = run(drafter, features[:, 10:22], embeddings, pack([12], 12), [4, 10])
    torch.testing.assert_close(packed, alone, atol=2e-6, rtol=1e-5)


def test_initial_weights_depend_on_the_seed_alone():
    drafters = [Drafter(BASE, HIDDEN) for _ in range(3)]
    for drafter, seed in zip(drafters, (0, 0, 1), strict=True):
        drafter.init_weights(seed)
    first, same, other = (drafter.state_dict() for drafter in drafters)
    assert all(torch.equal(first[name], same[name]) for name in first)
    for name, tensor in first.items():
        if "norm" in name:
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            deviation = BASE.init_std * (2 * tensor.numel()) ** -0.5  # standard error of a standard deviation
            assert abs(tensor.std().item() - BASE.init_std) < 4 * deviation


def test_rotation_at_the_last_position_of_the_longest_row():
    """fp32 holds an angle of 131,071 radians to 2^-8 or better: 0.004 of error in the fastest pair, no more."""
    position = (1 << 17) - 1
    vector = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    rotated = rotate(vector, rotary_embedding(torch.tensor([[position]]), 8, 1e4)).flatten().double()
    angles = position * 1e4 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    first, second = vector.flatten().double().chunk(2)
    expected = torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))
    torch.testing.assert_close(rotated, expected, atol=0.01, rtol=0)
