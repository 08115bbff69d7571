"""SIGINT and SIGTERM while no worker runs: an exception, for which `main` has one sentence."""

import signal
from typing import NoReturn


class Interrupted(BaseException):
    """Not KeyboardInterrupt: once that has passed through an `exec`, as in an import, Python ends by SIGINT."""


def listen() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise)


def stop_listening() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _raise(_number: int, _frame: object) -> NoReturn:
    raise Interrupted
