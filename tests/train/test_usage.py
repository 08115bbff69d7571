"""`python -m train` with wrong input: one sentence, exit 2, nothing written; and `--check`, which only prints."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from shards.manifest import Manifest
from tests.train.caches import CONFIG, write_cache, write_config
from tests.train.test_checkpoint import new_trainer
from train.__main__ import main
from train.checkpoint import STATE_FILE, save_checkpoint
from train.config import RunConfig
from train.rundir import begin_or_continue, record_config

ROOT = Path(__file__).parents[2]
WRONG_SETTINGS = {  # override → what the sentence must say
    "train.lrr=1e-3": "did you mean train.lr",
    "trian.lr=1e-3": "did you mean train?",
    "train.lr": "section.key=value",
    "train.lr=fast": "train.lr is 'fast'",
    "train.lr=-1.0": "must be positive",
    "train.lr=nan": "train.lr is nan: it must be finite",
    "train.lr=1e308": "train.lr is 1e+308: fp32 must hold it",
    "train.lr=1e-50": "train.lr is 1e-50: fp32 must hold it",
    "train.clip_norm=inf": "must be finite",
    "train.epochs=1e20": "train.epochs is 1e+20: it must be of type int",
    "train.epochs=9999999": "train.epochs is 9999999: it must be at most 1048576",
    "train.rows_per_step=999999999999": "train.rows_per_step is 999999999999: it must be at most",
    "train.log_every=true": "train.log_every is True: it must be of type int",
    f"train.max_steps={'9' * 400}": "99…: a whole number must fit into 64 bits",
    f"train.max_steps={'9' * 5000}": "99…: it must be of type int",
    "train.seed=-1": "0..2^63 − 1",
    "train.seed=9223372036854775808": "a whole number must fit into 64 bits",
    "train.compile_cache=": "train.compile_cache has '', which can be no path",
    f"data.files=['{'x' * 300}']": "a name of 300 bytes",
    'target.path="a\\u0000b"': "target.path has 'a\\x00b', which can be no path",
    "speculate.foo=1": "unknown key 'speculate.foo'",
    "extract.lr=nan": "unknown key 'extract.lr'",
    "train.gpus=[-1]": "by number",
    "train.gpus=[999]": "names GPUs [999]",
    "train.loss=mse": "must be one of",
    "train.betas=[0.9]": "two numbers",
    "train.warmup_fraction=1.5": "[0, 1]",
    "train.num_anchors=49": "a row has only 48 tokens",
    "train.rows_per_micro_step=4": "must be a multiple of 4, for example 4 or 8",
    "train.log_every=4": "multiple of train.log_every",
    "drafter.num_layers=1001": "must be at most 1000",
    "drafter.block_size=1": "at least 2",
    "drafter.block_size=49": "a row has only 48 tokens",
    "drafter.head_dim=0": "must be positive",
    "drafter.head_dim=7": "even",
    "drafter.num_attention_heads=3": "multiple of num_key_value_heads",
    "drafter.layer_types=['full_attention']": "num_layers is 2",
    "drafter.layer_types=['full_attention', 'linear']": "must be one of",
    "drafter.layer_types=['full_attention', 'sliding_attention']": "sliding_window must be set",
    "drafter.sliding_window=9": "has no effect",
    "drafter.target_layer_ids=[1, 1]": "each once",
    "drafter.target_layer_ids=[1, 3]": "[3] that are not in cache.layers, [1, 2, 4]",
    "drafter.target_layer_ids=[1, 5]": "the target's last",
    "drafter.target_layer_ids=[1, 6]": "decoder layers are 0..5",
    "target.mask_token_id=40": "must be in 0..39",
    "target.mask_token_id=38": "was made with target.mask_token_id = 39, the config says 38",
    "target.hidden_size=32": "was made with target.hidden_size = 16, the config says 32",
    "cache.layers=[1, 2, 3, 4]": "was made with cache.layers = [1, 2, 4], the config says [1, 2, 3, 4]",
    "cache.row_tokens=64": "was made with cache.row_tokens = 48, the config says 64",
    "cache.codec=int8": "target.hidden_size is 16: cache.codec 'int8' needs a multiple of 64",
    "cache.codec=fp8": "must be one of ['bf16', 'int8', 'int4', 'bf16+zstd']",
    "cache.codec=bf16+zstd": "is for archives and transport: recode first, with `python -m shards recode",
    "data.holdout_fraction=0.5": "was made with data.holdout_fraction = 0.02, the config says 0.5",
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("usage")
    write_cache(directory / "cache", RunConfig.load(write_config(directory / "tiny.toml")))
    return directory


@pytest.fixture
def copied(workspace, tmp_path) -> Path:
    """A workspace that may be spoilt."""
    return Path(shutil.copytree(workspace, tmp_path / "copied"))


def call(workspace: Path, *arguments: str, config: str = "tiny.toml") -> int:
    paths = {"--config": workspace / config, "--cache": workspace / "cache", "--run": workspace / "run"}
    given = [str(part) for option, path in paths.items() if option not in arguments for part in (option, path)]
    with patch.object(sys, "argv", ["train", *given, *arguments]), patch.dict(os.environ):
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        return main()


def snapshot(directory: Path) -> list[tuple[Path, int, int]]:
    return sorted((path, path.lstat().st_size, path.lstat().st_mtime_ns) for path in directory.rglob("*"))


def check_refused(capsys, workspace: Path, said: str, *arguments: str, **options: str) -> None:
    before = snapshot(workspace)
    assert call(workspace, *arguments, **options) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1, output.err
    assert said in output.err
    assert snapshot(workspace) == before


@pytest.mark.parametrize("setting", WRONG_SETTINGS)
def test_a_wrong_setting_is_refused(capsys, workspace, setting):
    check_refused(capsys, workspace, WRONG_SETTINGS[setting], setting)


def test_a_missing_config_is_refused(capsys, workspace):
    check_refused(capsys, workspace, "does not exist", config="absent.toml")


def test_a_config_that_is_no_toml_is_refused(capsys, copied):
    (copied / "tiny.toml").write_text("[target\n")
    check_refused(capsys, copied, "cannot be read as TOML")


def test_a_missing_key_is_refused(capsys, copied):
    (copied / "tiny.toml").write_text(CONFIG.replace("num_anchors = 8\n", ""))
    check_refused(capsys, copied, "lacks the key train.num_anchors")


def test_a_block_size_without_a_published_decay_must_set_one(capsys, copied):
    (copied / "tiny.toml").write_text(CONFIG.replace("gamma = 3.0\n", ""))
    check_refused(capsys, copied, "train.gamma has no default for drafter.block_size 4")


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_directory_without_a_manifest_is_no_cache(capsys, copied, name):
    (copied / "empty").mkdir()
    check_refused(capsys, copied, "is not a cache", "--cache", str(copied / name))


def test_a_cache_that_lacks_a_shard_is_refused(capsys, copied):
    shutil.rmtree(copied / "cache/shard-00001")
    check_refused(capsys, copied, "lacks 1 of")


def swap_shards(cache: Path) -> None:
    (cache / "shard-00001").rename(cache / "other")
    (cache / "shard-00002").rename(cache / "shard-00001")
    (cache / "other").rename(cache / "shard-00002")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace_directory(path: Path, *, by_file: bool) -> None:
    shutil.rmtree(path)
    path.write_text("") if by_file else path.mkdir()


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {  # what is done to the cache → what the sentence must say
    "array file cut short": (
        lambda cache: truncate(cache / "shard-00001/hidden/4/c/0/0/0"),
        "shard-00001/hidden/4/c/0/0/0 has 6227 bytes, expected 6228",  # 4·(48·16·2 + crc) + index
    ),
    "array missing": (
        lambda cache: shutil.rmtree(cache / "shard-00001/hidden/1"),
        "shard-00001/hidden/1/zarr.json cannot be read",
    ),
    "array file missing": (
        lambda cache: (cache / "shard-00001/row_ids/c/0").unlink(),
        "shard-00001/row_ids/c/0 cannot be read: No such file",
    ),
    "array of another shape": (
        lambda cache: shutil.copy(cache / "shard-00003/row_ids/zarr.json", cache / "shard-00001/row_ids/zarr.json"),
        "shard-00001/row_ids/zarr.json is not that of the array",
    ),
    "shards swapped": (swap_shards, "shard-00001/shard.json is not that of shard 1"),
    "empty directory": (
        lambda cache: replace_directory(cache / "shard-00001", by_file=False),
        "shard-00001/shard.json cannot be read",
    ),
    "a file for a shard": (
        lambda cache: replace_directory(cache / "shard-00001", by_file=True),
        "shard-00001/shard.json cannot be read",
    ),
    "shard.json is garbage": (
        lambda cache: (cache / "shard-00001/shard.json").write_bytes(b"\xff{"),
        "shard-00001/shard.json cannot be read",
    ),
    "shard.json is a list": (
        lambda cache: (cache / "shard-00001/shard.json").write_text("[]"),
        "shard-00001/shard.json is not that of shard 1",
    ),
    "head missing": (
        lambda cache: (cache / "target/head.safetensors").unlink(),
        "target/head.safetensors cannot be read",
    ),
    "head cut short": (lambda cache: truncate(cache / "target/head.safetensors"), "target/head.safetensors: sha256 is"),
    "head flipped": (
        lambda cache: flip_last_byte(cache / "target/head.safetensors"),
        "target/head.safetensors: sha256 is",
    ),
    "head.json missing": (lambda cache: (cache / "target/head.json").unlink(), "target/head.json cannot be read"),
    "head.json edited": (
        lambda cache: (cache / "target/head.json").write_text("{}"),
        "target/head.json: sha256 is",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_cache_is_refused_before_a_worker_starts(capsys, copied, name):
    damage, said = DAMAGE[name]
    damage(copied / "cache")
    check_refused(capsys, copied, said)


def test_a_cache_that_was_made_from_elsewhere_is_trained_on_and_noted(workspace):
    from train.preflight import preflight

    config = RunConfig.load(workspace / "tiny.toml", ["target.path=elsewhere", "data.files=['a.jsonl']"])
    begin = preflight(config, workspace / "cache", workspace / "run", world_size=1, resume=False)
    of_target, of_data = begin.notes
    assert "was made with target.path = 'nowhere', the config says 'elsewhere'" in of_target
    assert "was made with data.files = ['nowhere.jsonl'], the config says ['a.jsonl']" in of_data


def test_a_cache_without_training_rows_is_refused(capsys, copied):
    shutil.rmtree(copied / "cache")
    write_cache(copied / "cache", RunConfig.load(copied / "tiny.toml"), train_rows=[], heldout_rows=[[20]])
    check_refused(capsys, copied, "no rows to train on")


def test_a_run_directory_that_is_not_empty_needs_resume(capsys, copied):
    (copied / "run").mkdir()
    (copied / "run/notes.txt").write_text("mine")
    check_refused(capsys, copied, "is not empty: --resume continues the run in it")
    check_refused(capsys, copied, "holds no run", "--resume")


ANOTHER_RUN = {  # override → what the sentence must say
    "train.lr=2e-2": "was begun with train.lr = 0.01, now it is 0.02: continue with",
    "drafter.num_layers=3": "was begun with drafter.num_layers = 2, now it is 3",
    "drafter.is_causal=true": "was begun with drafter.is_causal unset, now it is True",
    "train.seed=1": "was begun with train.seed = 0, now it is 1",
    "train.epochs=3": "= 2, now it is 3: the learning rate's schedule spans the run, whose length is fixed",
    "train.max_steps=3": "unset, now it is 3: the learning rate's schedule spans the run",
}


@pytest.mark.parametrize("setting", ANOTHER_RUN)
def test_a_run_is_not_continued_with_another_config(capsys, copied, setting):
    record_config(copied / "run", RunConfig.load(copied / "tiny.toml"), Manifest.read(copied / "cache"))
    check_refused(capsys, copied, ANOTHER_RUN[setting], setting, "--resume")


def test_a_run_is_not_continued_on_a_cache_of_other_data(capsys, copied):
    manifest = Manifest.read(copied / "cache")
    other = replace(manifest, identity=replace(manifest.identity, data="0" * 64))
    record_config(copied / "run", RunConfig.load(copied / "tiny.toml"), other)
    check_refused(capsys, copied, "was begun with identity.data = ", "--resume")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("tiny.toml", "tiny.toml is not a directory that can be written to"),
        ("tiny.toml/run", "tiny.toml is not a directory that can be written to"),
        ("dangling", "dangling is not a directory that can be written to"),
        ("loop/run", "loop is not a directory that can be written to"),
        ("x" * 256, "can't be made: File name too long"),
        ("absent/" + "x" * 256 + "/run", "can't be made: File name too long"),
        ("d/" * 2100, "can't be made: File name too long"),
    ],
)
def test_a_run_directory_that_can_not_be_is_refused(capsys, copied, run, said):
    (copied / "dangling").symlink_to("absent")
    (copied / "loop").symlink_to("loop")
    check_refused(capsys, copied, said, "--run", str(copied / run), "--resume")


def drop_rights_of_root() -> None:
    """CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which go past permissions, are lost at the next exec."""
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP, linux/prctl.h


def test_a_directory_of_others_is_refused(copied):
    (copied / "closed").mkdir(mode=0o555)
    before = snapshot(copied)
    for run in ("closed", "closed/run"):
        arguments = ["--config", copied / "tiny.toml", "--cache", copied / "cache", "--run", copied / run]
        command = [sys.executable, "-m", "train", *map(str, arguments)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=drop_rights_of_root)
        assert process.returncode == 2
        assert process.stderr == (
            f"error: {copied / 'closed'} is not a directory that can be written to: --run names another\n"
        )
    assert snapshot(copied) == before


def test_a_damaged_run_config_is_refused(capsys, copied):
    (copied / "run").mkdir()
    (copied / "run/config.json").write_text("{")
    check_refused(capsys, copied, "config.json cannot be read", "--resume")


def begin_run(workspace: Path, metrics: bytes = b"") -> Path:
    """What a run that was killed before its first checkpoint leaves."""
    run = workspace / "run"
    record_config(run, RunConfig.load(workspace / "tiny.toml"), Manifest.read(workspace / "cache"))
    (run / "metrics.jsonl").write_bytes(metrics)
    return run


@pytest.mark.parametrize(
    "line", ["[]", "{}", "null", "", '{"step": "1", "loss": 1.0}', '{"step": 1, "loss": "low"}', '{"step": 1', "\xff"]
)
def test_damaged_metrics_are_refused(capsys, copied, line):
    begin_run(copied, b'{"step": 1, "loss": 1.0}\n' + line.encode("latin-1") + b"\n")
    said = "metrics.jsonl line 2 is no line of metrics" if line != "\xff" else "metrics.jsonl cannot be read"
    check_refused(capsys, copied, said, "--resume")


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(capsys, copied):
    """The configuration saves every 2 steps, and the line of a step comes before its checkpoint."""
    run = begin_run(copied, b'{"step": 2, "loss": 1.0}\n{"step": 3, "loss": 1.0}\n')
    check_refused(capsys, copied, "has metrics up to step 3 and its checkpoints are gone", "--resume")
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints").mkdir()
    (run / "checkpoints/latest").symlink_to("step-2")
    check_refused(capsys, copied, "has metrics up to step 0 and its checkpoints are gone", "--resume")


def test_a_broken_checkpoint_is_one_sentence_from_the_launcher(capsys, copied):
    run, config = begin_run(copied), RunConfig.load(copied / "tiny.toml")
    checkpoints = [save_checkpoint(run, config, new_trainer(config, step=step)) for step in (2, 3)]
    truncate(checkpoints[-1] / STATE_FILE)
    before = snapshot(copied)
    assert call(copied, "--resume") == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {checkpoints[-1] / STATE_FILE} cannot be read: ")
    assert output.err.endswith(f"; remove {checkpoints[-1]} to continue from step-2\n")
    assert output.err.count("\n") == 1
    assert snapshot(copied) == before


@pytest.mark.parametrize("metrics", [b"", b'{"step": 2, "loss": null}\n{"step": 3, "lo'])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(copied, metrics):
    run = begin_run(copied, metrics)
    config, manifest = RunConfig.load(copied / "tiny.toml"), Manifest.read(copied / "cache")
    assert begin_or_continue(run, config, manifest, resume=True) is None


def test_a_run_directory_with_our_own_leftovers_only_is_empty(capsys, copied):
    run = copied / "run"
    run.mkdir()
    for name in (".config.json.host.77", ".metrics.jsonl"):
        (run / name).touch()
    config, manifest = RunConfig.load(copied / "tiny.toml"), Manifest.read(copied / "cache")
    assert begin_or_continue(run, config, manifest, resume=False) is None
    (run / ".notes").touch()
    check_refused(capsys, copied, "is not empty")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.lr=fast"], "train.lr is 'fast'"),
        (["drafter.target_layer_ids=[1, 3]"], "[3] that are not in cache.layers"),
        (["train.rows_per_micro_step=4"], "must be a multiple of 4"),
        (["train.gpus=[999]"], "names GPUs [999]"),
        (["--run", "tiny.toml"], "tiny.toml is not a directory that can be written to"),
        (["drafter.num_layers=3"], "was begun with drafter.num_layers = 2, now it is 3"),
    ],
)
def test_a_preflight_refuses_what_training_would_refuse_before_there_is_a_cache(
    capsys, copied, monkeypatch, arguments, said
):
    monkeypatch.chdir(copied)
    record_config(copied / "run", RunConfig.load(copied / "tiny.toml"), Manifest.read(copied / "cache"))
    shutil.rmtree(copied / "cache")
    check_refused(capsys, copied, said, "--resume", "--preflight", *arguments)


@pytest.mark.parametrize("begun", [False, True])
def test_a_preflight_says_and_writes_nothing_where_nothing_is_wrong(capsys, copied, begun):
    if begun:
        begin_run(copied)
    shutil.rmtree(copied / "cache")
    before = snapshot(copied)
    assert call(copied, "--resume", "--preflight") == 0
    assert capsys.readouterr() == ("", "")
    assert snapshot(copied) == before


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b", "qwen3.6-27b"])
def test_check_needs_neither_cache_nor_weights(capsys, tmp_path, name):
    arguments = ("--config", str(ROOT / f"configs/{name}.toml"), "--check", "--json")
    assert call(tmp_path, *arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_parameters"] > 1e6
    assert plan["num_steps"] is None
    assert list(tmp_path.iterdir()) == []
    assert call(tmp_path, *arguments[:-1]) == 0
    assert f"{plan['num_parameters']:,} parameters" in capsys.readouterr().out


def test_check_of_the_27b_config_gives_the_published_sizes(capsys, tmp_path):
    """fc K·H·H, then per layer q and o (H·32·128 each), k and v (H·8·128 each), three of H·I, and the norms."""
    assert call(tmp_path, "--config", str(ROOT / "configs/qwen3.6-27b.toml"), "--check", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    hidden, intermediate = 5120, 17_408
    layer = 2 * hidden * 32 * 128 + 2 * hidden * 8 * 128 + 3 * hidden * intermediate + 2 * hidden + 2 * 128
    assert plan["num_parameters"] == 5 * hidden * hidden + 5 * layer + 2 * hidden
    assert plan["token_budget"] == 49_152
    assert (plan["num_processes"], plan["num_micro_steps"]) == (3, 1)


def test_check_with_a_cache_counts_steps_and_writes_nothing(capsys, workspace):
    before = snapshot(workspace)
    assert call(workspace, "--check", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_train_rows"], plan["num_steps"], plan["num_missing_shards"]) == (11, 4, 0)
    assert snapshot(workspace) == before
