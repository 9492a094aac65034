"""The kernels as torch operators `torch.ops.hisparse.*`, with a CPU implementation each.

Tensors of one call are contiguous and live on one device; only the sources of `copy_rows` may be pinned host
memory beside CUDA destinations. On CUDA nothing here waits for the device, so every operator may be captured in a
graph.
Contracts: `resolver/base.py` for resolution, `engine/` for the index and attention, `plugins/include/hisparse.h`
for all of them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.library import custom_op

from trtllm_hisparse.engine.attention import attend
from trtllm_hisparse.engine.index_cpu import index_top_k as index_cpu
from trtllm_hisparse.kernels import abi
from trtllm_hisparse.resolver import CopyPlan, ResolveInputs, cpu, oracle

_FORMATS = {torch.float32: abi.F32, torch.bfloat16: abi.BF16}

Tensor = torch.Tensor


@dataclass(frozen=True)
class Plan:
    """What a resolution found.

    locations: int32 [T, k], device row of every entry, -1 = none.
    row, src, dst: int32, int64, int64 [T * k]: logical row, host row and device row of each row to copy; request
        r's part starts at `cu_queries[r] * k`.
    count: int32 [R], rows of each part.
    """

    locations: Tensor
    row: Tensor
    src: Tensor
    dst: Tensor
    count: Tensor


def resolve(
    selections: Tensor,
    cu_queries: Tensor,
    slots: Tensor,
    visible: Tensor,
    page_map: Tensor,
    host_map: Tensor,
    hot_table: Tensor,
    owners: Tensor,
    lru: Tensor,
    stage_base: Tensor,
    counters: Tensor,
    page_rows: int,
    stage_rows: int,
    max_width: int,
) -> Plan:
    """Resolve one step of one cache state (`ResolveInputs` has shapes and meaning).

    Updates owners and lru in place, and adds to counters, int64 [7] in the order of `abi.COUNTERS`. max_width: no
    request has more queries.
    """
    return Plan(
        *torch.ops.hisparse.resolve(
            selections,
            cu_queries,
            slots,
            visible,
            page_map,
            host_map,
            hot_table,
            owners,
            lru,
            stage_base,
            counters,
            page_rows,
            stage_rows,
            max_width,
        )
    )


def promote(
    plan: Plan,
    last_query: Tensor,
    selections: Tensor,
    cu_queries: Tensor,
    slots: Tensor,
    visible: Tensor,
    hot_table: Tensor,
    owners: Tensor,
    lru: Tensor,
    stage_base: Tensor,
    page_rows: int,
    stage_rows: int,
) -> Plan:
    """Copy-back of a resolution's staged rows (`resolver.oracle.promote`); updates owners and lru in place.

    plan and the tensors are those of the resolution. last_query: int32 [R], row of `selections` of each request's
    last accepted query, -1 = none. Returns the copies from arena rows to hot rows, to be run with the stores as
    their own sources; its locations are the resolution's.
    """
    return Plan(
        plan.locations,
        *torch.ops.hisparse.promote(
            plan.row,
            plan.src,
            plan.dst,
            plan.count,
            last_query,
            selections,
            cu_queries,
            slots,
            visible,
            hot_table,
            owners,
            lru,
            stage_base,
            page_rows,
            stage_rows,
        ),
    )


def copy_rows(
    plan: Plan,
    cu_queries: Tensor,
    top_k: int,
    sources: list[Tensor],
    destinations: list[Tensor],
    counters: Tensor,
) -> None:
    """Run a plan for each pair of stores `[rows, elements]`; entries outside them are counted as corrupt."""
    torch.ops.hisparse.copy_rows(
        plan.src, plan.dst, plan.count, cu_queries, top_k, sources, destinations, counters
    )


def append(rows: Tensor, destination: Tensor, store: Tensor) -> None:
    """Write `rows [n, dim]` to rows `destination` (int64 [n], -1 = nowhere) of `store [rows, dim]`, same dtype."""
    torch.ops.hisparse.append(rows, destination, store)


def index_top_k(
    query: Tensor,
    weight: Tensor,
    keys: Tensor,
    page_table: Tensor,
    cu_queries: Tensor,
    visible: Tensor,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Each query's `top_k` best of its `visible` first positions (`index_cpu.index_top_k` has the order).

    query: [T, H, d]; weight: float32 [T, H]; keys: [pages, page_rows, d]; page_table: int32 [R, J].
    Returns int32 [T, top_k] and bool [T], True where a visible score is NaN.
    """
    selections, unordered = torch.ops.hisparse.index_top_k(
        query, weight, keys, page_table, cu_queries, visible, top_k, scale
    )
    return selections, unordered


def attention(query: Tensor, rows: Tensor, locations: Tensor, scale: float, latent: int) -> Tensor:
    """float32 `[T, H, latent]`: `engine.attention.attend` over rows at `locations [T, k]`; query `[T, H, dim]`."""
    out: Tensor = torch.ops.hisparse.attention(query, rows, locations, scale, latent)
    return out


# -- resolve ----------------------------------------------------------------------------------------------
def _plan_like(selections: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    size = selections.numel()
    return (
        torch.empty_like(selections),
        selections.new_empty(size),
        selections.new_empty(size, dtype=torch.int64),
        selections.new_empty(size, dtype=torch.int64),
        torch.empty_like(slots),
    )


@custom_op("hisparse::resolve", mutates_args=("owners", "lru", "counters"), device_types="cpu")
def _resolve(
    selections: Tensor,
    cu_queries: Tensor,
    slots: Tensor,
    visible: Tensor,
    page_map: Tensor,
    host_map: Tensor,
    hot_table: Tensor,
    owners: Tensor,
    lru: Tensor,
    stage_base: Tensor,
    counters: Tensor,
    page_rows: int,
    stage_rows: int,
    max_width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = _plan_like(selections, slots)
    inputs = ResolveInputs(
        selections.numpy(),
        cu_queries.numpy(),
        slots.numpy(),
        visible.numpy(),
        page_map.numpy(),
        host_map.numpy(),
        hot_table.numpy(),
        owners.numpy(),
        lru.numpy(),
        page_rows,
        stage_base.numpy(),
        stage_rows,
    )
    cpu.resolve_into(inputs, *(tensor.numpy() for tensor in (*out, counters)))
    return out


@_resolve.register_fake
def _(
    selections: Tensor, cu_queries: Tensor, slots: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _plan_like(selections, slots)


@_resolve.register_kernel("cuda")
def _(
    selections: Tensor,
    cu_queries: Tensor,
    slots: Tensor,
    visible: Tensor,
    page_map: Tensor,
    host_map: Tensor,
    hot_table: Tensor,
    owners: Tensor,
    lru: Tensor,
    stage_base: Tensor,
    counters: Tensor,
    page_rows: int,
    stage_rows: int,
    max_width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = locations, row, src, dst, count = _plan_like(selections, slots)
    params = abi.ResolveParams(
        requests=len(slots),
        queries=selections.shape[0],
        max_width=max_width,
        top_k=selections.shape[1],
        slots=page_map.shape[0],
        pages=page_map.shape[1],
        hot_rows=owners.shape[1],
        hot_pages=hot_table.shape[1],
        page_rows=page_rows,
        stage_rows=stage_rows,
        selections=_address("selections", selections, torch.int32),
        cu_queries=_address("cu_queries", cu_queries, torch.int32, len(slots) + 1),
        slot_of=_address("slots", slots, torch.int32),
        visible=_address("visible", visible, torch.int32, selections.shape[0]),
        page_map=_address("page_map", page_map, torch.int32),
        host_map=_address("host_map", host_map, torch.int32, *page_map.shape),
        hot_table=_address("hot_table", hot_table, torch.int32),
        owners=_address("owners", owners, torch.int32),
        lru=_address("lru", lru, torch.int32, *owners.shape),
        stage_base=_address("stage_base", stage_base, torch.int64, len(slots)),
        locations=locations.data_ptr(),
        plan=abi.Plan(row.data_ptr(), src.data_ptr(), dst.data_ptr(), count.data_ptr()),
        counters=_address("counters", counters, torch.int64, len(abi.COUNTERS)),
    )
    abi.call("hs_resolve", params, _stream(selections))
    return out


# -- promote ----------------------------------------------------------------------------------------------
def _copies_like(row: Tensor, src: Tensor, dst: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(row), torch.empty_like(src), torch.empty_like(dst), torch.empty_like(count)


@custom_op("hisparse::promote", mutates_args=("owners", "lru"), device_types="cpu")
def _promote(
    row: Tensor,
    src: Tensor,
    dst: Tensor,
    count: Tensor,
    last_query: Tensor,
    selections: Tensor,
    cu_queries: Tensor,
    slots: Tensor,
    visible: Tensor,
    hot_table: Tensor,
    owners: Tensor,
    lru: Tensor,
    stage_base: Tensor,
    page_rows: int,
    stage_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    no_page = np.full((len(owners), 1), -1, np.int32)  # promotion looks at no page
    inputs = ResolveInputs(
        selections.numpy(),
        cu_queries.numpy(),
        slots.numpy(),
        visible.numpy(),
        no_page,
        no_page,
        hot_table.numpy(),
        owners.numpy(),
        lru.numpy(),
        page_rows,
        stage_base.numpy(),
        stage_rows,
    )
    starts = cu_queries[:-1].long() * selections.shape[1]
    used = torch.cat([torch.arange(n) + a for a, n in zip(starts.tolist(), count.tolist(), strict=True)])
    given = CopyPlan(row[used].numpy(), src[used].numpy(), dst[used].numpy(), count.numpy())
    got = oracle.promote(inputs, given, last_query.numpy())
    out = _copies_like(row, src, dst, count)
    out[3].copy_(torch.from_numpy(got.count))
    at = torch.cat([torch.arange(n) + a for a, n in zip(starts.tolist(), got.count.tolist(), strict=True)])
    for part, values in zip(out, (got.row, got.src, got.dst), strict=False):
        part[at] = torch.from_numpy(values)
    return out


@_promote.register_fake
def _(row: Tensor, src: Tensor, dst: Tensor, count: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _copies_like(row, src, dst, count)


@_promote.register_kernel("cuda")
def _(
    row: Tensor,
    src: Tensor,
    dst: Tensor,
    count: Tensor,
    last_query: Tensor,
    selections: Tensor,
    cu_queries: Tensor,
    slots: Tensor,
    visible: Tensor,
    hot_table: Tensor,
    owners: Tensor,
    lru: Tensor,
    stage_base: Tensor,
    page_rows: int,
    stage_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = _copies_like(row, src, dst, count)
    no_page = hot_table.data_ptr()  # promotion looks at no page
    step = abi.ResolveParams(
        requests=len(slots),
        queries=selections.shape[0],
        max_width=abi.MAX_WIDTH,
        top_k=selections.shape[1],
        slots=owners.shape[0],
        pages=1,
        hot_rows=owners.shape[1],
        hot_pages=hot_table.shape[1],
        page_rows=page_rows,
        stage_rows=stage_rows,
        selections=_address("selections", selections, torch.int32),
        cu_queries=_address("cu_queries", cu_queries, torch.int32, len(slots) + 1),
        slot_of=_address("slots", slots, torch.int32),
        visible=_address("visible", visible, torch.int32, selections.shape[0]),
        page_map=no_page,
        host_map=no_page,
        hot_table=_address("hot_table", hot_table, torch.int32),
        owners=_address("owners", owners, torch.int32),
        lru=_address("lru", lru, torch.int32, *owners.shape),
        stage_base=_address("stage_base", stage_base, torch.int64, len(slots)),
        plan=abi.Plan(row.data_ptr(), src.data_ptr(), dst.data_ptr(), count.data_ptr()),
    )
    params = abi.PromoteParams(
        step=step,
        last_query=_address("last_query", last_query, torch.int32, len(slots)),
        promoted=abi.Plan(*(part.data_ptr() for part in out)),
    )
    abi.call("hs_promote", params, _stream(selections))
    return out


# -- copy_rows --------------------------------------------------------------------------------------------
@custom_op("hisparse::copy_rows", mutates_args=("destinations", "counters"), device_types="cpu")
def _copy_rows(
    src: Tensor,
    dst: Tensor,
    count: Tensor,
    cu_queries: Tensor,
    top_k: int,
    sources: list[Tensor],
    destinations: list[Tensor],
    counters: Tensor,
) -> None:
    starts = cu_queries[:-1].long() * top_k
    parts = [slice(a, a + n) for a, n in zip(starts.tolist(), count.tolist(), strict=True)]
    source = torch.cat([src[part] for part in parts])
    target = torch.cat([dst[part] for part in parts])
    inside = (source >= 0) & (source < min(map(len, sources)))
    inside &= (target >= 0) & (target < min(map(len, destinations)))
    counters[abi.COUNTERS.index("corrupt")] += int((~inside).sum())
    for a, b in zip(sources, destinations, strict=True):
        b[target[inside]] = a[source[inside]]


@_copy_rows.register_fake
def _(*_: object) -> None:
    return None


@_copy_rows.register_kernel("cuda")
def _(
    src: Tensor,
    dst: Tensor,
    count: Tensor,
    cu_queries: Tensor,
    top_k: int,
    sources: list[Tensor],
    destinations: list[Tensor],
    counters: Tensor,
) -> None:
    pairs = list(zip(sources, destinations, strict=True))
    for start in range(0, len(pairs), abi.MAX_MEMBERS):
        some = pairs[start : start + abi.MAX_MEMBERS]
        params = abi.CopyParams(
            requests=len(count),
            queries=src.numel() // top_k,
            top_k=top_k,
            members=len(some),
            cu_queries=_address("cu_queries", cu_queries, torch.int32, len(count) + 1),
            plan=abi.Plan(None, src.data_ptr(), dst.data_ptr(), count.data_ptr()),
            src_rows=min(len(a) for a, _ in some),
            dst_rows=min(len(b) for _, b in some),
            counters=counters.data_ptr(),
        )
        for i, (a, b) in enumerate(some):
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype or not (a.is_cuda or a.is_pinned()):
                raise ValueError(
                    f"stores: expected rows of one shape and dtype, the source on the device or pinned; got "
                    f"{list(a.shape[1:])} {a.dtype} on {a.device} and {list(b.shape[1:])} {b.dtype}"
                )
            params.src[i], params.dst[i] = a.data_ptr(), b.data_ptr()
            params.row_bytes[i] = b[0].nbytes
        abi.call("hs_copy_rows", params, _stream(dst))


# -- append -----------------------------------------------------------------------------------------------
@custom_op("hisparse::append", mutates_args=("store",), device_types="cpu")
def _append(rows: Tensor, destination: Tensor, store: Tensor) -> None:
    real = destination >= 0
    store[destination[real]] = rows[real]


@_append.register_fake
def _(rows: Tensor, destination: Tensor, store: Tensor) -> None:
    return None


@_append.register_kernel("cuda")
def _(rows: Tensor, destination: Tensor, store: Tensor) -> None:
    params = abi.AppendParams(
        rows=rows.shape[0],
        dim=rows.shape[1],
        source_format=_FORMATS[rows.dtype],
        format=_FORMATS[store.dtype],
        source=_address("rows", rows, rows.dtype, len(destination), store.shape[1]),
        destination=_address("destination", destination, torch.int64),
        store=_address("store", store, rows.dtype),
        store_rows=store.shape[0],
    )
    abi.call("hs_append", params, _stream(store))


# -- index_top_k ------------------------------------------------------------------------------------------
@custom_op("hisparse::index_top_k", mutates_args=(), device_types="cpu")
def _index_top_k(
    query: Tensor,
    weight: Tensor,
    keys: Tensor,
    page_table: Tensor,
    cu_queries: Tensor,
    visible: Tensor,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return index_cpu(query.float(), weight, keys, page_table, cu_queries, visible, top_k)


@_index_top_k.register_fake
def _(*args: Tensor | int | float) -> tuple[Tensor, Tensor]:
    visible, top_k = args[5:7]
    assert isinstance(visible, Tensor)
    assert isinstance(top_k, int)
    return visible.new_empty(len(visible), top_k), visible.new_empty(len(visible), dtype=torch.bool)


@_index_top_k.register_kernel("cuda")
def _(
    query: Tensor,
    weight: Tensor,
    keys: Tensor,
    page_table: Tensor,
    cu_queries: Tensor,
    visible: Tensor,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    queries, heads, dim = query.shape
    selections = visible.new_empty(queries, top_k)
    unordered = visible.new_empty(queries, dtype=torch.bool)
    params = abi.IndexParams(
        requests=len(page_table),
        queries=queries,
        heads=heads,
        dim=dim,
        top_k=top_k,
        page_rows=keys.shape[1],
        table_pages=page_table.shape[1],
        query_format=_FORMATS[query.dtype],
        key_format=_FORMATS[keys.dtype],
        scale=scale,
        query=_address("query", query, query.dtype),
        weight=_address("weight", weight, torch.float32, queries, heads),
        keys=_address("keys", keys, keys.dtype),
        key_pages=keys.shape[0],
        page_table=_address("page_table", page_table, torch.int32),
        cu_queries=_address("cu_queries", cu_queries, torch.int32, len(page_table) + 1),
        visible=_address("visible", visible, torch.int32, queries),
        selections=selections.data_ptr(),
        unordered=unordered.data_ptr(),
    )
    space = visible.new_empty(abi.workspace("hs_index_workspace", params), dtype=torch.uint8)
    params.workspace = space.data_ptr()
    abi.call("hs_index_top_k", params, _stream(query))
    return selections, unordered


# -- attention --------------------------------------------------------------------------------------------
@custom_op("hisparse::attention", mutates_args=(), device_types="cpu")
def _attention(query: Tensor, rows: Tensor, locations: Tensor, scale: float, latent: int) -> Tensor:
    return attend(query, rows, locations, scale, latent)


@_attention.register_fake
def _(query: Tensor, rows: Tensor, locations: Tensor, scale: float, latent: int) -> Tensor:
    return query.new_empty(*query.shape[:2], latent, dtype=torch.float32)


@_attention.register_kernel("cuda")
def _(query: Tensor, rows: Tensor, locations: Tensor, scale: float, latent: int) -> Tensor:
    queries, heads, dim = query.shape
    out = query.new_empty(queries, heads, latent, dtype=torch.float32)
    params = abi.AttentionParams(
        queries=queries,
        heads=heads,
        dim=dim,
        latent=latent,
        top_k=locations.shape[1],
        query_format=_FORMATS[query.dtype],
        row_format=_FORMATS[rows.dtype],
        out_format=abi.F32,
        scale=scale,
        row_scale=1.0,
        query=_address("query", query, query.dtype),
        rows=_address("rows", rows, rows.dtype, len(rows), dim),
        store_rows=len(rows),
        locations=_address("locations", locations, torch.int32, queries, locations.shape[1]),
        out=out.data_ptr(),
    )
    space = locations.new_empty(abi.workspace("hs_attention_workspace", params), dtype=torch.uint8)
    params.workspace = space.data_ptr()
    abi.call("hs_attention", params, _stream(query))
    return out


# -- inside -----------------------------------------------------------------------------------------------
def _stream(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def _address(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a contiguous CUDA tensor of `dtype` and, where given, `shape` (ValueError otherwise)."""
    fits = tensor.is_cuda and tensor.is_contiguous() and tensor.dtype == dtype
    if not fits or (shape and tuple(tensor.shape) != shape):
        raise ValueError(
            f"{name}: expected a contiguous {dtype} CUDA tensor{f' {list(shape)}' if shape else ''}, got "
            f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    return tensor.data_ptr()
