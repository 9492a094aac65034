// Copy-back: which staged rows become hot. One block per request; the bytes move by hs_copy_rows on the plan made here.

#include "check.h"
#include "resolve.cuh"

namespace hisparse {

int check(const hs_resolve_params& p);

namespace {

// Rows and candidates of one request in shared memory: protected slots, the last accepted query's rows as a set, and for
// each of its entries the plan entry that staged its row.
size_t promote_bytes(int hot_rows, int top_k) {
  return 4 * static_cast<size_t>((hot_rows + 63) / 64 * 2 + top_k) + 8 * static_cast<size_t>(2 * top_k);
}

template <int kItems>
__global__ void __launch_bounds__(kThreads, 1) promote_kernel(const hs_promote_params q) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ int lru_counts[2][kWarps], chosen_counts[kWarps], other_counts[kWarps];
  const hs_resolve_params& p = q.step;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = blockIdx.x, k = p.top_k, slot = p.slot_of[r], last = q.last_query[r];
  const int64_t first = static_cast<int64_t>(p.cu_queries[r]) * k;
  const int count = p.plan.count[r];
  const bool ours = slot >= 0 && slot < p.slots && last >= p.cu_queries[r] && last < p.cu_queries[r + 1];
  if (!ours || count == 0) {
    if (threadIdx.x == 0) q.promoted.count[r] = 0;
    return;
  }
  const int32_t* const selections = p.selections + static_cast<int64_t>(last) * k;
  const int32_t* const hot_table = p.hot_table + static_cast<int64_t>(slot) * p.hot_pages;
  int32_t* const owners = p.owners + static_cast<int64_t>(slot) * p.hot_rows;
  int32_t* const lru = p.lru + static_cast<int64_t>(slot) * p.hot_rows;
  const int live = hot_table[0] >= 0 ? p.hot_rows : 0;
  const hs_plan staged{p.plan.row + first, p.plan.src + first, p.plan.dst + first, nullptr};
  const hs_plan out{q.promoted.row + first, q.promoted.src + first, q.promoted.dst + first, nullptr};
  const int64_t arena = p.stage_base[r];
  const auto in_arena = [&](int v) { return staged.dst[v] >= arena && staged.dst[v] < arena + p.stage_rows; };

  const Pages pages(p.page_rows);
  const int words = (p.hot_rows + 63) / 64 * 2;
  uint32_t* const is_protected = shared;
  WideSet chosen(shared + words, 2 * k, selections);
  auto* const entry_of = reinterpret_cast<int32_t*>(chosen.cells + chosen.size);  // plan entry that staged entry e, or -1
  for (int i = threadIdx.x; i < words; i += kThreads) is_protected[i] = 0;
  for (int i = threadIdx.x; i < chosen.size; i += kThreads) chosen.cells[i] = WideSet::kEmpty;
  for (int i = threadIdx.x; i < k; i += kThreads) entry_of[i] = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < k; i += kThreads) {
    const int32_t row = selections[i];
    if (row >= 0 && row < p.visible[last]) chosen.insert(i, row);
  }
  __syncthreads();
  for (int h = threadIdx.x; h < live; h += kThreads) {
    if (owners[h] >= 0 && chosen.find(owners[h]) >= 0) atomicOr(is_protected + h / 32, 1u << (h % 32));
  }
  for (int v = threadIdx.x; v < count; v += kThreads) {
    const int e = in_arena(v) ? chosen.find(staged.row[v]) : -1;
    if (e >= 0) entry_of[e] = v;
  }
  __syncthreads();

  // Chosen ones in the query's order, then the others, latest first.
  const int chosen_span = span_of(k), other_span = span_of(count);
  const auto is_other = [&](int i) {
    const int v = count - 1 - i;
    return v >= 0 && in_arena(v) && chosen.find(staged.row[v]) < 0;
  };
  int mine[2] = {0, 0};
  for (int i = warp * chosen_span + lane; i - lane < (warp + 1) * chosen_span; i += 32) {
    mine[0] += __popc(__ballot_sync(~0u, i < k && entry_of[i] >= 0));
  }
  for (int i = warp * other_span + lane; i - lane < (warp + 1) * other_span; i += 32) {
    mine[1] += __popc(__ballot_sync(~0u, is_other(i)));
  }
  if (lane == 0) {
    chosen_counts[warp] = mine[0];
    other_counts[warp] = mine[1];
  }
  LruOrder<kItems> order;
  order.load(lru, live);
  order.rank(live, is_protected, lru_counts);  // synchronises
  int n_chosen, n_others;
  int chosen_rank = before_warp(chosen_counts, &n_chosen), other_rank = before_warp(other_counts, &n_others);
  const int taken = min(n_chosen + n_others, order.victims);
  if (threadIdx.x == 0) q.promoted.count[r] = taken;
  if (n_chosen + n_others == 0) return;
  order.write(lru, taken, [&](int victim, int h) { out.dst[victim] = h; });
  __syncthreads();
  const auto promote = [&](int rank, int v) {
    if (rank >= taken) return;
    const int h = static_cast<int>(out.dst[rank]);
    owners[h] = staged.row[v];
    out.row[rank] = staged.row[v];
    out.src[rank] = staged.dst[v];
    out.dst[rank] = hot_row(hot_table, h, pages);
  };
  for (int i = warp * chosen_span + lane; i - lane < (warp + 1) * chosen_span; i += 32) {
    const bool is = i < k && entry_of[i] >= 0;
    const unsigned lanes = __ballot_sync(~0u, is);
    if (is) promote(chosen_rank + rank_in(lanes), entry_of[i]);
    chosen_rank += __popc(lanes);
  }
  for (int i = warp * other_span + lane; i - lane < (warp + 1) * other_span; i += 32) {
    const bool is = is_other(i);
    const unsigned lanes = __ballot_sync(~0u, is);
    if (is) promote(n_chosen + other_rank + rank_in(lanes), count - 1 - i);
    other_rank += __popc(lanes);
  }
}

template <int kItems>
int launch_promote(const hs_promote_params& q, cudaStream_t stream) {
  const size_t bytes = promote_bytes(q.step.hot_rows, q.step.top_k);
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(promote_kernel<kItems>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
  promote_kernel<kItems><<<q.step.requests, kThreads, bytes, stream>>>(q);
  return launched("hs_promote");
}

}  // namespace
}  // namespace hisparse

int hs_promote(const hs_promote_params* params, hs_stream stream) {
  using namespace hisparse;
  const hs_promote_params& q = *params;
  if (const int status = check(q.step)) return status;
  HS_RANGE(q.step.stage_rows, 1, INT32_MAX);
  HS_POINTER(q.last_query, 4);
  HS_POINTER(q.promoted.row, 4);
  HS_POINTER(q.promoted.src, 8);
  HS_POINTER(q.promoted.dst, 8);
  HS_POINTER(q.promoted.count, 4);
  if (q.step.requests == 0) return HS_OK;
  const auto s = static_cast<cudaStream_t>(stream);
  if (q.step.hot_rows <= 4 * kThreads) return launch_promote<4>(q, s);
  if (q.step.hot_rows <= 8 * kThreads) return launch_promote<8>(q, s);
  return launch_promote<32>(q, s);
}
