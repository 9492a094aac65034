"""An engine whose every row says whose it is, and which checks every row it is given (I6, eq. 14).

All tokens of a request are its tag, so the engine can tell requests apart without the runtime's help. A row is
f(tag, layer, position); selections are a fixed function of (tag, layer, position) with recurring rows,
duplicates, -1 and invisible ids. No model, no tolerance: bytes are right or the step raises.
"""

import torch

from trtllm_hisparse.models.spec import LayerSpec, ModelSpec

VOCAB = 4096

# Two producers with followers, as GLM; then a shared source with Reuse and Reindex consumers, as V4.1.
SHARED = ModelSpec(
    "pattern-shared",
    tuple(LayerSpec(i, p) for i, p in [(0, 0), (0, 1), (2, 2), (2, 3), (2, 4)]),
    top_k=6,
    row_bytes=16,
    index_row_bytes=8,
)
REINDEX = ModelSpec(
    "pattern-reindex",
    (LayerSpec(None, None), LayerSpec(1, 1), LayerSpec(1, 1), LayerSpec(3, 1, 1), LayerSpec(3, 1)),
    top_k=6,
    row_bytes=16,
    index_row_bytes=8,
)


def row(tag, layer, position, width=4):
    """float32 [..., width]: distinct small integers, exact."""
    base = torch.stack([tag, torch.full_like(tag, layer), position, tag * 7 + layer * 131 + position], -1)
    return base[..., :width].to(torch.float32)


def choose(tag, layer, position, k):
    """int32 [T, k]: half of it recurs from step to step, some of it is no entry at all."""
    i = torch.arange(k)
    slow = (position[:, None] // 8 * 3 + i * 5 + tag[:, None] + layer) % (position[:, None] + 1)
    fast = (position[:, None] * 31 + i * 17 + layer * 7) % (position[:, None] + 3)  # may be invisible
    chosen = torch.where(i % 2 == 0, slow, fast)
    chosen[:, -1] = torch.where(position % 3 == 0, torch.tensor(-1), chosen[:, 0])  # -1, or a duplicate
    return chosen.to(torch.int32)


class PatternEngine:
    """Satisfies `engine.base.Engine`."""

    dtype = torch.float32
    vocab_size = VOCAB

    def __init__(self, spec=SHARED):
        self.spec = spec

    def step(self, kv):
        batch = kv.batch
        tag, position = batch.token_ids, batch.positions
        sel = {}
        for layer, role in enumerate(self.spec.layers):
            if role.index is None:
                continue
            if role.payload == layer:
                kv.append(layer, row(tag, layer, position))
            if layer in self.spec.index_stores:
                kv.append_index(layer, row(tag, layer, position, 2))
            if role.index == layer:
                self._check_keys(kv, layer, role)
                sel[layer] = choose(tag, layer, position, self.spec.top_k)
                kv.resolve(layer, sel[layer])
            self._check_rows(kv, layer, role, sel[role.index])
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        logits[torch.arange(len(batch.logit_rows)), tag[batch.logit_rows]] = 1
        return logits

    def _check_rows(self, kv, layer, role, selections):
        tag, position = kv.batch.token_ids, kv.batch.positions
        locations = kv.locations(layer).long()
        valid = (selections >= 0) & (selections <= position[:, None])
        assert torch.equal(locations >= 0, valid), "a location for no entry, or none for an entry"
        got = kv.payload(layer)[locations[valid]]
        want = row(tag[:, None].expand_as(selections), role.payload, selections.long())[valid]
        assert torch.equal(got, want), (
            f"layer {layer}: {got[(got != want).any(-1)]} != {want[(got != want).any(-1)]}"
        )

    def _check_keys(self, kv, layer, role):
        pages = kv.index_pages(layer)
        source = layer if role.index_keys is None else role.index_keys
        p = pages.keys.shape[1]
        for r in range(len(kv.batch.slots)):
            last = int(kv.batch.cu_queries[r + 1]) - 1
            seen = torch.arange(int(kv.batch.positions[last]) + 1)
            keys = pages.keys[pages.page_table[r, seen // p].long(), seen % p]
            assert torch.equal(keys, row(kv.batch.token_ids[last].expand_as(seen), source, seen, 2))


def history(spec, tag, length):
    """ImportedHistory of a tag's first `length` rows."""
    from trtllm_hisparse.runtime.request import ImportedHistory

    seen = torch.arange(length)
    tags = torch.full_like(seen, tag)
    return ImportedHistory(
        length,
        {i: row(tags, i, seen) for i in spec.payload_owners},
        {i: row(tags, i, seen, 2) for i in spec.index_stores},
    )
