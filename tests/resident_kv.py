"""A KVStep that keeps everything resident: obviously right, and hostile where the engine must not look.

Every store has its own shuffled page order, and every row nobody wrote holds NaN.
"""

from contextlib import contextmanager

import torch

from trtllm_hisparse.engine.base import IndexPages, StepBatch


@contextmanager
def threads(count):
    """torch with `count` threads. On a busy machine two of them mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ResidentKV:
    """Dense stores of `slots` requests of up to `max_tokens` tokens each."""

    def __init__(self, engine, *, slots=1, max_tokens=512, page_rows=64, seed=0):
        config, dtype = engine.config, engine.dtype
        self.spec = engine.spec
        self.page_rows = page_rows
        self.pages = -(-max_tokens // page_rows)
        self.lengths = [0] * slots
        generator = torch.Generator().manual_seed(seed)

        def table():
            return torch.randperm(slots * self.pages, generator=generator).view(slots, self.pages)

        def store(width):
            return torch.full((slots * self.pages * page_rows, width), torch.nan, dtype=dtype)

        self.tables = {i: table() for i in self.spec.payload_owners}
        self.rows = {i: store(config.row_dim) for i in self.spec.payload_owners}
        self.key_tables = {i: table() for i in self.spec.index_stores}
        self.keys = {i: store(config.index_head_dim) for i in self.spec.index_stores}

    def step(self, tokens, logits="last", table_width=None):
        """The step that feeds `tokens`, {slot: ids}; logits of each slot's "last" token or of "all"."""
        return ResidentStep(self, tokens, logits, table_width)


class ResidentStep:
    def __init__(self, kv, tokens, logits, table_width):
        self.kv = kv
        self.selections = {}
        slots = list(tokens)
        counts = [len(tokens[s]) for s in slots]
        starts = [kv.lengths[s] for s in slots]
        for slot, count in zip(slots, counts, strict=True):
            kv.lengths[slot] += count
        ends = torch.tensor(counts).cumsum(0)
        self.batch = StepBatch(
            token_ids=torch.cat([torch.as_tensor(tokens[s], dtype=torch.int64) for s in slots]),
            positions=torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]),
            cu_queries=torch.cat([torch.tensor([0]), ends]).int(),
            slots=torch.tensor(slots, dtype=torch.int32),
            logit_rows=ends - 1 if logits == "last" else torch.arange(int(ends[-1])),
        )
        self.slot_of_query = torch.tensor(slots).repeat_interleave(torch.tensor(counts))
        self.table_width = table_width or kv.pages

    def append(self, layer, rows):
        assert rows.shape[0] == len(self.batch.positions)
        self.kv.rows[layer][self._physical(self.kv.tables[layer], self.batch.positions)] = rows

    def append_index(self, layer, keys):
        self.kv.keys[layer][self._physical(self.kv.key_tables[layer], self.batch.positions)] = keys

    def index_pages(self, layer):
        keys = self.kv.keys[layer].view(-1, self.kv.page_rows, self.kv.keys[layer].shape[1])
        table = torch.full((len(self.batch.slots), self.table_width), -1, dtype=torch.int32)
        for r, slot in enumerate(self.batch.slots.tolist()):
            used = -(-self.kv.lengths[slot] // self.kv.page_rows)
            table[r, :used] = self.kv.key_tables[layer][slot, :used]
        return IndexPages(keys, table)

    def resolve(self, layer, selections):
        assert selections.dtype == torch.int32
        assert selections.shape == (len(self.batch.positions), self.kv.spec.top_k)
        self.selections[layer] = selections

    def locations(self, layer):
        chosen = self.selections[self.kv.spec.layers[layer].index].long()
        absent = (chosen < 0) | (chosen > self.batch.positions[:, None])
        at = self._physical(self.kv.tables[layer], chosen.clamp(min=0))
        return at.masked_fill(absent, -1).int()

    def payload(self, layer):
        return self.kv.rows[layer]

    def _physical(self, table, positions):
        slot = self.slot_of_query.view(-1, *[1] * (positions.dim() - 1))
        return table[slot, positions // self.kv.page_rows] * self.kv.page_rows + positions % self.kv.page_rows


def prefill(engine, kv, prompts, chunk=None, logits="last"):
    """Feed `prompts` {slot: ids} together, `chunk` tokens of each in a step; logits of each slot's last token,
    or with "all" those of every token, {slot: [rows, vocab]}."""
    out = {slot: [] for slot in prompts}
    at = 0
    while any(at < len(p) for p in prompts.values()):
        fed = {s: p[at : at + (chunk or len(p))] for s, p in prompts.items() if at < len(p)}
        got = engine.step(kv.step(fed, logits))
        for slot, rows in zip(
            fed, got.split([1 if logits == "last" else len(t) for t in fed.values()]), strict=True
        ):
            out[slot].append(rows)
        at += chunk or max(len(p) for p in prompts.values())
    return {s: rows[-1] if logits == "last" else torch.cat(rows) for s, rows in out.items()}
