// The fused resolver: one block per request. Request-local state (the set of wanted rows, protected hot slots, the LRU
// order) lives in shared memory and registers; blocks share nothing but the counters.
//
// An entry's location passes through `found`: -1 none, >= 0 final, <= -2 waiting in cell -2 - found of the set. The first
// mention of a row ("leader") is located by a hit, a victim or the arena; the others then copy from it.

#include <algorithm>

#include "check.h"
#include "resolve.cuh"

namespace hisparse {
namespace {

struct Layout {
  int cells;      // of the set
  bool wide;      // WideSet, or SmallSet
  bool on_chip;   // locations in the making (and a SmallSet's rows) are in shared memory
  size_t bytes;   // dynamic shared memory
};

// 32-bit words of shared memory before the set.
__host__ __device__ int protected_words(int hot_rows) { return (hot_rows + 127) / 128 * 4; }

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

template <typename Set, int kItems>
__global__ void __launch_bounds__(kThreads, 1) resolve_kernel(const hs_resolve_params p, const Layout layout) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ int lru_counts[2][kWarps], miss_counts[kWarps], tally[HS_COUNTERS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = blockIdx.x, k = p.top_k;
  const Pages pages(p.page_rows);

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
  uint32_t* const cells = shared + protected_words(p.hot_rows);
  const int cell_bytes = layout.cells * static_cast<int>(sizeof(typename Set::Cell));
  const int32_t* selections = p.selections + first;
  int32_t* found = locations;
  if (layout.on_chip) {
    found = reinterpret_cast<int32_t*>(cells + cell_bytes / 4);
    if (!layout.wide) {
      int32_t* const rows = found + p.max_width * k;
      for (int i = threadIdx.x; i < n; i += kThreads) rows[i] = selections[i];
      selections = rows;
    }
  }
  // Small hot caches are read while the set is being made, before it is known whether the slot has one.
  constexpr bool kEarly = kItems <= 8;
  LruOrder<kItems> order;
  int32_t held[kEarly ? kItems : 1];
  if (kEarly) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int h = threadIdx.x + i * kThreads;
      held[kEarly ? i : 0] = h < p.hot_rows ? owners[h] : -1;
    }
    order.load(lru, p.hot_rows);
  }
  for (int i = threadIdx.x; i < protected_words(p.hot_rows); i += kThreads) is_protected[i] = 0;
  for (int i = threadIdx.x; i < cell_bytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(cells)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  if (threadIdx.x < HS_COUNTERS) tally[threadIdx.x] = 0;
  __syncthreads();

  // 1. Tail and ready history, in place; the rest into the set of wanted rows.
  Set wanted(cells, layout.cells, selections);
  Tally mine;
  bool waits = false;
  for (int t = 0; t < width; ++t) {
    const int visible = p.visible[query + t];
    for (int i = t * k + threadIdx.x; i < (t + 1) * k; i += kThreads) {
      const int32_t row = selections[i];
      int32_t at = -1;
      if (row >= 0 && row < visible) {
        const int page = pages.page(row);
        const int32_t device = page < p.pages ? page_map[page] : -1;
        if (device >= 0) {
          at = static_cast<int32_t>(pages.row(device, pages.line(row)));
          ++mine.direct;
        } else {
          at = -2 - wanted.insert(i, row);
          waits = true;
        }
      }
      found[i] = at;
    }
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
  const auto scan = [&](int h, int32_t row) {
    const int leader = row >= 0 ? wanted.find(row) : -1;
    if (leader < 0) return;
    if (atomicExch(found + leader, static_cast<int32_t>(hot_row(hot_table, h, pages))) >= 0) {
      ++mine.corrupt;  // two slots own the row
    } else {
      ++mine.hot;
    }
    atomicOr(is_protected + h / 32, 1u << (h % 32));
  };
  if (kEarly) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) scan(threadIdx.x + i * kThreads, live > 0 ? held[kEarly ? i : 0] : -1);
  } else {
#pragma unroll 4
    for (int h = threadIdx.x; h < live; h += kThreads) scan(h, owners[h]);
    order.load(lru, p.hot_rows);
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
      const int leader = wanted.leader(-2 - found[e]);
      if (leader == e) {
        const int page = pages.page(selections[e]);
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
  order.rank(live, is_protected, lru_counts);  // synchronises
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
  order.write(lru, taken, [&](int victim, int h) { plan.dst[victim] = h; });
  __syncthreads();
  for (int i = 0; i * 32 < span; ++i) {
    const bool miss = misses >> i & 1;
    const unsigned lanes = __ballot_sync(~0u, miss);
    const int e = warp * span + i * 32 + lane, m = rank + rank_in(lanes);
    rank += __popc(lanes);
    if (!miss) {
      if (e < n && found[e] < -1 && wanted.leader(-2 - found[e]) == e) {  // no source anywhere
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
      at = hot_row(hot_table, h, pages);
    } else {
      at = p.stage_base[r] + m - taken;
      ++mine.staged;
    }
    ++mine.host;
    plan.row[m] = row;
    plan.src[m] = pages.row(host_map[pages.page(row)], pages.line(row));
    plan.dst[m] = at;
    found[e] = static_cast<int32_t>(at);
  }
  __syncthreads();

  // 5. A location for every entry.
  const int64_t stage = p.stage_rows > 0 ? p.stage_base[r] : 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    int32_t at = found[i];
    if (at < -1) {
      at = found[wanted.leader(-2 - at)];
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

// What of a request of `entries` entries fits on chip, best first; a set is at most four fifths full.
int plan_layout(int entries, int hot_rows, size_t limit, Layout* out) {
  const size_t bits = 4 * static_cast<size_t>(protected_words(hot_rows)), found = 4 * static_cast<size_t>(entries);
  const auto cells_of = [](int64_t n) { return static_cast<int>((n + 7) / 8 * 8); };  // whole 16-byte words
  for (const bool wide : {true, false}) {
    for (const int times : {4, 2}) {
      const int cells = cells_of(static_cast<int64_t>(times) * entries);
      const size_t bytes = bits + cells * (wide ? sizeof(WideSet::Cell) : sizeof(SmallSet::Cell)) + found * (wide ? 1 : 2);
      if (bytes <= limit) {
        *out = {cells, wide, true, bytes};
        return HS_OK;
      }
    }
  }
  const int fitting = static_cast<int>((limit - bits) / sizeof(SmallSet::Cell) / 8 * 8);
  const int cells = std::min(cells_of(2LL * entries), fitting);
  if (cells * 4LL < entries * 5LL) {
    return fail(HS_BAD_ARGUMENT, "max_width * top_k: this device serves at most %d entries a request, got %d",
                cells / 5 * 4, entries);
  }
  *out = {cells, false, false, bits + cells * sizeof(SmallSet::Cell)};
  return HS_OK;
}

template <typename Set, int kItems>
int launch(const hs_resolve_params& p, const Layout& layout, cudaStream_t stream) {
  const auto kernel = resolve_kernel<Set, kItems>;
  if (layout.bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(layout.bytes));
  }
  kernel<<<p.requests + 1, kThreads, layout.bytes, stream>>>(p, layout);
  return launched("hs_resolve");
}

template <typename Set>
int launch(const hs_resolve_params& p, const Layout& layout, cudaStream_t stream) {
  if (p.hot_rows <= 4 * kThreads) return launch<Set, 4>(p, layout, stream);
  if (p.hot_rows <= 8 * kThreads) return launch<Set, 8>(p, layout, stream);
  return launch<Set, 32>(p, layout, stream);
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
  return layout.wide ? launch<WideSet>(p, layout, s) : launch<SmallSet>(p, layout, s);
}
