"""One tiny target of each kind for the whole session, each with a drafter."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from speculate.target import LiveTarget, read_architecture
from tests.speculate.tiny import PAIRS, Scale, make_drafter, make_target, run_config
from train.drafter import Drafter
from train.published import DraftCheckpoint

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Pair:
    target_folder: Path
    drafter_folder: Path
    checkpoint: DraftCheckpoint
    target: LiveTarget
    drafter: Drafter


@pytest.fixture(scope="session", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("qwen3"), "qwen3")


def make_pair(folder: Path, name: str) -> Pair:
    shape, drafter = PAIRS[name]
    target_folder = make_target(folder / "target", shape)
    scale = Scale(input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=20.0)
    drafter_folder = make_drafter(folder / "drafter", run_config(target_folder, shape, drafter), scale)
    checkpoint = DraftCheckpoint.read(drafter_folder)
    return Pair(
        target_folder=target_folder,
        drafter_folder=drafter_folder,
        checkpoint=checkpoint,
        target=LiveTarget.load(read_architecture(target_folder, None, CPU), checkpoint, CPU),
        drafter=checkpoint.load_drafter(CPU, torch.float32),
    )
