"""Processes of a run, as threads, that answer a roll call."""

import threading

from jdist.rpc.group.roll_call import RunPlace, roll_call

PATIENCE = 60.0


class Caller(threading.Thread):
    """A thread that answers the roll call, and keeps what came of it."""

    answer = staticmethod(roll_call)

    def __init__(self, address, rank, size, timeout=PATIENCE, bind=None):
        super().__init__(daemon=True)
        self.place = RunPlace(rank, size, address, bind or address)
        self.timeout = timeout
        self.error = None
        self.start()

    def run(self):
        try:
            self.answer(self.place, self.timeout)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def outcome(self):
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.error
