"""`python -m speculate` from its arguments to its exit code, JSON and table."""

import json
import sys
from pathlib import Path

import pytest
import torch

from shards.errors import RunError
from speculate.__main__ import main
from speculate.acceptance import measure
from speculate.decode import Decoded, Round, decode_plainly
from speculate.prompts import Prompt
from speculate.report import Difference, Report
from speculate.run import conclude, find_difference, find_differences
from speculate.target import LiveTarget, read_architecture
from tests.speculate.conftest import CPU, Pair

NEW_TOKENS = 6
CONFIG = """
[target]
path = "{target}"
dtype = "float32"
hidden_size = 32
num_layers = 5
vocab_size = 264
mask_token_id = 3

[speculate]
prompts = "{prompts}"
max_new_tokens = 40
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"text": "once"}, {"messages": [{"role": "user", "content": "why"}]}, {"text": "upon a time"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def config(tmp_path: Path, qwen3: Pair, prompts: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.format(target=qwen3.target_folder, prompts=prompts))
    return path


@pytest.fixture
def run(tmp_path: Path, qwen3: Pair) -> Path:
    """A run directory, as far as its latest checkpoint goes."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-7").symlink_to(qwen3.drafter_folder)
    (checkpoints / "latest").symlink_to("step-7")
    return checkpoints.parent


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["speculate", *map(str, arguments)])
    return main()


def test_parts_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], qwen3: Pair, prompts: Path, tmp_path: Path
) -> None:
    parts = ("--target", qwen3.target_folder, "--drafter", qwen3.drafter_folder, "--prompts", prompts)
    limits = ("--num-prompts", 2, "--max-new-tokens", NEW_TOKENS)
    assert call(monkeypatch, *parts, *limits, "--json", tmp_path / "out.json") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["lossless"] is True
    assert result["first_difference"] is None
    assert result["ties"] == 0
    assert result["prompts"] == 2
    assert result["new_tokens"] == 2 * NEW_TOKENS
    assert sum(result["histogram"]) == result["rounds"]
    assert sum(count * (i + 1) for i, count in enumerate(result["histogram"])) == 2 * (NEW_TOKENS - 1)
    assert len(result["histogram"]) == result["block_size"] == 4
    assert len(result["per_slot"]) == 3
    assert 1.0 <= result["acceptance_length_macro"] <= 4.0
    low, high = result["acceptance_length_macro_interval"]
    assert low <= result["acceptance_length_macro"] <= high
    low, high = result["acceptance_length_pooled_interval"]
    assert low <= result["acceptance_length_pooled"] <= high
    assert result["acceptance_length_pooled"] == 2 * (NEW_TOKENS - 1) / result["rounds"]
    assert (result["device"], result["dtype"]) == ("cpu", "float32")
    output = capsys.readouterr().out
    assert "prompt 1/2: 6 tokens in " in output
    assert " rounds  ETA 00:" in output
    assert "prompt 2/2" in output
    assert "yes: every token is the target's own" in output


def test_parts_by_config(monkeypatch: pytest.MonkeyPatch, config: Path, run: Path, qwen3: Pair, tmp_path: Path) -> None:
    """The override limits the tokens, the flag the prompts."""
    arguments = ("--config", config, "--run", run, "--num-prompts", 1, f"speculate.max_new_tokens={NEW_TOKENS}")
    assert call(monkeypatch, *arguments, "--json", tmp_path / "out.json") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["prompts"], result["new_tokens"]) == (1, NEW_TOKENS)
    assert Path(result["drafter"]).resolve() == qwen3.drafter_folder.resolve()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--target is missing"),
        (("--target", "a", "--drafter", "b"), "--prompts is missing"),
        (("--target", "a", "--drafter", "b", "--prompts", "c"), "b/config.json does not exist"),
        (("--target", "a", "--drafter", "b", "--prompts", "c", "--num-prompts", "0"), "num_prompts is 0"),
        (("--target", "a", "--drafter", "b", "--prompts", "c", "--max-new-tokens", "1"), "max_new_tokens is 1"),
        (("--target", "a", "--drafter", "b", "--prompts", "c", "--run", "d"), "--run has no effect"),
        (("--target", "a", "--drafter", "b", "--prompts", "c", "train.lr=1"), "'train.lr=1' has no effect"),
        (("--target", "a", "--drafter", "b", "--prompts", "c", "--json", "no/out.json"), "directory no does not exist"),
        (("--target", "a", "--drafter", "b", "--prompts", "c", "--json", "/"), "--json / can't be written"),
        (("--config", "none.toml"), "none.toml does not exist"),
    ],
)
def test_wrong_usage_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not list(tmp_path.iterdir())


def test_wrong_configs_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    assert call(monkeypatch, "--config", config, "speculate.prompt=x") == 2
    assert "did you mean speculate.prompts or" in capsys.readouterr().err
    assert call(monkeypatch, "--config", config, "--run", tmp_path / "none") == 2
    assert "has no checkpoint: `make train` makes one" in capsys.readouterr().err


def test_a_changed_answer_is_found_with_its_gap(qwen3: Pair) -> None:
    prompt = Prompt(where="prompts.jsonl, line 9", token_ids=[70, 71])
    own_ids = [10, 11, 12]
    same = Decoded(token_ids=[10, 11, 12], rounds=[])
    other = Decoded(token_ids=[10, 99, 12], rounds=[])
    assert find_difference(qwen3.target, 4, prompt, own_ids, same) is None
    with torch.no_grad():
        logits_V = qwen3.target.model(torch.tensor([[70, 71, 10]])).logits[0, -1]
    assert find_difference(qwen3.target, 4, prompt, own_ids, other) == Difference(
        prompt=4,
        where="prompts.jsonl, line 9",
        token=1,
        own_token_id=11,
        speculative_token_id=99,
        logit_gap=pytest.approx(abs(logits_V[11] - logits_V[99]).item(), rel=1e-5),
        tie_gap=0.0,
    )


def test_after_a_tie_the_rest_is_compared(qwen3: Pair) -> None:
    """The head gets the first answer's token twice, so either may come. Then a token goes wrong that is no tie."""
    target = LiveTarget.load(read_architecture(qwen3.target_folder, "bfloat16", CPU), qwen3.checkpoint, CPU)
    prompt = Prompt(where="prompts.jsonl, line 9", token_ids=[70, 71])
    (own,) = decode_plainly(target, prompt.token_ids, 1)
    twin = own + 1
    target.model.lm_head.weight.data[twin] = target.model.lm_head.weight[own]
    own_ids = decode_plainly(target, prompt.token_ids, NEW_TOKENS)
    assert own_ids[0] == own
    token_ids = decode_plainly(target, prompt.token_ids, NEW_TOKENS, [twin])
    assert token_ids[0] == twin

    def differences() -> list[Difference]:
        return list(find_differences(target, 4, prompt, own_ids, Decoded(token_ids=token_ids, rounds=[]), NEW_TOKENS))

    (tie,) = differences()
    assert (tie.token, tie.is_tie, tie.logit_gap) == (0, True, 0.0)
    with torch.no_grad():
        token_ids[2] = target.model(torch.tensor([prompt.token_ids + token_ids[:2]])).logits[0, -1].argmin().item()
    assert [(found.token, found.is_tie) for found in differences()] == [(0, True), (2, False)]


def difference_of(logit_gap: float, tie_gap: float) -> Difference:
    return Difference(
        prompt=4,
        where="prompts.jsonl, line 9",
        token=1,
        own_token_id=11,
        speculative_token_id=99,
        logit_gap=logit_gap,
        tie_gap=tie_gap,
    )


def report_of(dtype: str, *differences: Difference) -> Report:
    return Report(
        target="models/t",
        drafter="runs/d",
        device="cpu",
        dtype=dtype,
        block_size=3,
        max_new_tokens=8,
        prompts=5,
        new_tokens=40,
        acceptance=measure([[Round(num_committed=2, num_accepted=1), Round(num_committed=1, num_accepted=0)]], 3),
        differences=list(differences),
    )


def test_ties_are_counted_and_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conclude(report_of("bfloat16", difference_of(0.0, 0.1), difference_of(0.0625, 0.1)), tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["lossless"], result["ties"], result["first_difference"]) == (True, 2, None)
    output = capsys.readouterr().out
    assert "lossless        yes, but for ties\n" in output
    assert "ties            2  (tokens at which bfloat16 can't tell the target's choice from another)\n" in output


def test_a_json_file_that_fails_after_all_fails_the_run_after_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match=r"/proc/out\.json could not be written"):
        conclude(report_of("float32"), Path("/proc/out.json"))
    assert "τ, macro" in capsys.readouterr().out


def test_nothing_is_a_tie_in_float32() -> None:
    assert not report_of("float32", difference_of(0.0, 0.0)).is_lossless


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_changed_answer_fails_the_run_after_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    tie_gap = {"float32": 0.0, "bfloat16": 0.1}[dtype]
    report = report_of(dtype, difference_of(0.0625, tie_gap), difference_of(0.125, tie_gap))
    with pytest.raises(RunError) as error:
        conclude(report, tmp_path / "out.json")
    sentence = str(error.value)
    assert "prompts.jsonl, line 9: token 1 is 99, the target alone gives 11" in sentence
    assert f"differ by {'0.0625' if dtype == 'float32' else '0.125, and bfloat16 explains 0.1'}" in sentence
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["lossless"] is False
    assert result["first_difference"]["token"] == 1
    assert result["ties"] == (dtype == "bfloat16")
    output = capsys.readouterr().out
    assert "lossless        NO" in output
    assert "1.500" in output  # τ: three tokens in two rounds
    assert "50.0%" in output  # slot 1
