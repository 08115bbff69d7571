"""Checkpoints: restored to the bit, whole or absent, the newest ones kept."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shards.codec import unrotate
from shards.errors import RunError
from tests.train.caches import write_config
from train.checkpoint import (
    COUNTERS_FILE,
    STATE_FILE,
    Contents,
    checkpoint_step,
    load_checkpoint,
    write_checkpoint,
)
from train.config import RunConfig
from train.ranks import Ranks
from train.records import latest_checkpoint
from train.target_head import TargetHead
from train.trainer import Trainer

CPU = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


def new_trainer(config: RunConfig, *, step: int = 0) -> Trainer:
    """A trainer whose whole state is random and of this step."""
    shape = (config.target.vocab_size, config.target.hidden_size)
    head = TargetHead(
        embed_tokens_VH=torch.zeros(shape),
        lm_head_VH=torch.zeros(shape),
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )
    trainer = Trainer(config, head, CPU, num_steps=100)
    for i, tensor in enumerate(trainer.flat.state().values()):
        tensor.normal_(generator=torch.Generator().manual_seed(step + i))
    trainer.flat.refresh_weights()
    for i, counter in enumerate(trainer.step.counters):
        counter.fill_(step + i)
    return trainer


def save_checkpoint(run: Path, config: RunConfig, trainer: Trainer, *, is_best: bool = False) -> Path:
    return write_checkpoint(run, config, trainer.flat.state(), Contents.of(trainer, config, is_best=is_best))


@pytest.fixture(params=["fp32", "bf16"])
def config(request, tmp_path) -> RunConfig:
    return RunConfig.load(write_config(tmp_path / "tiny.toml"), [f"train.precision={request.param}"])


def test_a_checkpoint_restores_every_bit(config, tmp_path):
    saved = new_trainer(config, step=7)
    checkpoint = save_checkpoint(tmp_path / "run", config, saved)
    assert checkpoint == latest_checkpoint(tmp_path / "run")
    assert checkpoint_step(checkpoint) == 7

    loaded = new_trainer(config)
    load_checkpoint(checkpoint, config, loaded)
    for name, tensor in saved.flat.state().items():
        assert torch.equal(loaded.flat.state()[name], tensor), name
    assert [int(c) for c in loaded.step.counters] == [int(c) for c in saved.step.counters]
    for name, parameter in saved.drafter.named_parameters():
        assert torch.equal(loaded.drafter.get_parameter(name), parameter), name


def test_fp32_masters_survive_in_full(config, tmp_path):
    """Not rounded to the weights' type on the way, which would be lost in silence."""
    saved = new_trainer(config, step=7)
    path = save_checkpoint(tmp_path / "run", config, saved)
    loaded = new_trainer(config)
    load_checkpoint(path, config, loaded)
    assert loaded.flat.masters.dtype == torch.float32
    assert not torch.equal(loaded.flat.masters, loaded.flat.masters.bfloat16().float())


def test_the_newest_are_kept_and_latest_points_at_the_last(config, tmp_path):
    config = replace(config, train=replace(config.train, keep_checkpoints=2))
    for step in (8, 9, 10, 100):
        save_checkpoint(tmp_path / "run", config, new_trainer(config, step=step))
    checkpoints = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-10", "step-100"]
    assert (checkpoints / "latest").readlink() == Path("step-100")


def test_the_best_is_kept_besides_them(config, tmp_path):
    config = replace(config, train=replace(config.train, keep_checkpoints=1))
    checkpoints = tmp_path / "run/checkpoints"
    found = []
    for step, is_best in ((8, True), (9, False), (10, False), (11, True), (12, False)):
        save_checkpoint(tmp_path / "run", config, new_trainer(config, step=step), is_best=is_best)
        found.append(sorted(path.name for path in checkpoints.glob("step-*")))
    assert found == [["step-8"], ["step-8", "step-9"], ["step-10", "step-8"], ["step-11"], ["step-11", "step-12"]]
    assert (checkpoints / "best").readlink() == Path("step-11")
    assert latest_checkpoint(tmp_path / "run").name == "step-12"


def test_leftovers_of_a_crash_are_no_checkpoint_and_do_no_harm(config, tmp_path):
    run = tmp_path / "run"
    leftover = run / "checkpoints/.step-8.tmp/state"
    leftover.mkdir(parents=True)
    (leftover / "state.safetensors").write_bytes(b"half")
    assert latest_checkpoint(run) is None
    checkpoint = save_checkpoint(run, config, new_trainer(config, step=8))
    loaded = new_trainer(config)
    load_checkpoint(checkpoint, config, loaded)
    assert loaded.step.counters.step == 8


def test_a_crash_between_rename_and_link_loses_nothing(config, tmp_path):
    run = tmp_path / "run"
    older = save_checkpoint(run, config, new_trainer(config, step=8))
    newer = save_checkpoint(run, config, new_trainer(config, step=9))
    link = run / "checkpoints/latest"
    link.unlink()
    assert latest_checkpoint(run) == newer
    link.symlink_to(older.name)
    assert latest_checkpoint(run) == newer
    assert save_checkpoint(run, config, new_trainer(config, step=10)) == link.resolve()


def edit_counters(checkpoint: Path, **values: int) -> None:
    path = checkpoint / COUNTERS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_state(checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(checkpoint / STATE_FILE)
    edit(tensors)
    save_file(tensors, checkpoint / STATE_FILE, metadata={"basis": "target"})


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {  # what is done to the checkpoint of step 8 → what the sentence must say
    "state cut short": (lambda c: os.truncate(c / STATE_FILE, 1000), r"state\.safetensors cannot be read"),
    "state missing": (lambda c: (c / STATE_FILE).unlink(), r"state\.safetensors cannot be read"),
    "one bit of the state": (lambda c: flip_bit(c / STATE_FILE), r"the crc32c of \w+ is \w{8}, expected \w{8}"),
    "a tensor too few": (lambda c: edit_state(c, lambda t: t.pop("masters")), "has the tensors"),
    "a tensor too many": (lambda c: edit_state(c, lambda t: t.update(x=torch.zeros(1))), "has the tensors"),
    "another dtype": (
        lambda c: edit_state(c, lambda t: t.update(masters=t["masters"].bfloat16())),
        "the crc32c of masters is",
    ),
    "counters missing": (lambda c: (c / COUNTERS_FILE).unlink(), r"counters\.json cannot be read"),
    "counters cut short": (lambda c: os.truncate(c / COUNTERS_FILE, 20), r"counters\.json cannot be read"),
    "counters are a list": (lambda c: (c / COUNTERS_FILE).write_text("[]"), r"counters\.json holds no object"),
    "counters are null": (lambda c: (c / COUNTERS_FILE).write_text("null"), r"counters\.json holds no object"),
    "counters are empty": (lambda c: (c / COUNTERS_FILE).write_text("{}"), r"counters\.json is damaged or was edited"),
    "a counter edited": (lambda c: edit_counters(c, num_updates=1), r"counters\.json is damaged or was edited"),
    "of another step": (lambda c: shutil.copytree(c.with_name("step-7"), c, dirs_exist_ok=True), "is that of step 7"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_sentence_says_how_to_go_on(tmp_path, name):
    damage, said = DAMAGE[name]
    config = RunConfig.load(write_config(tmp_path / "tiny.toml"))
    older, newest = (save_checkpoint(tmp_path / "run", config, new_trainer(config, step=step)) for step in (7, 8))
    damage(newest)
    trainer = new_trainer(config)
    before = trainer.flat.masters.clone()
    with pytest.raises(RunError, match=f"{said}.*; remove {newest} to continue from step-7$"):
        load_checkpoint(newest, config, trainer)
    assert torch.equal(trainer.flat.masters, before)
    shutil.rmtree(newest)
    assert latest_checkpoint(tmp_path / "run") == older
    load_checkpoint(older, config, trainer)
    assert trainer.step.counters.step == 7


def test_the_only_checkpoint_when_damaged_leaves_another_run(config, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "run", config, new_trainer(config, step=8))
    flip_bit(checkpoint / STATE_FILE)
    with pytest.raises(RunError, match="there is no other checkpoint: begin another run"):
        load_checkpoint(checkpoint, config, new_trainer(config))


def test_the_state_of_another_drafter_is_refused(config, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "run", config, new_trainer(config, step=8))
    other = replace(config, drafter=replace(config.drafter, intermediate_size=48))
    with pytest.raises(RunError, match=r"has \{'first_moments': 'float32 \[.*it is the state of another drafter"):
        load_checkpoint(checkpoint, other, new_trainer(other))


def test_only_directories_of_steps_are_checkpoints(config, tmp_path):
    run = tmp_path / "run"
    checkpoint = save_checkpoint(run, config, new_trainer(config, step=8))
    for name in ("step-9.bak", "step-", "step--9", "step-best", "step-\u0669"):  # the last is a digit of Arabic
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints/step-10").write_text("a file")
    assert latest_checkpoint(run) == checkpoint


def test_a_full_disk_leaves_the_older_checkpoint(config, tmp_path):
    """A limit on the size of files stands for the disk: either refuses a write in the middle of a file."""
    run = tmp_path / "run"
    older = save_checkpoint(run, config, new_trainer(config, step=8))
    trainer = new_trainer(config, step=9)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RunError, match="the checkpoints before it are intact"):
            save_checkpoint(run, config, trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest_checkpoint(run) == older
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", older.name]


def test_what_a_killed_save_left_is_removed(config, tmp_path):
    run = tmp_path / "run"
    older = save_checkpoint(run, config, new_trainer(config, step=8))
    shutil.copytree(older, run / "checkpoints/.step-9")
    newer = save_checkpoint(run, config, new_trainer(config, step=10))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", newer.name, older.name]


@pytest.mark.parametrize(("saved", "loading"), [("bf16", "int8"), ("int4", "bf16")])
def test_weights_of_another_basis_are_refused(tmp_path, saved, loading):
    """The run directory refuses another codec before; this holds for whatever else loads a checkpoint."""
    configs = {
        codec: RunConfig.load(write_config(tmp_path / "tiny.toml"), ["target.hidden_size=64", f"cache.codec={codec}"])
        for codec in (saved, loading)
    }
    checkpoint = save_checkpoint(tmp_path / "run", configs[saved], new_trainer(configs[saved], step=8))
    bases = {"bf16": "target", "int8": "rotated", "int4": "rotated"}
    with safe_open(checkpoint / STATE_FILE, "pt") as file:
        assert file.metadata() == {"basis": bases[saved]}
    message = f"the {bases[saved]} basis, and the cache's codec, '{loading}', gives them in the {bases[loading]} one"
    trainer = new_trainer(configs[loading])
    before = trainer.flat.masters.clone()
    with pytest.raises(RunError, match=message):
        load_checkpoint(checkpoint, configs[loading], trainer)
    assert torch.equal(trainer.flat.masters, before)


def test_the_exported_fc_is_unrotated_from_the_masters(tmp_path):
    """Not from the bf16 weights, which would be rounded twice."""
    overrides = ["target.hidden_size=64", "cache.codec=int8", "train.precision=bf16"]
    config = RunConfig.load(write_config(tmp_path / "tiny.toml"), overrides)
    trainer = new_trainer(config, step=8)
    exported = load_file(save_checkpoint(tmp_path / "run", config, trainer) / "model.safetensors")
    masters = trainer.flat.masters_by_name
    blocks = masters["fc.weight"].unflatten(1, (2, 64)).numpy()
    expected = torch.from_numpy(unrotate(blocks)).flatten(1)  # each row w of a block becomes w·R, transposed Rᵀ·wᵀ
    assert torch.equal(exported["fc.weight"], expected.bfloat16())
    assert torch.equal(exported["norm.weight"], masters["norm.weight"].bfloat16())
