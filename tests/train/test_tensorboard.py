"""Event files for TensorBoard: bytes that its own reader (2.21.0) was shown to read as the metrics they are of."""

import json
import os

import pytest

from shards.errors import UsageError
from train.tensorboard import convert

LINE = {"step": 300, "loss": 1.5, "grad_norm": None, "heldout_accuracy_per_slot": [0.5, None], "bad_rows": [1]}
# Read as train/loss = 1.5 and heldout/accuracy_per_slot/1 = 0.5, both of step 300 and of two seconds after 1970.
EVENTS = bytes.fromhex(
    "1800000000000000" "a37f4b22" "090000000000000040" "1a0d" "627261696e2e4576656e743a32" "ff2ee0e7"
    "4500000000000000" "ebe668b0" "090000000000000040" "10ac02" "2a37"
    "0a11" "0a0a" "747261696e2f6c6f7373" "150000c03f"
    "0a22" "0a1b" "68656c646f75742f61636375726163795f7065725f736c6f742f31" "150000003f" "213318e9"
)  # fmt: skip


def test_an_event_file_has_the_bytes_that_tensorboard_reads(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    os.utime(tmp_path / "metrics.jsonl", (2, 2))
    for _ in range(2):  # again is as good as anew
        directory = convert(tmp_path)
        assert [path.name for path in directory.iterdir()] == ["events.out.tfevents.dflash"]
        assert (directory / "events.out.tfevents.dflash").read_bytes() == EVENTS


def test_a_run_without_metrics_has_none(tmp_path):
    with pytest.raises(UsageError, match="has no metrics yet"):
        convert(tmp_path)
    assert not list(tmp_path.iterdir())
