"""What is the same for every test, wherever it runs.

GPU tests are a run of their own (`make test-gpu`); any other run sees no GPU. Programs under test answer signals that
the tests' own process ignores: SIGINT in the background of a shell, SIGHUP under nohup.
"""

import os
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:  # which programs inherit, as they do not inherit a handler
            signal.signal(number, handler)
