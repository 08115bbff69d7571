"""GPU tests are a run of their own (`make test-gpu`). Any other run sees no GPU, so it is the same anywhere."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
