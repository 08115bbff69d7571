"""Whole extractions on a tiny target: what is stored, what is skipped, and what is refused."""

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from extract.__main__ import main
from extract.sources import SEEN_FILE
from shards.codec import encode_bf16
from shards.errors import RunError
from shards.manifest import COMPLETE_FILE, Manifest
from shards.record import Quarantined, ShardRecord
from shards.schema import NO_DOCUMENT, PLAN_DIRECTORY, PlanArrays, published_shards
from shards.stats import cache_statistics
from tests.extract.tiny import (
    LAYERS,
    ROW_TOKENS,
    change_weight,
    chat,
    extract_here,
    files_of,
    job_of,
    read_all,
    write_jsonl,
)

PR_GET_PDEATHSIG = 2  # linux/prctl.h


def test_a_cache_holds_what_the_target_says_of_each_document_alone(project: Path) -> None:
    cache = project / "cache"
    manifest, arrays = Manifest.read(cache), read_all(cache)
    assert manifest.plan.num_shards > 2
    model = AutoModelForCausalLM.from_pretrained(project / "target", dtype=torch.float32)
    documents = arrays["document_ids"]
    assert np.unique(documents[documents != NO_DOCUMENT]).tolist() == list(range(manifest.plan.num_documents))
    for document in range(manifest.plan.num_documents):
        slots = documents == document
        ids = arrays["input_ids"][slots]
        assert arrays["position_ids"][slots].tolist() == list(range(len(ids)))
        with torch.inference_mode():
            states = model(torch.tensor(ids[None].astype(np.int64)), output_hidden_states=True).hidden_states
        for layer in LAYERS:
            expected = encode_bf16(states[layer + 1][0].numpy())
            # Sums in another order move a value by 1e-6 of itself, which may carry it over a rounding border.
            difference = arrays[f"hidden/{layer}"][slots].astype(int) - expected.astype(int)
            assert np.abs(difference).max() <= 1
            assert (difference != 0).mean() < 0.01
    padding = documents == NO_DOCUMENT
    assert padding.any()
    assert not any(arrays[f"hidden/{layer}"][padding].any() for layer in LAYERS)


def test_slots_are_those_of_the_plan(project: Path) -> None:
    arrays, plan = read_all(project / "cache"), PlanArrays.read(project / "cache" / PLAN_DIRECTORY)
    assert arrays["row_ids"].tolist() == list(range(len(arrays["row_ids"])))
    for row in arrays["row_ids"]:
        planned = plan.row_arrays(row, ROW_TOKENS)
        for name in ("input_ids", "position_ids", "document_ids", "loss_mask", "source_ids"):
            assert np.array_equal(arrays[name][row], getattr(planned, name))


def test_the_manifest_says_what_the_cache_is_of(project: Path) -> None:
    manifest = Manifest.read(project / "cache")
    assert manifest.plan.sources == ("chats", "texts")
    assert manifest.plan.num_documents == 40
    assert manifest.plan.num_left_out == {}
    assert 0 < manifest.plan.num_heldout_documents < 20
    assert {"target/head.safetensors", "target/config.json", "target/tokenizer.json"} <= manifest.checksums.keys()
    assert (project / "cache" / COMPLETE_FILE).exists()


def test_the_same_again_gives_the_same_bytes(project: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, and with shards made in two goes."""
    job = job_of(copy)
    extract_here(job, monkeypatch, num_shards=1)
    assert len(published_shards(job.directory, Manifest.read(job.directory))) == 1
    assert not (job.directory / COMPLETE_FILE).exists()
    extract_here(job, monkeypatch)
    first, second = files_of(project / "cache"), files_of(copy / "cache")
    with_paths = {"manifest.json", SEEN_FILE}
    assert {name for name in first if first[name] != second.get(name)} <= with_paths
    assert first.keys() == second.keys()


def test_published_shards_are_left_alone(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(copy)
    extract_here(job, monkeypatch, num_shards=2)
    before = {path: path.stat().st_mtime_ns for path in job.directory.glob("shard-*/**/*")}
    extract_here(job, monkeypatch)
    assert before
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_a_process_that_works_is_left_as_it_was(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for no signal at its parent's death."""
    extract_here(job_of(copy), monkeypatch, num_shards=1)
    death_signal = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death_signal)) == 0
    assert death_signal.value == 0


def test_the_final_hidden_state_is_stored_after_the_norm(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extract_here(job_of(copy, "cache.final_hidden=true"), monkeypatch)
    arrays = read_all(copy / "cache")
    model = AutoModelForCausalLM.from_pretrained(copy / "target", dtype=torch.float32)
    slots = arrays["document_ids"] == 0
    with torch.inference_mode():
        final = model.model(torch.tensor(arrays["input_ids"][slots][None].astype(np.int64))).last_hidden_state
    difference = arrays["final_hidden"][slots].astype(int) - encode_bf16(final[0].numpy()).astype(int)
    assert np.abs(difference).max() <= 1


def test_a_document_that_is_not_finite_goes_to_quarantine_alone(
    project: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedding of "T" is made infinite: one text is of it alone, from its first token on."""
    tokenizer = json.loads((copy / "target" / "tokenizer.json").read_text())
    token = torch.tensor(tokenizer["model"]["vocab"]["T"])
    change_weight(copy, "model.embed_tokens.weight", lambda weight_VH: weight_VH.index_fill(0, token, torch.inf))
    extract_here(job_of(copy), monkeypatch)
    assert "extract: 1 of 40 documents are in quarantine, because" in capsys.readouterr().out
    assert cache_statistics(copy / "cache")["quarantined_documents"] == 1
    good, bad = read_all(project / "cache"), read_all(copy / "cache")
    manifest = Manifest.read(copy / "cache")
    found = [
        q for s in range(manifest.plan.num_shards) for q in ShardRecord.read(copy / "cache", manifest, s).quarantined
    ]
    (document,) = np.unique(good["document_ids"][good["input_ids"] == tokenizer["model"]["vocab"]["T"]])
    assert found == [Quarantined(document=int(document), layer=LAYERS[0], position=0)]
    slots = good["document_ids"] == document
    assert not bad["loss_mask"][slots].any()
    assert np.array_equal(bad["loss_mask"][~slots], good["loss_mask"][~slots])
    assert np.array_equal(bad["document_ids"], good["document_ids"])
    for layer in LAYERS:
        assert not bad[f"hidden/{layer}"][slots].any()
        difference = bad[f"hidden/{layer}"][~slots].astype(int) - good[f"hidden/{layer}"][~slots].astype(int)
        assert np.abs(difference).max() <= 1


def test_a_cache_with_every_document_in_quarantine_is_a_failure(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not only once: nobody is to train on it later."""
    change_weight(copy, "model.layers.2.mlp.up_proj.weight", lambda weight: weight * torch.nan)
    with pytest.raises(RunError, match=r"all 40 documents of .* are in quarantine"):
        extract_here(job_of(copy), monkeypatch)
    assert main(["--config", str(copy / "config.toml"), "--cache", str(copy / "cache")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: all 40 documents")
    assert error.count("\n") == 1
    assert not (copy / "cache" / COMPLETE_FILE).exists()


BAD_INPUT = {  # what is overridden, and what is said; {0} is the project's directory
    "unknown key": ("cache.row_token=64", "did you mean cache.row_tokens?"),
    "missing data": ('data.files=["{0}/none.jsonl"]', "none.jsonl does not exist"),
    "empty data": ('data.files=["{0}/empty.jsonl"]', "the data files have no records"),
    "malformed line": ('data.files=["{0}/broken.jsonl"]', "broken.jsonl, line 2 is not valid JSON"),
    "useless data": ('data.files=["{0}/useless.jsonl"]', "left out by reason: few_supervised 1"),
    "layer out of range": ("cache.layers=[0, 7]", "cache.layers has layer 7: the target's decoder layers are 0..4"),
    "the last layer": ("cache.layers=[0, 4]", "cache.layers has layer 4, the target's last"),
    "mask token out of range": ("target.mask_token_id=264", "target.mask_token_id is 264, outside the embedding"),
    "mask token is pad": ("target.mask_token_id=0", "target.mask_token_id is 0, the tokenizer's pad token"),
    "mask token is eos": ("target.mask_token_id=2", "target.mask_token_id is 2, the tokenizer's eos token"),
    "another target": ("target.num_layers=6", "target.num_layers is 6, but"),
    "no target": ("target.path={0}/none", "none has no config.json"),
    "a GPU that is not there": ("extract.gpus=[0]", "extract.gpus names GPUs [0]: this machine shows none"),
    "a GPU counted backwards": ("extract.gpus=[-1]", "extract.gpus is [-1]: name at least one GPU"),
    "a GPU twice": ("extract.gpus=[0, 0]", "extract.gpus is [0, 0]: name at least one GPU"),
    "a list of no GPUs": ("extract.gpus=[]", "extract.gpus is []: name at least one GPU"),
}


def write_giant(directory: Path) -> str:
    """A target whose embedding alone is 550 GB, without the weights: nothing gets as far as to look for them."""
    folder = directory / "giant"
    shutil.copytree(directory / "target", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 1 << 20, "vocab_size": 1 << 16}))
    return f"target.path={folder}"


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_sentence_and_writes_nothing(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    override, message = BAD_INPUT[name]
    (copy / "empty.jsonl").write_text("\n")
    (copy / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    write_jsonl(copy / "useless.jsonl", [chat("only a question")])
    refuse(copy, capsys, message, override.format(copy))


def test_no_room_is_found_before_the_target_is_loaded(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"target.hidden_size={1 << 20}", f"target.vocab_size={1 << 16}"]
    refuse(copy, capsys, "few: make room", write_giant(copy), *sizes)


def test_a_directory_of_something_else_is_refused_at_once(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is looked at: there is no target."""
    (copy / "cache").mkdir()
    (copy / "cache" / "thesis.tex").write_text("mine")
    refuse(copy, capsys, "is not empty and holds no cache (thesis.tex", f"target.path={copy}/none")


def refuse(directory: Path, capsys: pytest.CaptureFixture[str], message: str, *overrides: str) -> None:
    """Assert that an extraction ends with exit code 2 and one sentence with `message`, and leaves no trace."""
    before = files_of(directory)
    assert main(["--config", str(directory / "config.toml"), "--cache", str(directory / "cache"), *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert files_of(directory) == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {  # of a cache without its last shard; what is said
    "a manifest cut off": (lambda cache: cut(cache / "manifest.json"), "cache/manifest.json cannot be read: "),
    "a manifest of no sense": (lambda cache: (cache / "manifest.json").write_text("[]"), "is not the manifest of a"),
    "no manifest": (lambda cache: (cache / "manifest.json").unlink(), "cache is not empty and holds no cache ("),
    "a shard without its record": (
        lambda cache: (cache / "shard-00000" / "shard.json").unlink(),
        "shard-00000/shard.json cannot be read: ",
    ),
    "a record cut off": (
        lambda cache: cut(cache / "shard-00001" / "shard.json"),
        "sets it aside, then run the same command",
    ),
    "a plan cut off": (
        lambda cache: cut(cache / "plan" / "token_ids.npy"),
        "is damaged: plan/token_ids.npy: sha256 is",
    ),
    "no plan": (lambda cache: shutil.rmtree(cache / "plan"), "is damaged: plan/document_record.npy cannot be read: "),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_cache_is_not_continued(
    project: Path, copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(project / "cache", copy / "cache")
    shutil.rmtree(max((copy / "cache").glob("shard-*")))  # complete.json is left
    damage, message = DAMAGES[name]
    damage(copy / "cache")
    refuse(copy, capsys, message)


BAD_TARGETS: dict[str, tuple[str, str]] = {  # which file is cut off, and what is said
    "weights": ("model-00001-of-00001.safetensors", "target cannot be loaded: "),
    "config": ("config.json", "config.json describes no target that can be run: "),
    "generation config": ("generation_config.json", "generation_config.json cannot be read: "),
    "tokenizer": ("tokenizer.json", "no tokenizer can be loaded from target.path "),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_a_damaged_target_is_one_sentence(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, message = BAD_TARGETS[name]
    cut(copy / "target" / file)
    refuse(copy, capsys, message)
