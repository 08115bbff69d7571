"""How much memory a training process needs, estimated from the configuration: what train/ allocates, added up."""

import math

from shards.codec import CODECS, bytes_per_token
from train.config import RunConfig
from train.export import exported_shapes
from train.head import chunk_rows

BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}  # of an element of weights and activations
INPUT_BYTES = 3 * 4 + 1  # of a token beside its features: three int32 and the loss mask
RESERVED_PER_ALLOCATED = 1.25  # of a GPU's memory: 1.23 in bf16, 1.27 in fp8, measured on an H200 at Qwen3-8B's sizes


def num_parameters(config: RunConfig) -> int:
    return sum(math.prod(shape) for shape in exported_shapes(config).values())


def feature_bytes(config: RunConfig) -> int:
    """Stored bytes of one token's features."""
    return len(config.drafter.target_layer_ids) * bytes_per_token(CODECS[config.cache.codec], config.target.hidden_size)


def memory_estimate(config: RunConfig, *, num_processes: int, is_for_gpu: bool) -> dict[str, int]:
    """Bytes of one process at the peak of a step, by what they are for, as the code allocates them."""
    target, settings = config.target, config.train
    element = BYTES[settings.precision]
    parameters, head = num_parameters(config), target.vocab_size * target.hidden_size
    is_float8 = settings.precision == "fp8"
    gradient = 4 if settings.num_micro_steps(num_processes) > 1 else element  # sums over micro-steps are fp32
    num_stagings = 2 if is_for_gpu else 1  # on a GPU rows land beside those that the step reads
    return {
        "weights": element * parameters if element < 4 else 0,  # in fp32 they are the masters
        "masters, moments": 3 * 4 * parameters,
        "gradients": gradient * parameters,
        "target's head": 2 * element * head,  # half of it where the target ties embedding and head
        "8-bit copies": 2 * (parameters + head) if is_float8 else 0,  # as they lie and transposed
        "rows": num_stagings * num_tokens(config) * (feature_bytes(config) + INPUT_BYTES),
        "activations": activation_bytes(config),
        "temporary": max(logit_bytes(config, is_for_gpu=is_for_gpu), mlp_gradient_bytes(config)),
    }


def activation_bytes(config: RunConfig) -> int:
    """What the forward pass keeps for the backward pass, in the order in which train/drafter.py makes it."""
    drafter, hidden = config.drafter, config.target.hidden_size
    element = BYTES[config.train.precision]
    is_float8 = config.train.precision == "fp8"
    kept = 1 if is_float8 else element  # of the input of a product
    query, key = (heads * drafter.head_dim for heads in (drafter.num_attention_heads, drafter.num_key_value_heads))
    mlp = (
        element * 2 * drafter.intermediate_size  # gate and up
        + kept * drafter.intermediate_size  # into down
    )
    slot_and_layer = mlp + (
        kept * hidden  # normed, into q, k, v
        + element * 2 * (query + 2 * key)  # projected, then normed and rotated
        + element * query  # attention's output, which attention keeps itself
        + (query if is_float8 else 0)  # and in 8 bits for o
        + element * 2 * hidden  # the residual stream after attention and after the MLP
        + kept * hidden  # normed, into gate and up
    )
    slots, tokens, layers = num_slots(config), num_tokens(config), drafter.num_layers
    match config.train.recompute:  # what is made again is there for one layer at a time
        case "none":
            layer_activations = slots * layers * slot_and_layer
        case "mlp":
            layer_activations = slots * (layers * (slot_and_layer - mlp) + mlp)
        case "layer":
            layer_activations = slots * (layers * 2 * element * hidden + slot_and_layer)
    slot = 5 * element * hidden  # embeddings, final norm, what of it goes into the head, its gradient in two copies
    token_and_layer = element * 2 * 2 * key + (hidden if is_float8 else 0)  # k and v twice; in 8 bits, their own input
    token = kept * len(drafter.target_layer_ids) * hidden + element * 2 * hidden  # features, fc's output, normed
    return layer_activations + slots * slot + tokens * (layers * token_and_layer + token)


def logit_bytes(config: RunConfig, *, is_for_gpu: bool) -> int:
    """One chunk of the head's logits; on the CPU several of its kind are alive at once."""
    drafter, vocab_size = config.drafter, config.target.vocab_size
    num_logits = vocab_size * chunk_rows(num_slots(config) // drafter.block_size * (drafter.block_size - 1), vocab_size)
    if not is_for_gpu:
        return 4 * 4 * num_logits
    return num_logits * (BYTES[config.train.precision] + (1 if config.train.precision == "fp8" else 0))


def mlp_gradient_bytes(config: RunConfig) -> int:
    """What the backward pass of the last MLP adds to the activations, of which it has freed the input of `down`."""
    element = BYTES[config.train.precision]
    kept = 1 if config.train.precision == "fp8" else element
    width = config.drafter.intermediate_size
    return num_slots(config) * (element * (3 * width + 2 * config.target.hidden_size) - kept * width)


def num_tokens(config: RunConfig) -> int:
    """Slots of the rows of a micro-step."""
    return config.train.rows_per_micro_step * config.cache.row_tokens


def num_slots(config: RunConfig) -> int:
    """Of all blocks of a micro-step."""
    return config.train.rows_per_micro_step * config.train.num_anchors * config.drafter.block_size
