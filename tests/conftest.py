"""What is the same for every test, wherever it runs.

GPU tests are a run of their own (`make test-gpu`); any other run sees no GPU. Programs under test answer Ctrl-C, also
when the tests run in the background of a shell, which ignores it for all that it starts there.
"""

import os
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
