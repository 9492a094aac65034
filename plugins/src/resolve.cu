// The fused resolver: one block per request. Request-local state (the set of wanted rows, protected hot slots, the LRU
// order) lives in shared memory and registers; blocks share nothing but the counters.
//
// An entry's location passes through `found`: -1 none, >= 0 final, <= -2 waiting in cell -2 - found of the set. The first
// mention of a row ("leader") is located by a hit, a victim or the arena; the others then copy from it.

#include "check.h"
#include "resolve.cuh"

namespace hisparse {
namespace {

struct Layout {
  int cells;      // of the set
  bool wide;      // 32-bit cells
  bool on_chip;   // selections and locations have copies in shared memory
  size_t bytes;   // dynamic shared memory
};

struct Tally {
  int direct = 0, hot = 0, host = 0, staged = 0, copied = 0, lost = 0, corrupt = 0;
};

__device__ void add(const Tally& mine, int* shared, int64_t* counters) {
  const int values[HS_COUNTERS] = {mine.direct, mine.hot, mine.host, mine.staged, mine.copied, mine.lost, mine.corrupt};
#pragma unroll
  for (int c = 0; c < HS_COUNTERS; ++c) {
    const int sum = __reduce_add_sync(~0u, values[c]);
    if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(shared + c, sum);
  }
  __syncthreads();
  if (threadIdx.x < HS_COUNTERS && shared[threadIdx.x] != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counters) + threadIdx.x,
              static_cast<unsigned long long>(shared[threadIdx.x]));
  }
}

template <typename Cell, int kItems>
__global__ void __launch_bounds__(kThreads, 1) resolve_kernel(const hs_resolve_params p, const Layout layout) {
  extern __shared__ uint32_t shared[];
  __shared__ int lru_counts[3][kWarps], miss_counts[kWarps], tally[HS_COUNTERS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = blockIdx.x, k = p.top_k, rows = p.page_rows;

  if (r == p.requests) {  // queries behind the last request
    const int64_t end = static_cast<int64_t>(p.queries) * k;
    for (int64_t i = static_cast<int64_t>(p.cu_queries[p.requests]) * k + threadIdx.x; i < end; i += kThreads) {
      p.locations[i] = -1;
    }
    return;
  }
  const int query = p.cu_queries[r], width = p.cu_queries[r + 1] - query, n = width * k;
  const int slot = p.slot_of[r];
  const int64_t first = static_cast<int64_t>(query) * k;
  int32_t* const locations = p.locations + first;
  const bool broken_request = slot >= p.slots || width > p.max_width;
  if (slot < 0 || broken_request) {
    for (int i = threadIdx.x; i < n; i += kThreads) locations[i] = -1;
    if (threadIdx.x == 0) {
      p.plan.count[r] = 0;
      if (broken_request) atomicAdd(reinterpret_cast<unsigned long long*>(p.counters) + HS_CORRUPT, 1ull);
    }
    return;
  }
  const int32_t* const page_map = p.page_map + static_cast<int64_t>(slot) * p.pages;
  const int32_t* const host_map = p.host_map + static_cast<int64_t>(slot) * p.pages;
  const int32_t* const hot_table = p.hot_table + static_cast<int64_t>(slot) * p.hot_pages;
  int32_t* const owners = p.owners + static_cast<int64_t>(slot) * p.hot_rows;
  int32_t* const lru = p.lru + static_cast<int64_t>(slot) * p.hot_rows;
  const int live = hot_table[0] >= 0 ? p.hot_rows : 0;

  uint32_t* const is_protected = shared;
  const int words = (p.hot_rows + 31) / 32;
  Cell* const cells = reinterpret_cast<Cell*>(shared + words);
  int32_t* const copies = reinterpret_cast<int32_t*>(cells + layout.cells);
  const int32_t* selections = p.selections + first;
  int32_t* found = locations;
  if (layout.on_chip) {
    for (int i = threadIdx.x; i < n; i += kThreads) copies[i] = selections[i];
    selections = copies;
    found = copies + p.max_width * k;
  }
  for (int i = threadIdx.x; i < words; i += kThreads) is_protected[i] = 0;
  for (int i = threadIdx.x; i < static_cast<int>(layout.cells * sizeof(Cell) / 4); i += kThreads) {
    reinterpret_cast<uint32_t*>(cells)[i] = ~0u;
  }
  if (threadIdx.x < HS_COUNTERS) tally[threadIdx.x] = 0;
  __syncthreads();

  // 1. Tail and ready history, in place; the rest into the set of wanted rows.
  RowSet<Cell> wanted{cells, layout.cells, selections};
  Tally mine;
  bool waits = false;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int32_t row = selections[i];
    int32_t at = -1;
    if (row >= 0 && row < p.visible[query + i / k]) {
      const int page = row / rows;
      const int32_t device = page < p.pages ? page_map[page] : -1;
      if (device >= 0) {
        at = device * rows + row % rows;
        ++mine.direct;
      } else {
        at = -2 - wanted.insert(i, row);
        waits = true;
      }
    }
    found[i] = at;
  }
  if (!__syncthreads_or(waits)) {
    if (layout.on_chip) {
      for (int i = threadIdx.x; i < n; i += kThreads) locations[i] = found[i];
    }
    if (threadIdx.x == 0) p.plan.count[r] = 0;
    add(mine, tally, p.counters);
    return;
  }

  // 2. Hot scan; every selected row is protected.
  for (int h = threadIdx.x; h < live; h += kThreads) {
    const int32_t row = owners[h];
    const int leader = row >= 0 ? wanted.find(row) : -1;
    if (leader < 0) continue;
    if (atomicExch(found + leader, static_cast<int32_t>(hot_row(hot_table, h, rows))) >= 0) {
      ++mine.corrupt;  // two slots own the row
    } else {
      ++mine.hot;
    }
    atomicOr(is_protected + h / 32, 1u << (h % 32));
  }
  __syncthreads();

  // 3. Mentions of a hit are located; misses with a source are counted in order of first mention.
  const int span = span_of(n);
  unsigned misses = 0;  // bit i: this lane's i-th entry is one
  int count = 0;
  for (int i = 0; i * 32 < span; ++i) {
    const int e = warp * span + i * 32 + lane;
    bool miss = false;
    if (e < n && found[e] < -1) {
      const int leader = cells[-2 - found[e]];
      if (leader == e) {
        const int page = selections[e] / rows;
        miss = page < p.pages && host_map[page] >= 0;
      } else if (found[leader] >= 0) {
        found[e] = found[leader];
        ++mine.hot;
      }
    }
    misses |= static_cast<unsigned>(miss) << i;
    count += __popc(__ballot_sync(~0u, miss));
  }
  if (lane == 0) miss_counts[warp] = count;
  LruOrder<kItems> order;
  order.read(lru, live, is_protected, lru_counts);  // synchronises
  int n_misses;
  int rank = before_warp(miss_counts, &n_misses);
  const int taken = min(n_misses, order.victims);
  const int copied = min(n_misses, taken + p.stage_rows);
  if (threadIdx.x == 0) {
    mine.corrupt += order.broken;
    mine.copied = copied;
    p.plan.count[r] = copied;
  }

  // 4. Misses take the oldest unselected slots, then the arena. Slots pass through the plan's destinations.
  const hs_plan plan{p.plan.row + first, p.plan.src + first, p.plan.dst + first, nullptr};
  order.write(lru, live, is_protected, taken, [&](int victim, int h) { plan.dst[victim] = h; });
  __syncthreads();
  for (int i = 0; i * 32 < span; ++i) {
    const bool miss = misses >> i & 1;
    const unsigned lanes = __ballot_sync(~0u, miss);
    const int e = warp * span + i * 32 + lane, m = rank + rank_in(lanes);
    rank += __popc(lanes);
    if (!miss) {
      if (e < n && found[e] < -1 && cells[-2 - found[e]] == e) {  // no source anywhere
        found[e] = -1;
        ++mine.lost;
      }
      continue;
    }
    if (m >= copied) {
      found[e] = -1;
      ++mine.lost;
      continue;
    }
    const int32_t row = selections[e];
    int64_t at;
    if (m < taken) {
      const int h = static_cast<int>(plan.dst[m]);
      owners[h] = row;
      at = hot_row(hot_table, h, rows);
    } else {
      at = p.stage_base[r] + m - taken;
      ++mine.staged;
    }
    ++mine.host;
    plan.row[m] = row;
    plan.src[m] = static_cast<int64_t>(host_map[row / rows]) * rows + row % rows;
    plan.dst[m] = at;
    found[e] = static_cast<int32_t>(at);
  }
  __syncthreads();

  // 5. A location for every entry.
  const int64_t stage = p.stage_rows > 0 ? p.stage_base[r] : 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    int32_t at = found[i];
    if (at < -1) {
      at = found[cells[-2 - at]];
      mine.host += at >= 0;
      mine.staged += at >= stage && at < stage + p.stage_rows;
      mine.lost += at < 0;
    } else if (!layout.on_chip) {
      continue;
    }
    locations[i] = at;
  }
  add(mine, tally, p.counters);
}

// The most entries a launch can serve from shared memory of `limit` bytes; the set stays at most four fifths full.
int plan_layout(int entries, int hot_rows, size_t limit, Layout* out) {
  const size_t bits = (hot_rows + 31) / 32 * 4;
  const int roomy = (2 * entries + 31) / 32 * 32;
  const size_t both = 8 * static_cast<size_t>(entries);
  if (bits + 4 * roomy + both <= limit) {
    *out = {roomy, true, true, bits + 4 * roomy + both};
  } else if (bits + 2 * roomy + both <= limit) {
    *out = {roomy, false, true, bits + 2 * roomy + both};
  } else {
    const int cells = static_cast<int>(min(static_cast<size_t>(roomy), (limit - bits) / 64 * 32));
    if (cells * 4LL < entries * 5LL) {
      return fail(HS_BAD_ARGUMENT, "max_width * top_k: this device serves at most %d entries a request, got %d",
                  cells * 4 / 5, entries);
    }
    *out = {cells, false, false, bits + 2 * static_cast<size_t>(cells)};
  }
  return HS_OK;
}

template <typename Cell, int kItems>
int launch(const hs_resolve_params& p, const Layout& layout, cudaStream_t stream) {
  const auto kernel = resolve_kernel<Cell, kItems>;
  if (layout.bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(layout.bytes));
  }
  kernel<<<p.requests + 1, kThreads, layout.bytes, stream>>>(p, layout);
  return launched("hs_resolve");
}

template <typename Cell>
int launch(const hs_resolve_params& p, const Layout& layout, cudaStream_t stream) {
  if (p.hot_rows <= 4 * kThreads) return launch<Cell, 4>(p, layout, stream);
  if (p.hot_rows <= 8 * kThreads) return launch<Cell, 8>(p, layout, stream);
  return launch<Cell, 32>(p, layout, stream);
}

}  // namespace

int check(const hs_resolve_params& p) {
  HS_RANGE(p.requests, 0, HS_MAX_REQUESTS);
  HS_RANGE(p.max_width, 1, HS_MAX_WIDTH);
  HS_RANGE(p.queries, 0, static_cast<int64_t>(HS_MAX_REQUESTS) * HS_MAX_WIDTH);
  HS_RANGE(p.top_k, 1, HS_MAX_TOP_K);
  HS_RANGE(p.slots, 1, INT32_MAX);
  HS_RANGE(p.page_rows, 1, INT32_MAX);
  HS_RANGE(p.pages, 1, INT32_MAX);
  HS_RANGE(p.hot_rows, 1, HS_MAX_HOT_ROWS);
  HS_RANGE(p.hot_pages, (p.hot_rows + p.page_rows - 1) / p.page_rows, INT32_MAX);
  HS_RANGE(p.stage_rows, 0, INT32_MAX);
  HS_POINTER(p.cu_queries, 4);
  HS_POINTER(p.slot_of, 4);
  HS_POINTER(p.page_map, 4);
  HS_POINTER(p.host_map, 4);
  HS_POINTER(p.hot_table, 4);
  HS_POINTER(p.owners, 4);
  HS_POINTER(p.lru, 4);
  if (p.stage_rows > 0) HS_POINTER(p.stage_base, 8);
  HS_POINTER(p.plan.count, 4);
  if (p.queries == 0) return HS_OK;  // arrays of no elements may be null
  HS_POINTER(p.selections, 4);
  HS_POINTER(p.visible, 4);
  HS_POINTER(p.plan.row, 4);
  HS_POINTER(p.plan.src, 8);
  HS_POINTER(p.plan.dst, 8);
  return HS_OK;
}

}  // namespace hisparse

int hs_resolve(const hs_resolve_params* params, hs_stream stream) {
  using namespace hisparse;
  const hs_resolve_params& p = *params;
  if (const int status = check(p)) return status;
  if (p.queries > 0) HS_POINTER(p.locations, 4);
  HS_POINTER(p.counters, 8);
  size_t limit;
  if (const int status = shared_memory_limit(&limit)) return status;
  Layout layout;
  if (const int status = plan_layout(p.max_width * p.top_k, p.hot_rows, limit - 1024, &layout)) return status;
  const auto s = static_cast<cudaStream_t>(stream);
  return layout.wide ? launch<uint32_t>(p, layout, s) : launch<uint16_t>(p, layout, s);
}
