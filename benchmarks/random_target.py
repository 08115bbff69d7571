"""A target of any size that needs no download: random weights, a byte-level tokenizer with a ChatML template, and text.

For benchmarks and tests, where what counts is shapes. The folder is in transformers' layout and is written without
transformers, one file of weights at a time, so that 8B parameters take seconds on a GPU.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

INIT_STD = 0.02
FILE_BYTES = 4 << 30  # of one file of weights
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 0..3; then the 256 bytes
PAD_ID, EOS_ID, MASK_ID = 0, 2, 3
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    family: Literal["qwen3", "llama"] = "qwen3"
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 1e6
    tied: bool = False
    sliding_window: int | None = None  # of every other layer; qwen3 only


SHAPES = {
    "tiny": TargetShape(
        hidden_size=64,
        num_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=320,
        rope_theta=1e4,
    ),
    "smollm2-135m": TargetShape(
        family="llama",
        hidden_size=576,
        num_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49_152,
        rope_theta=1e5,
        tied=True,
    ),
    "qwen3-8b": TargetShape(
        hidden_size=4096,
        num_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12_288,
        vocab_size=151_936,
    ),
    # The sizes of Qwen3.6-27B with full attention in every layer, which the real one has in every fourth.
    "qwen3.6-27b": TargetShape(
        hidden_size=5120,
        num_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=17_408,
        vocab_size=248_320,
        rope_theta=1e7,
    ),
}


def make_random_target(
    folder: Path, shape: TargetShape, *, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> None:
    """Write a target of `shape` with normal weights into `folder`, which is made."""
    write_model_config(folder, shape, dtype)
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    _write_tokenizer(folder, shape.vocab_size)
    _write_weights(folder, shape, dtype, torch.Generator(device).manual_seed(seed))


def write_model_config(folder: Path, shape: TargetShape, dtype: torch.dtype) -> None:
    """Write a target's config.json, all that building it without weights takes, into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _model_config(shape, dtype))


def write_random_data(path: Path, *, num_tokens: int, mean_tokens: float = 948.0, seed: int = 0) -> None:
    """Write JSONL of random letters, chats and texts by turns, with log-normal lengths (sigma 1), a token a byte."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for number in range(2**63):
            if written >= num_tokens:
                return
            length = max(8, int(rng.lognormal(math.log(mean_tokens) - 0.5)))
            letters = rng.integers(ord("a"), ord("z") + 1, length, dtype=np.uint8).tobytes().decode()
            question, answer = letters[: length // 4], letters[length // 4 :]
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            record = {"text": letters, "source": "text"} if number % 2 else {"messages": chat, "source": "chat"}
            file.write(json.dumps(record) + "\n")
            written += length


def weight_shapes(shape: TargetShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight, in the order of the forward pass."""
    hidden, head_dim = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        if shape.family == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate_size, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate_size, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, shape.intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def _model_config(shape: TargetShape, dtype: torch.dtype) -> dict[str, Any]:
    config = {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[shape.family]],
        "model_type": shape.family,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 1 << 17,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if shape.sliding_window is not None:
        kinds = ("full_attention", "sliding_attention")
        config |= {"use_sliding_window": True, "sliding_window": shape.sliding_window}
        config |= {"layer_types": [kinds[layer % 2] for layer in range(shape.num_layers)]}
    return config


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    assert vocab_size >= MIN_VOCAB_SIZE
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "chat_template": CHATML,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_weights(folder: Path, shape: TargetShape, dtype: torch.dtype, generator: torch.Generator) -> None:
    """In files of FILE_BYTES with an index, as a large checkpoint comes."""
    files = _group(list(weight_shapes(shape)), FILE_BYTES // dtype.itemsize)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, weights in zip(names, files, strict=True):
        tensors = {weight: _random(size, dtype, generator) for weight, size in weights}
        save_file({weight: tensor.cpu() for weight, tensor in tensors.items()}, folder / name, {"format": "pt"})
    weight_map = {weight: name for name, weights in zip(names, files, strict=True) for weight, _ in weights}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _group(weights: list[tuple[str, tuple[int, ...]]], max_values: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Consecutive weights of at most `max_values` together, at least one to a group."""
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    num_values = 0
    for name, size in weights:
        if groups[-1] and num_values + math.prod(size) > max_values:
            groups.append([])
            num_values = 0
        groups[-1].append((name, size))
        num_values += math.prod(size)
    return groups


def _random(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)  # a norm's weight
    return torch.empty(size, dtype=dtype, device=generator.device).normal_(std=INIT_STD, generator=generator)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_target", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="another number of decoder layers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="also write random text for it to this JSONL file")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of that text (default: %(default)s)")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.layers is not None:
        shape = dataclasses.replace(shape, num_layers=arguments.layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make_random_target(
        arguments.folder, shape, dtype=getattr(torch, arguments.dtype), seed=arguments.seed, device=device
    )
    if arguments.data is not None:
        write_random_data(arguments.data, num_tokens=arguments.tokens, seed=arguments.seed)


if __name__ == "__main__":
    main()
