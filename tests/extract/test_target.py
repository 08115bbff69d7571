"""The target over packed rows: every document comes out as if alone, and what would not is refused."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.random_target import EOS_ID, PAD_ID, TargetShape, make_random_target
from extract.attention import BY_DOCUMENT, Documents
from extract.target import Target, check_mask_token, isolation_mask, load_model, read_architecture
from extract.tokenise import Encoder
from shards.config import CacheConfig, TargetConfig
from shards.errors import UsageError
from tests.extract.tiny import LAYERS, ROW_TOKENS, SHAPES, SIZES

CACHE = CacheConfig(row_tokens=ROW_TOKENS, layers=LAYERS, final_hidden=True)
LENGTHS = [[1, 20, 2, 30], [64], [7, 7, 7, 7, 7, 7, 7, 7], [3]]  # of the documents of each row; the rest is padding


def config_of(folder: Path, **changes: Any) -> TargetConfig:
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_layers", "vocab_size")}
    return TargetConfig(**({"path": str(folder), "dtype": "float32", "mask_token_id": 3} | sizes | changes))


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    make_random_target(folder, SHAPES[request.param], seed=1)
    return folder


def load(folder: Path, cache: CacheConfig = CACHE) -> Target:
    return Target.load(read_architecture(config_of(folder), cache), cache, torch.device("cpu"))


def packed_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token, position and document ids [R, T] of rows with documents of LENGTHS."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, SIZES["vocab_size"], (len(LENGTHS), ROW_TOKENS), generator=generator)
    positions, documents = torch.zeros_like(ids), torch.full_like(ids, -1)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            positions[row, start : start + length] = torch.arange(length)
            documents[row, start : start + length] = 100 * row + number
            start += length
    return ids, positions, documents


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def test_packed_documents_equal_documents_alone(folder: Path) -> None:
    ids, positions, documents = packed_rows()
    states = load(folder).run(ids, positions, documents)
    assert list(states) == [*LAYERS, SIZES["num_layers"]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for document in documents.unique().tolist():
        if document == -1:
            continue
        row, slots = document // 100, documents[document // 100] == document
        with torch.inference_mode():
            alone = model(ids[row, slots][None], output_hidden_states=True).hidden_states
        for layer, state in states.items():
            # hidden_states[0] is the embedding; the last entry is after the final norm.
            index = layer + 1 if layer < SIZES["num_layers"] else -1
            assert relative_error(state[row, slots], alone[index][0]) < 1e-5, (document, layer)


def attend_in_turn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, window: int | None, scale: float
) -> torch.Tensor:
    """What the GPU's kernel computes of [slots, heads, head dim], score by score."""
    output = torch.empty_like(query)
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    bounds = documents.bounds.tolist()
    assert documents.longest == max(end - start for start, end in itertools.pairwise(bounds))
    for start, end in itertools.pairwise(bounds):
        for slot in range(start, end):
            seen = slice(start if window is None else max(start, slot - window + 1), slot + 1)
            scores = torch.einsum("hd,khd->hk", query[slot], key[seen]) * scale
            output[slot] = torch.einsum("hk,khd->hd", scores.softmax(-1), value[seen])
    return output


def test_attention_by_document_is_attention_by_mask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the kernel, which needs a GPU: what each layer is asked to attend to, through the library's own path."""
    monkeypatch.setattr("extract.attention.flash_attention", attend_in_turn)
    architecture, device = read_architecture(config_of(folder), CACHE), torch.device("cpu")
    model = load_model(architecture, SIZES["num_layers"], device, attention=BY_DOCUMENT)
    by_document, by_mask = Target(architecture, CACHE, model), load(folder)
    rows = packed_rows()
    expected = by_mask.run(*rows)
    for layer, states in by_document.run(*rows).items():
        assert relative_error(states[rows[2] >= 0], expected[layer][rows[2] >= 0]) < 1e-5


def test_neighbours_and_padding_change_nothing(folder: Path) -> None:
    target = load(folder)
    ids, positions, documents = packed_rows()
    kept = documents == 1  # the second document of the first row
    others = torch.where(kept, ids, packed_rows(seed=1)[0])
    before, after = target.run(ids, positions, documents), target.run(others, positions, documents)
    for layer, state in before.items():
        assert relative_error(after[layer][kept], state[kept]) < 1e-5
        assert relative_error(after[layer][~kept], state[~kept]) > 1e-2  # the comparison can see a change


def test_the_batch_changes_nothing(folder: Path) -> None:
    target = load(folder)
    rows = packed_rows()
    together = target.run(*rows)
    for row in range(len(LENGTHS)):
        alone = target.run(*(tensor[row : row + 1] for tensor in rows))
        assert all(relative_error(alone[layer][0], state[row]) < 1e-5 for layer, state in together.items())


def test_layers_above_the_last_captured_one_are_not_loaded(folder: Path) -> None:
    whole, cut = load(folder), load(folder, dataclasses.replace(CACHE, final_hidden=False))
    assert len(cut.decoder.layers) == LAYERS[-1] + 1 < len(whole.decoder.layers)
    rows = packed_rows()
    states = whole.run(*rows)
    assert all(torch.equal(state, states[layer]) for layer, state in cut.run(*rows).items())


def test_the_mask_slot_by_slot() -> None:
    documents = torch.tensor([[5, 5, 5, 5, 6, 6, -1]])
    for window in (None, 2):
        mask = isolation_mask(documents, window)[0, 0]
        for query in range(7):
            for key in range(7):
                same = documents[0, query] == documents[0, key]
                expected = same and key <= query and (window is None or query - key < window)
                assert mask[query, key] == expected


def write_target(folder: Path, shape: TargetShape = SHAPES["qwen3"], **changes: Any) -> Path:
    """A target whose config.json has `changes`."""
    make_random_target(folder, shape)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


REFUSED = {
    "linear attention": (
        {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_experts": 4},
        "leak into each other",
    ),
    "a recurrent state": ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "leak into each other"),
    "chunked attention": (
        {"layer_types": ["full_attention"] * 4 + ["chunked_attention"]},
        "layers of the kind chunked_attention",
    ),
    "scaling by the longest": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rotary scaling that depends on the longest document of a row (dynamic)",
    ),
    "too few positions": ({"max_position_embeddings": 32}, "row_tokens is 64, but the target"),
    "capped scores": (
        {"model_type": "gemma3_text", "rope_parameters": None, "attn_logit_softcapping": 50.0},
        "has an attention that can't be computed",
    ),
    "attention sinks": ({"model_type": "gpt_oss", "rope_parameters": None}, "(gpt_oss) has an attention that can't be"),
    "impossible sizes": ({"model_type": "mamba2", "head_dim": 7}, "must equal num_heads * head_dim"),
    "a size that is no number": ({"hidden_size": "32"}, "TypeError: Field 'hidden_size' expected int, got str"),
    "no heads": ({"num_attention_heads": 0}, "ZeroDivisionError: "),
    "no family": ({"model_type": "something"}, "describes no target that can be run"),
    "another hidden size": ({"hidden_size": 16}, "target.hidden_size is 32, but"),
    "another depth": ({"num_hidden_layers": 4}, "target.num_layers is 5, but"),
    "another vocabulary": ({"vocab_size": 300}, "target.vocab_size is 264, but"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_come_out_wrong_is_refused(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    folder = write_target(tmp_path / "target", **changes)
    with pytest.raises(UsageError) as raised:
        read_architecture(config_of(folder), CACHE)
    assert message in str(raised.value)
    assert str(folder) in str(raised.value)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_architecture(config_of(tmp_path), CACHE)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", tie_word_embeddings=False)
    shape = dataclasses.replace(SHAPES["qwen3"], num_layers=2)
    (folder / "model.safetensors.index.json").unlink()
    make_random_target(tmp_path / "shallow", shape)
    for path in (tmp_path / "shallow").glob("model*"):
        path.rename(folder / path.name)
    with pytest.raises(UsageError, match="lacks 22 weights of the target"):  # two layers of eleven
        load(folder, dataclasses.replace(CACHE, final_hidden=False))


@pytest.mark.parametrize(("mask_token_id", "name"), [(PAD_ID, "pad"), (EOS_ID, "eos")])
def test_a_mask_token_that_text_has_is_refused(tmp_path: Path, mask_token_id: int, name: str) -> None:
    folder = write_target(tmp_path / "target")
    encoder = Encoder.load(folder)
    with pytest.raises(UsageError, match=f"is {mask_token_id}, the tokenizer's {name} token"):
        check_mask_token(config_of(folder, mask_token_id=mask_token_id), encoder)
    check_mask_token(config_of(folder), encoder)


def test_the_generation_config_may_name_more_ends(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 77]}')
    with pytest.raises(UsageError, match="the generation config's eos token"):
        check_mask_token(config_of(folder, mask_token_id=77), Encoder.load(folder))


def test_states_are_independent_of_later_runs(folder: Path) -> None:
    target = load(folder)
    rows = packed_rows()
    states = target.run(*rows)
    before = {layer: state.clone() for layer, state in states.items()}
    target.run(*packed_rows(seed=2))
    assert all(torch.equal(before[layer], state) for layer, state in states.items())
