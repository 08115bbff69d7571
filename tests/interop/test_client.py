"""The published client (`dflash` on PyPI) loads what training exports, and computes and decodes what we do."""

import time
from dataclasses import replace
from pathlib import Path

import dflash.model
import pytest
import torch
from dflash import DFlashDraftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from extract.head import read_head
from shards.sections import DrafterConfig
from speculate.decode import decode_plainly, decode_speculatively
from speculate.drafting import BlockDrafter
from speculate.target import LiveTarget, read_architecture
from tests.speculate.fitted import fit
from tests.speculate.tiny import DRAFTER, PROMPTS, SIZES, TARGETS, Scale, make_drafter, make_target, run_config
from train.published import DraftCheckpoint

CPU = torch.device("cpu")
SLIDING, FULL = "sliding_attention", "full_attention"
ONE_SLIDING = {"layer_types": (SLIDING, FULL), "sliding_window": 5}
ALL_SLIDING = {"layer_types": (SLIDING, SLIDING), "sliding_window": 5}
GEMMA = "gemma"  # embedding times √H, capped logits, sliding layers
NEW_TOKENS = 23
# The client calls targets by a name that transformers drops in 5.40; pyproject.toml holds tests to those before.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


def target_folder(folder: Path, name: str) -> Path:
    if name != GEMMA:
        return make_target(folder, TARGETS[name])
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_layers", "rope_theta")}
    config = AutoConfig.for_model(
        "gemma3_text",
        **sizes,
        num_hidden_layers=SIZES["num_layers"],
        sliding_window=6,
        final_logit_softcapping=5.0,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # large enough for the cap to bend logits
    model.save_pretrained(folder)
    return folder


class Both:
    """One exported directory as both programs load it, and its target."""

    def __init__(self, folder: Path, drafter_folder: Path) -> None:
        self.checkpoint = DraftCheckpoint.read(drafter_folder)
        self.target = LiveTarget.load(read_architecture(folder, None, CPU), self.checkpoint, CPU)
        self.drafter = self.checkpoint.load_drafter(CPU, torch.float32)
        self.theirs, report = DFlashDraftModel.from_pretrained(
            drafter_folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report.values()), report  # nothing is missing, unexpected or of another shape
        self.theirs.eval()

    def ours(self) -> BlockDrafter:
        return BlockDrafter(self.drafter, self.target.head(self.checkpoint), self.checkpoint.mask_token_id)


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scale]:
    """A target's folder, and the factors that extraction finds in it."""
    folder = target_folder(tmp_path_factory.mktemp("client") / "target", request.param)
    head = read_head(read_architecture(folder, None, CPU))
    factors = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    return folder, Scale(**{name: getattr(head, name) for name in factors})


DRAFTERS = {
    "full": DRAFTER,
    "full, causal": replace(DRAFTER, is_causal=True),
    "full, said not to be causal": replace(DRAFTER, is_causal=False),
    "sliding": replace(DRAFTER, **ALL_SLIDING),
    "sliding and full": replace(DRAFTER, **ONE_SLIDING),
    "sliding and full, not causal": replace(DRAFTER, **ONE_SLIDING, is_causal=False),
    "sliding and full, causal": replace(DRAFTER, **ONE_SLIDING, is_causal=True),
    "a window narrower than the block": replace(DRAFTER, **ALL_SLIDING, is_causal=False, block_size=8),
    "blocks of 2, every head its own keys": replace(DRAFTER, block_size=2, num_key_value_heads=4),
    "blocks of 16, one head of keys": replace(DRAFTER, block_size=16, num_key_value_heads=1),
    "biases, other sizes, one layer": replace(
        DRAFTER, attention_bias=True, head_dim=16, num_layers=1, num_attention_heads=6, rope_theta=1e6
    ),
}


@pytest.mark.parametrize("target", ["qwen3", GEMMA], indirect=True)
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_logits_are_theirs(tmp_path: Path, target: tuple[Path, Scale], drafter: DrafterConfig) -> None:
    """Over several rounds, so that their caches (sliding ones drop what they can) are compared with ours, too."""
    folder, scale = target
    both = Both(folder, make_drafter(tmp_path / "d", run_config(folder, TARGETS["qwen3"], drafter), scale))
    ours, cache = both.ours(), dflash.model._make_cache(both.theirs.config)
    features_TF = torch.randn(16, 3 * 32, generator=torch.Generator().manual_seed(2))
    num_tokens = 0
    for grown_by in (9, 1, 4, 2):
        new_TF = features_TF[num_tokens : num_tokens + grown_by]
        num_tokens += grown_by
        ours.extend(new_TF)
        our_logits = ours.logits(72, drafter.block_size - 1)
        torch.testing.assert_close(our_logits, their_logits(both, cache, new_TF, num_tokens), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def their_logits(both: Both, cache: object, new_TF: Tensor, num_tokens: int) -> Tensor:
    """Of a block after `num_tokens` tokens, the last of them new, by the calls of the client's own loop."""
    model, block_size = both.theirs, both.theirs.block_size
    block_ids = torch.tensor([[72] + [model.mask_token_id] * (block_size - 1)])
    embedded = dflash.model._raw_input_embeddings(
        both.target.model, block_ids, dflash.model._draft_value(model.config, "input_embedding_scale", 1.0)
    )
    hidden = model(
        target_hidden=new_TF[None],
        noise_embedding=embedded,
        position_ids=torch.arange(num_tokens - len(new_TF), num_tokens + block_size)[None],
        past_key_values=cache,
        use_cache=True,
    )
    dflash.model._crop_to(cache, num_tokens)
    return model.compute_logits(hidden[:, 1:], both.target.model.get_output_embeddings())[0]


@pytest.mark.parametrize(
    ("target", "layers"),
    [("llama, tied", {}), ("qwen3", ONE_SLIDING), ("qwen3, sliding", {}), (GEMMA, ONE_SLIDING)],
    indirect=["target"],
)
def test_decoding_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: tuple[Path, Scale], layers: dict
) -> None:
    """Token for token the target's own greedy answer, and round for round the same number of tokens."""
    folder, scale = target
    both = Both(folder, fit(folder, tmp_path / "d", replace(DRAFTER, **layers), scale))
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)  # the client's statistics want a GPU
    stop_ids = sorted(both.target.stop_ids)
    lengths = set()
    for prompt in PROMPTS:
        input_ids, own_ids = torch.tensor([prompt]), decode_plainly(both.target, prompt, NEW_TOKENS)
        theirs = both.theirs.spec_generate(both.target.model, input_ids, NEW_TOKENS, stop_ids)
        assert theirs[0, len(prompt) :].tolist() == own_ids
        traced = dflash.model.dflash_generate(
            both.theirs, both.target.model, input_ids, NEW_TOKENS, stop_ids, return_stats=True
        )
        ours = decode_speculatively(both.target, both.ours(), prompt, NEW_TOKENS)
        assert ours.token_ids == own_ids
        assert [item.num_committed for item in ours.rounds] == traced.acceptance_lengths
        lengths |= set(traced.acceptance_lengths)
    assert len(lengths) > 1, lengths  # else nothing was compared but one kind of round
