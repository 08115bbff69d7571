"""The live target: features, rewinding, and the targets and drafters that don't go together."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.random_target import SPECIAL_TOKENS
from shards.errors import UsageError
from speculate.target import LiveTarget, TargetSequence, check_match, read_architecture
from tests.speculate.conftest import CPU, Pair
from train.published import DraftCheckpoint

IDS = list(range(60, 90))


def test_features_are_the_outputs_of_the_chosen_layers(pair: Pair) -> None:
    """Taken by hooks on the decoder layers, so independently of transformers' numbering of hidden states."""
    outputs = {}
    layers = pair.target.model.get_decoder().layers
    handles = [
        layer.register_forward_hook(lambda _module, _inputs, output, i=i: outputs.update({i: output}))
        for i, layer in enumerate(layers)
    ]
    _, features_TF = TargetSequence(pair.target).run(IDS, num_choices=1)
    for handle in handles:
        handle.remove()
    chosen = [outputs[i][0] for i in pair.checkpoint.drafter.target_layer_ids]
    torch.testing.assert_close(features_TF, torch.cat(chosen, dim=-1), rtol=0, atol=0)


def test_a_rewound_sequence_goes_on_as_if_nothing_had_been(pair: Pair) -> None:
    """Longer than the sliding window of the target that has one."""
    straight, rewound = TargetSequence(pair.target), TargetSequence(pair.target)
    straight.run(IDS[:20], num_choices=1)
    rewound.run(IDS[:18], num_choices=1)
    rewound.run([*IDS[18:20], 7, 8, 9], num_choices=5)
    rewound.rewind(3)
    rewound.rewind(0)
    logits_TV, features_TF = straight.run(IDS[20:], num_choices=10)
    logits_again_TV, features_again_TF = rewound.run(IDS[20:], num_choices=10)
    torch.testing.assert_close(logits_again_TV, logits_TV)
    torch.testing.assert_close(features_again_TF, features_TF)


def test_all_end_tokens_of_the_generation_config_stop_an_answer(qwen3: Pair, tmp_path: Path) -> None:
    folder = copy_target(qwen3, tmp_path)
    path = folder / "generation_config.json"
    assert qwen3.target.stop_ids == {2}
    path.write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert LiveTarget.load(read_architecture(folder, None, CPU), qwen3.checkpoint, CPU).stop_ids == {2, 7}


def test_the_dtype_is_float32_on_a_cpu_unless_named(qwen3: Pair) -> None:
    assert read_architecture(qwen3.target_folder, None, CPU).dtype == torch.float32
    assert read_architecture(qwen3.target_folder, "bfloat16", CPU).dtype == torch.bfloat16


def test_the_logit_gap_is_that_of_the_last_position(qwen3: Pair) -> None:
    with torch.no_grad():
        logits_V = qwen3.target.model(torch.tensor([IDS])).logits[0, -1]
    gap, tie_gap = qwen3.target.logit_gap(IDS, 5, 9)
    assert gap == pytest.approx(abs(logits_V[5] - logits_V[9]).item(), rel=1e-5)
    assert tie_gap == 0.0


def test_bfloat16_ties_what_four_of_its_steps_part(qwen3: Pair) -> None:
    target = LiveTarget.load(read_architecture(qwen3.target_folder, "bfloat16", CPU), qwen3.checkpoint, CPU)
    with torch.no_grad():
        logits_V = target.model(torch.tensor([IDS])).logits[0, -1].float()
    assert target.logit_gap(IDS, 5, 9)[1] == pytest.approx(4 * 2**-7 * logits_V.abs().max().item(), rel=2**-6)


def copy_target(pair: Pair, tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    for path in pair.target_folder.iterdir():
        (folder / path.name).symlink_to(path)
    for name in ("config.json", "generation_config.json"):
        text = (folder / name).read_text()
        (folder / name).unlink()
        (folder / name).write_text(text)
    return folder


HYBRID = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 264,
    "num_experts": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
}
RECURRENT = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 5, "vocab_size": 264}


@pytest.mark.parametrize("config", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
def test_targets_with_a_recurrent_state_are_refused_before_weights_are_read(tmp_path: Path, config: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="can't be rewound"):
        read_architecture(tmp_path, None, CPU)


def test_a_folder_that_is_no_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_architecture(tmp_path, None, CPU)
    (tmp_path / "config.json").write_text('{"model_type": "no such family"}')
    with pytest.raises(UsageError, match="describes no target"):
        read_architecture(tmp_path, None, CPU)


@pytest.mark.parametrize("change", [{"hidden_size": "32"}, {"num_attention_heads": 0}, {"dtype": "no"}, None], ids=str)
def test_a_malformed_config_is_one_sentence(qwen3: Pair, tmp_path: Path, change: dict | None) -> None:
    folder = copy_target(qwen3, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change and config | change))
    with pytest.raises(UsageError, match=r"config\.json describes no target that can be run: \w+: ") as error:
        read_architecture(folder, None, CPU)
    assert "\n" not in str(error.value)


MISMATCHES = {
    "hidden_size 64, the target .* has 32": {"hidden_size": 64},
    "vocab_size 300, the target .* has 264": {"vocab_size": 300},
    "number of layers 30, the target .* has 5": {"num_target_layers": 30},
    f"mask_token_id {264 + len(SPECIAL_TOKENS)}": {"mask_token_id": 264 + len(SPECIAL_TOKENS)},
}


@pytest.mark.parametrize("message", MISMATCHES)
def test_a_drafter_of_another_target_is_refused(qwen3: Pair, message: str) -> None:
    other = dataclasses.replace(qwen3.checkpoint, **MISMATCHES[message])
    with pytest.raises(UsageError, match=message) as error:
        check_match(read_architecture(qwen3.target_folder, None, CPU), other)
    assert str(qwen3.drafter_folder) in str(error.value)


@pytest.mark.parametrize("layers", [(0, 4), (-1, 2), (1, 7)])
def test_a_drafter_that_wants_layers_the_target_lacks_is_refused(qwen3: Pair, layers: tuple[int, ...]) -> None:
    drafter = dataclasses.replace(qwen3.checkpoint.drafter, target_layer_ids=layers)
    checkpoint: DraftCheckpoint = dataclasses.replace(qwen3.checkpoint, drafter=drafter)
    with pytest.raises(UsageError, match=r"must be in 0\.\.3"):
        check_match(read_architecture(qwen3.target_folder, None, CPU), checkpoint)
