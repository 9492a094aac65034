"""A copy engine the test drives: copies complete in any order, at any time, and not before."""

import torch

from trtllm_hisparse.kv.copies import Ticket


class ManualCopyEngine:
    """Destinations are poisoned at submission and written at completion, from what the source holds then.

    So a destination read early, a source overwritten early, and a page handed on early all show.
    """

    def __init__(self):
        self.pending = {}
        self._done = []
        self._next = 0
        self.auto = False

    def submit(self, pairs):
        for _, destination in pairs:
            destination.view(torch.uint8).fill_(0xAB)
        ticket = Ticket(self._next)
        self._next += 1
        self.pending[ticket] = pairs
        return ticket

    def complete(self, nth=0):
        ticket = list(self.pending)[nth % len(self.pending)]
        for source, destination in self.pending.pop(ticket):
            destination.copy_(source)
        self._done.append(ticket)

    def complete_all(self):
        while self.pending:
            self.complete()

    def poll(self):
        done, self._done = self._done, []
        return done

    def wait(self, timeout):
        if self.auto:
            self.complete_all()

    def close(self):
        self.complete_all()
