"""The promises of the captured step, on a real GPU: replay equals eager, one owner thread, one graph for any row."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step import check_replay_equals_eager
from benchmarks.synthetic import fill_rows, random_trainer
from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.errors import RunError
from shards.sections import DrafterConfig, TrainConfig
from train.config import RunConfig
from train.decode import decode_features
from train.graph import CapturedFunction
from train.runtime import compute_on_one_thread_deterministically, quiet_thread_starters
from train.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROW_TOKENS = 1024
VOCAB_SIZE = 1008
EXTREME_ROWS = {
    "one document": [ROW_TOKENS],
    "hundreds of documents": [4] * (ROW_TOKENS // 4),
    "nearly empty": [3],
    "empty": [],
    "one token each": [1] * ROW_TOKENS,
    "ordinary": [300, 17, 512, 150],
}


def small_config(codec: str = "bf16", **train: Any) -> RunConfig:
    return RunConfig(
        target=TargetConfig(path="none", hidden_size=256, num_layers=8, vocab_size=VOCAB_SIZE, mask_token_id=1),
        data=DataConfig(files=("none",)),
        cache=CacheConfig(row_tokens=ROW_TOKENS, layers=(1, 3, 5), codec=codec),
        drafter=DrafterConfig(
            num_layers=3,
            block_size=8,
            target_layer_ids=(1, 3, 5),
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=512,
            rope_theta=1e4,
            layer_types=("sliding_attention", "full_attention", "full_attention"),
            sliding_window=64,
        ),
        train=TrainConfig(**{"num_anchors": 64, "rows_per_step": 1, "lr": 1e-3} | train),
    )


@pytest.fixture(scope="module")
def device() -> torch.device:
    quiet_thread_starters()
    compute_on_one_thread_deterministically()
    return torch.device("cuda", 0)


def fresh_trainer(config: RunConfig, device: torch.device) -> Trainer:
    """A trainer whose compilations count from nothing: one process of the product only ever makes one."""
    torch._dynamo.reset()
    return random_trainer(config, device)


@pytest.fixture(scope="module")
def trainer(device: torch.device) -> Trainer:
    return fresh_trainer(small_config(), device)


def test_replay_equals_eager_to_the_bit(trainer: Trainer) -> None:
    fill_rows(trainer.rows, [EXTREME_ROWS["ordinary"]], VOCAB_SIZE, seed=1)
    check_replay_equals_eager(trainer)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_codes_are_decoded_inside_the_captured_step(codec: str, device: torch.device) -> None:
    """Fused, to the features that the plain functions give."""
    trainer = fresh_trainer(small_config(codec), device)
    fill_rows(trainer.rows, [EXTREME_ROWS["ordinary"]], VOCAB_SIZE, seed=1)
    check_replay_equals_eager(trainer)
    stored = trainer.rows.codes_RKTC, trainer.rows.scales_RKTG
    for dtype in (torch.bfloat16, torch.float32):
        fused = decode_features(codec, *stored, dtype)
        on_cpu = decode_features(codec, *(tensor.cpu() for tensor in stored), dtype)
        assert torch.equal(fused.cpu(), on_cpu)


def test_two_runs_are_equal_to_the_bit(device: torch.device) -> None:
    masters = []
    for _ in range(2):
        trainer = fresh_trainer(small_config(), device)
        for step in range(5):
            fill_rows(trainer.rows, [EXTREME_ROWS["ordinary"]], VOCAB_SIZE, seed=step)
            trainer.step.micro_step(0)
        masters.append(trainer.flat.masters.clone())
    assert torch.equal(*masters)
    assert int(trainer.step.counters.num_updates) == 5


def test_accumulation_equals_one_large_step(device: torch.device) -> None:
    """Two micro-steps of one row are one step of two rows: the loss is Σ w·CE / Σ w of the whole step."""
    first, second = EXTREME_ROWS["ordinary"], EXTREME_ROWS["hundreds of documents"]
    together = fresh_trainer(small_config(rows_per_step=2, rows_per_micro_step=2, precision="fp32"), device)
    fill_rows(together.rows, [first, second], VOCAB_SIZE, seed=0)
    together.step.micro_step(0)
    one_by_one = fresh_trainer(small_config(rows_per_step=2, precision="fp32"), device)
    for index, documents in enumerate((first, second)):
        fill_rows(one_by_one.rows, [documents], VOCAB_SIZE, seed=index)
        one_by_one.step.micro_step(index)
    torch.testing.assert_close(one_by_one.step.grad_norm, together.step.grad_norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(one_by_one.flat.first_moments, together.flat.first_moments, rtol=1e-3, atol=1e-7)


def test_replay_on_another_thread_is_refused(trainer: Trainer) -> None:
    captured = trainer.step.whole_step
    assert isinstance(captured, CapturedFunction)
    caught: list[BaseException] = []

    def replay() -> None:
        try:
            captured()
        except RunError as error:
            caught.append(error)

    thread = threading.Thread(target=replay)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "belongs to the thread that captured it" in str(caught[0])


def test_every_row_is_one_graph_at_the_same_addresses(trainer: Trainer) -> None:
    graph = trainer.step.whole_step.graph
    addresses = [tensor.data_ptr() for tensor in vars(trainer.rows).values()]
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, documents in enumerate(EXTREME_ROWS.values()):
        fill_rows(trainer.rows, [documents], VOCAB_SIZE, seed=seed)
        updates = int(trainer.step.counters.num_updates)
        trainer.step.micro_step(0)
        has_blocks = any(length > 1 for length in documents)
        assert int(trainer.step.counters.num_updates) - updates == has_blocks
        assert torch.isfinite(trainer.flat.masters).all()
    assert trainer.step.whole_step.graph is graph
    assert [tensor.data_ptr() for tensor in vars(trainer.rows).values()] == addresses
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_replays_do_not_wait_for_the_device(trainer: Trainer) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.step.micro_step(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_replays_read_and_wait_no_more(trainer: Trainer) -> None:
    """The profiler sees what the debug mode doesn't: copies to the host and waits of any library. It waits itself."""

    def reads_and_waits(num_steps: int) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(num_steps):
                trainer.step.micro_step(0)
        names = Counter(event.name for event in profiler.events())
        assert names["cudaGraphLaunch"] == num_steps
        return Counter({name: n for name, n in names.items() if "Synchronize" in name or "DtoH" in name})

    reads_and_waits(1)  # its first use has work of its own
    assert reads_and_waits(20) == reads_and_waits(1)


def test_memory_is_flat(trainer: Trainer) -> None:
    trainer.step.micro_step(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(5000):
        trainer.step.micro_step(0)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_one_python_thread(trainer: Trainer) -> None:
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
