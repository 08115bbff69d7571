"""Being asked to stop: SIGTERM, or SIGINT, makes all ranks save after the step that they are in.

A signal to one rank is enough. It only raises a flag, which the ranks agree on after every step, on the host: the
device goes on meanwhile, as it is given work ahead.
"""

import signal

from train.ranks import PeerLostError, Ranks

GRACE_S = 900  # for finishing the step and saving; then the kernel ends a process that hangs


class Interrupt:
    """Handles the two signals from when it is made. Before that they end the process: there is nothing to save."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        # The launcher sends SIGTERM to those that are left when a rank has died, too: they may wait for it for ever.
        if self.ranks.have_lost_a_peer():
            raise PeerLostError("one of them has ended")
        if not self.received:
            signal.alarm(GRACE_S)  # SIGALRM ends a process by default, whatever Python is doing
        self.received = True

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer on all, which must call this after the same step."""
        return self.ranks.any(self.received)

    def ignore_from_now_on(self) -> None:
        """To be called when all is saved: what is left to do takes no time."""
        signal.alarm(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
