"""Index scores and top-k for the CPU, compiled: keys go through the vector unit a block of positions at a time.

    score[t, s] = sum over heads h of w[t, h] * relu(q[t, h] . k[s] * d**-0.5)        (DeepSeek-V3.2, DSA)

Every score is one fixed sequence of float32 operations, whatever else is computed beside it, so a selection does
not depend on the batch, on how a prompt was cut, or on where its keys lie.
"""

import itertools
from typing import Any

import numpy as np
import torch
from numba import njit

BLOCK = 64
"""Positions scored side by side; a multiple of every vector length in use."""


def index_top_k(
    query: torch.Tensor,
    weight: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    cu_queries: torch.Tensor,
    visible: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query's `top_k` best positions, and which queries could not be ordered.

    query, weight: float32 `[>= T, H, d]` and `[>= T, H]`; the first T rows are the batch's queries.
    keys:          `[pages, page_rows, d]`.
    page_table:    int32 `[R, J]`, page of each request's logical page.
    cu_queries:    int32 `[R + 1]`; queries past its end are padding.
    visible:       int32 `[T]`, positions a query may select from, ascending within a request.
    Returns int32 `[T, top_k]`, by descending score, equal scores by ascending position, -1 behind the last visible
    position: torch.topk's set wherever its scores differ, and the lowest positions where they are equal. And bool
    `[T]`, True where a visible score is NaN: that query's selection is all -1.
    Keys past a query's own position are never part of a result, whatever they hold.
    """
    seen_by = visible.numpy()
    selections = np.full((len(visible), top_k), -1, np.int32)
    unordered = np.zeros(len(visible), np.bool_)
    ends = cu_queries.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        seen = int(seen_by[end - 1])
        table = page_table[request, : -(-seen // keys.shape[1])].long()
        if len(table) * keys.shape[1] < seen or (seen and int(table.min()) < 0):
            raise ValueError(f"request {request}: expected index pages for {seen} positions, got {table.tolist()}")
        _top_k(
            query[start:end].numpy(),
            weight[start:end].numpy(),
            keys[table].float().flatten(0, 1)[:seen].numpy(),
            seen_by[start:end],
            selections[start:end],
            unordered[start:end],
        )
    return torch.from_numpy(selections), torch.from_numpy(unordered)


@njit(nogil=True, cache=True)
def _top_k(query: Any, weight: Any, keys: Any, visible: Any, selections: Any, unordered: Any) -> None:
    """One request: query [Q, H, d], weight [Q, H], keys [S, d], visible [Q] ascending, S its last."""
    n_queries, top_k = selections.shape
    scores = np.empty((n_queries, len(keys)), np.float32)
    _score(query, weight, keys, visible, scores)
    best = np.empty(top_k, np.float32)  # a heap, the entry to be replaced first at its root
    where = np.empty(top_k, np.int32)
    for t in range(n_queries):
        count = 0
        for s in range(visible[t]):
            score = scores[t, s]
            if np.isnan(score):
                unordered[t] = True
                break
            if count < top_k:
                _sift_up(best, where, count, score, s)
                count += 1
            elif score > best[0]:  # an equal score at a later position never replaces
                _sift_down(best, where, count, score, s)
        if unordered[t]:
            continue
        while count > 0:
            count -= 1
            selections[t, count] = where[0]
            _sift_down(best, where, count, best[count], where[count])


@njit(nogil=True, cache=True)
def _score(query: Any, weight: Any, keys: Any, visible: Any, scores: Any) -> None:
    n_queries, heads, dim = query.shape
    scale = np.float32(dim**-0.5)
    block = np.zeros((dim, BLOCK), np.float32)  # keys side by side
    product = np.empty(BLOCK, np.float32)
    total = np.empty(BLOCK, np.float32)
    for first in range(0, len(keys), BLOCK):
        count = min(BLOCK, len(keys) - first)
        for j in range(count):
            for i in range(dim):
                block[i, j] = keys[first + j, i]
        for t in range(n_queries):
            if visible[t] <= first:
                continue
            total[:] = 0
            for h in range(heads):
                product[:] = 0
                for i in range(dim):
                    q = query[t, h, i]
                    for j in range(BLOCK):
                        product[j] += q * block[i, j]
                w = weight[t, h]
                for j in range(BLOCK):
                    value = product[j] * scale
                    if value < 0:  # relu; a NaN stays
                        value = np.float32(0)
                    total[j] += w * value
            for j in range(count):
                scores[t, first + j] = total[j]


@njit(nogil=True, cache=True)
def _worse(score: Any, position: Any, than_score: Any, than_position: Any) -> Any:
    return score < than_score or (score == than_score and position > than_position)


@njit(nogil=True, cache=True)
def _sift_up(best: Any, where: Any, at: Any, score: Any, position: Any) -> None:
    """Add an entry at the end of a heap of `at` entries."""
    while at > 0:
        parent = (at - 1) // 2
        if not _worse(score, position, best[parent], where[parent]):
            break
        best[at] = best[parent]
        where[at] = where[parent]
        at = parent
    best[at] = score
    where[at] = position


@njit(nogil=True, cache=True)
def _sift_down(best: Any, where: Any, count: Any, score: Any, position: Any) -> None:
    """Replace the root of a heap of `count` entries."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and _worse(best[child + 1], where[child + 1], best[child], where[child]):
            child += 1
        if not _worse(best[child], where[child], score, position):
            break
        best[at] = best[child]
        where[at] = where[child]
        at = child
    if count > 0:
        best[at] = score
        where[at] = position
