"""Whole extractions on a tiny target: what is stored, what is skipped, what is refused, and what a kill leaves."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.random_target import make_random_target
from extract.__main__ import main
from extract.job import Job
from shards.codec import encode_bf16
from shards.errors import RunError
from shards.manifest import COMPLETE_FILE, Manifest
from shards.record import Quarantined, ShardRecord
from shards.schema import NO_DOCUMENT, PLAN_DIRECTORY, PlanArrays, missing_shards, published_shards
from shards.stats import cache_statistics
from tests.extract.tiny import (
    LAYERS,
    ROW_TOKENS,
    SHAPES,
    SIZES,
    chat,
    extract_here,
    files_of,
    read_all,
    records,
    write_config,
    write_jsonl,
    write_project,
)

ROOT = Path(__file__).parents[2]
PR_GET_PDEATHSIG = 2  # linux/prctl.h


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    """`main` takes SIGTERM over for its process, which here is the tests'."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, data and config, with a complete cache beside them; tests copy what they change."""
    directory = tmp_path_factory.mktemp("project")
    job = Job.load(write_project(directory), directory=directory / "cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        extract_here(job, monkeypatch)
    return directory


@pytest.fixture
def copy(project: Path, tmp_path: Path) -> Path:
    """The project without its cache, to change."""
    shutil.copytree(project, tmp_path / "copy", ignore=shutil.ignore_patterns("cache"))
    write_config(tmp_path / "copy")
    return tmp_path / "copy"


def job_of(directory: Path, *overrides: str) -> Job:
    return Job.load(directory / "config.toml", overrides, directory / "cache")


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
    assert {name for name in first if first[name] != second.get(name)} <= {"manifest.json"}  # which records paths
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


def change_weight(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace a weight of the target; None takes it out."""
    (weights,) = (directory / "target").glob("*.safetensors")
    tensors = load_file(weights)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, weights, {"format": "pt"})


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


def change_data(directory: Path) -> None:
    write_jsonl(directory / "data.jsonl", records()[1:])


def change_template(directory: Path) -> None:
    path = directory / "target" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|im_start|>assistant", " <|im_start|>assistant"))


def change_tokenizer(directory: Path) -> None:
    path = directory / "target" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")


def change_weights(directory: Path) -> None:
    make_random_target(directory / "target", SHAPES["qwen3"], seed=9)


CHANGES: dict[str, Callable[[Path], None]] = {
    "the data": change_data,
    "the chat template": change_template,
    "the tokenizer": change_tokenizer,
    "the target": change_weights,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_cache_is_not_continued_with_something_else(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extract_here(job_of(copy), monkeypatch, num_shards=1)
    CHANGES[name](copy)
    before = files_of(copy / "cache")
    assert main(["--config", str(copy / "config.toml"), "--cache", str(copy / "cache")]) == 2
    assert f"error: {name}" in capsys.readouterr().err
    assert files_of(copy / "cache") == before


def test_a_cache_of_another_configuration_is_refused_complete_or_not(
    project: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extract_here(job_of(copy), monkeypatch, num_shards=1)
    for cache in (project / "cache", copy / "cache"):
        arguments = ["--config", str(copy / "config.toml"), "--cache", str(cache), "cache.layers=[0, 1]"]
        assert main(arguments) == 2
        assert "cache.layers = [0, 2, 3], the config says [0, 1]" in capsys.readouterr().err


def test_a_complete_cache_is_left_as_it_is(project: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(project / "cache")
    shutil.rmtree(copy / "target")  # nothing of it is looked at
    assert main(["--config", str(copy / "config.toml"), "--cache", str(project / "cache")]) == 0
    assert "is complete: nothing to extract" in capsys.readouterr().out
    assert files_of(project / "cache") == before


BAD_INPUT = {  # what is overridden, and what is said; {0} is the project's directory
    "unknown key": ("cache.row_token=64", "unknown key cache.row_token in"),
    "missing data": ('data.files=["{0}/none.jsonl"]', "none.jsonl does not exist"),
    "empty data": ('data.files=["{0}/empty.jsonl"]', "the data files have no records"),
    "malformed line": ('data.files=["{0}/broken.jsonl"]', "broken.jsonl, line 2 is not valid JSON"),
    "useless data": ('data.files=["{0}/useless.jsonl"]', "left out by reason: no_anchor 1"),
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


def test_check_prints_the_plan_and_writes_nothing(
    project: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "target" / "model-00001-of-00001.safetensors").unlink()  # no weights are needed
    before, manifest = files_of(copy), Manifest.read(project / "cache")
    arguments = ["--config", str(copy / "config.toml"), "--cache", str(copy / "cache"), "--check"]
    assert main([*arguments, "--json", "--tokens-per-second", "1000"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"] == manifest.plan.num_rows
    assert figures["shards"] == manifest.plan.num_shards
    assert figures["tokens"] == manifest.plan.num_tokens
    assert figures["bytes_per_slot"] == len(LAYERS) * SIZES["hidden_size"] * 2 + 14
    assert figures["fill"] == manifest.plan.num_tokens / (manifest.plan.num_rows * ROW_TOKENS)
    assert figures["disk_write_bytes_per_second"] == round(1000 * figures["bytes_per_token"])
    stored = sum(len(content) for name, content in files_of(project / "cache").items() if name.startswith("shard-"))
    assert stored < figures["total_bytes"]
    assert main(arguments) == 0
    assert "40 documents" in capsys.readouterr().out
    assert files_of(copy) == before


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.6-27b"])
def test_check_without_data_gives_figures_for_a_million_tokens(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(ROOT / "configs" / f"{name}.toml"), "data.files=['none.jsonl']", "--check"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    hidden_size = {"qwen3-8b": 4096, "qwen3.6-27b": 5120}[name]
    assert figures["bytes_per_slot"] == 5 * hidden_size * 2 + 14
    assert figures["bytes_per_million_tokens"] == round(1e6 * figures["bytes_per_slot"] / 0.98)
    assert figures["workers"] == 5
    assert "rows" not in figures
    assert main(arguments) == 0
    assert "for a million tokens" in capsys.readouterr().out


def start(directory: Path, *before: str) -> subprocess.Popen[str]:
    """A real extraction, in a process group of its own."""
    command = [*(before or [sys.executable, "-m", "extract"]), "--config", str(directory / "config.toml")]
    return subprocess.Popen(
        [*command, "--cache", str(directory / "cache")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_shards(process: subprocess.Popen[str], cache: Path, num_shards: int) -> None:
    while process.poll() is None and len(list(cache.glob("shard-*"))) < num_shards:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)


def write_long_project(directory: Path) -> Path:
    """The project with forty shards of a row each, so that there is something left to interrupt."""
    write_jsonl(directory / "data.jsonl", [{"text": f"{i:04d}" * 16} for i in range(40)])
    write_config(directory)
    config = directory / "config.toml"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "shard_bytes" not in line))
    config.write_text(config.read_text() + "\nshard_bytes = 1\n")
    return directory


def test_a_killed_extraction_is_continued_to_the_same_bytes(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First asked to stop, then its launcher killed, then torchrun, then completed by two workers under torchrun.

    The output of the killed ends with their workers, so these ended early if shards are missing.
    """
    write_long_project(copy)
    cache = copy / "cache"
    asked = start(copy)
    wait_for_shards(asked, cache, 1)
    asked.send_signal(signal.SIGTERM)
    output, error = asked.communicate()
    assert (asked.returncode, error.splitlines()[-1]) == (1, "interrupted, run again to continue"), output + error

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for command in ([], [*torchrun, "-m", "extract"]):
        num_published = len(list(cache.glob("shard-*")))
        killed = start(copy, *command)
        wait_for_shards(killed, cache, num_published + 1)
        killed.kill()
        killed.communicate()
        assert missing_shards(cache, Manifest.read(cache))

    last = start(copy, *torchrun, "--nproc-per-node=2", "-m", "extract")
    output, error = last.communicate()
    assert last.returncode == 0, output + error
    assert (cache / COMPLETE_FILE).exists()
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]

    torch.set_num_threads(1)
    extract_here(Job.load(copy / "config.toml", directory=tmp_path / "uninterrupted"), monkeypatch)
    assert files_of(cache) == files_of(tmp_path / "uninterrupted")


def test_a_worker_that_fails_ends_the_job_with_its_traceback(copy: Path) -> None:
    """A weight of a layer that the launcher has no need of is missing."""
    change_weight(copy, "model.layers.3.mlp.up_proj.weight", lambda _weight: None)
    process = start(copy)
    output, error = process.communicate()
    assert process.returncode == 1, output + error
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("error: worker 0 failed: UsageError: ")
    assert "the first is model.layers.3.mlp.up_proj.weight" in error
    assert not list((copy / "cache").glob("shard-*"))


def test_a_worker_that_is_killed_ends_the_job_with_one_sentence(copy: Path) -> None:
    process = start(write_long_project(copy))
    wait_for_shards(process, copy / "cache", 1)
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGKILL)
    output, error = process.communicate()
    assert process.returncode == 1, output + error
    assert "Traceback" not in error
    assert error.splitlines()[-1] == (
        f"error: worker 0 failed: Signal 9 (SIGKILL) received by PID {worker}; published shards are kept, "
        "the same command continues"
    )


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    tasks = Path(f"/proc/{launcher.pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
