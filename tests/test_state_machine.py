"""Admit, import, decode, reclaim, populate, cancel, finish, in any order, with copies completing in any order.

After every action the accounting check runs (I1-I7), and the engine checks every row it reads (I6). Readers
that outlive the step (a GPU step still running while the loop goes on) are modelled by `begin_step`: the bytes
of pages published when they began must not change until they end (I3).
"""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manual_copies import ManualCopyEngine
from pattern_engine import REINDEX, SHARED, PatternEngine, history

from trtllm_hisparse.config import HiSparseConfig, Placement
from trtllm_hisparse.errors import RequestError
from trtllm_hisparse.kv.hierarchy import Device
from trtllm_hisparse.runtime.loop import Runtime
from trtllm_hisparse.runtime.request import FinishReason, Request


class Hierarchy(RuleBasedStateMachine):
    @initialize(
        spec=st.sampled_from([SHARED, REINDEX]),
        placement=st.sampled_from(list(Placement)),
        kib=st.integers(8, 24),
        host_kib=st.integers(4, 60),
        reserve=st.integers(0, 6),
        hot_rows=st.sampled_from([6, 8, 19]),
        population=st.integers(0, 4),
    )
    def build(self, spec, placement, kib, host_kib, reserve, hot_rows, population):
        self.copies = ManualCopyEngine()
        config = HiSparseConfig(
            placement=placement,
            device_pool_bytes=kib << 10,
            host_pool_bytes=host_kib << 10,
            hot_rows=hot_rows,
            page_rows=4,
            max_requests=3,
            max_context=96,
            prefill_chunk=10,
            max_batch_tokens=20,
            admission_reserve_pages=reserve,
            population_pages=population,
        )
        self.spec = spec
        self.runtime = Runtime(PatternEngine(spec), config, self.copies)
        self.kv = self.runtime._kv
        self.live = {}
        self.readers = {}
        self.tag = 0

    @rule(prompt=st.integers(1, 90), max_tokens=st.integers(1, 30), imported=st.none() | st.integers(1, 89))
    def submit(self, prompt, max_tokens, imported):
        self.tag += 1
        tag, state = self.tag, {"tokens": [], "reason": None, "want": max_tokens}

        def sink(event):
            assert state["reason"] is None
            state["tokens"] += event.tokens
            state["reason"] = event.reason

        given = history(self.spec, tag, imported) if imported is not None and imported < prompt else None
        try:
            rid = self.runtime.submit(Request((tag,) * prompt, max_tokens, history=given), sink)
        except RequestError as error:
            refusal = str(error)
        else:
            self.live[rid] = (tag, state)
            return
        assert "max_context=96" in refusal or "the pool has" in refusal

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.runtime.step()
            self.runtime.check()

    @precondition(lambda self: self.copies.pending)
    @rule(nth=st.integers(0, 50))
    def complete_one(self, nth):
        self.copies.complete(nth)

    @precondition(lambda self: self.copies.pending)
    @rule()
    def complete_all(self):
        self.copies.complete_all()

    @precondition(lambda self: self.live)
    @rule(nth=st.integers(0, 10))
    def cancel(self, nth):
        self.runtime.cancel(list(self.live)[nth % len(self.live)])

    @rule()
    def reader_begins(self):
        step = self.kv.begin_step()
        p = self.kv.layout.config.page_rows
        seen = []
        for slot, state in enumerate(self.kv.slots):
            complete = state.committed // p if self.kv.is_open(slot) else 0
            pages = self.kv.page_map[slot, :complete]
            for page in pages[pages >= 0].tolist():
                seen += [self.kv._rows(store, page) for store in self.kv.payload.values()]
        self.readers[step] = [(rows, rows.clone()) for rows in seen]

    @precondition(lambda self: self.readers)
    @rule(nth=st.integers(0, 5))
    def reader_ends(self, nth):
        step = list(self.readers)[nth % len(self.readers)]
        for rows, before in self.readers.pop(step):
            assert torch.equal(rows.view(torch.uint8), before.view(torch.uint8)), "I3: reused under a reader"
        self.kv.end_step(step)

    @invariant()
    def everything_is_in_its_place(self):
        if not hasattr(self, "runtime"):
            return
        self.runtime.check()
        kv = self.kv
        optional = kv.device_pool.held("optional")
        assert kv.required_pages() + optional <= kv.device_pool.capacity
        assert ((kv.page_map >= 0) == (kv.device_state >= Device.TAIL)).all()
        if kv.layout.config.placement is Placement.RESIDENT:
            assert optional == 0
        for tag, state in self.live.values():
            assert set(state["tokens"]) <= {tag}
            assert len(state["tokens"]) <= state["want"]

    def teardown(self):
        """Everything still runs to its end, and nothing is left behind."""
        if not hasattr(self, "runtime"):
            return
        while self.readers:
            self.reader_ends(0)
        self.copies.auto = True
        self.runtime.run_until_idle()
        for tag, state in self.live.values():
            assert state["reason"] in (FinishReason.LENGTH, FinishReason.CANCELLED)
            if state["reason"] is FinishReason.LENGTH:
                assert state["tokens"] == [tag] * state["want"]
        self.runtime.close()
        self.runtime.check()
        for pool in (self.kv.device_pool, self.kv.index_pool, self.kv.host_pool):
            assert pool.used == 0


TestHierarchy = Hierarchy.TestCase
TestHierarchy.settings = settings(
    max_examples=70, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
