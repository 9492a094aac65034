// What hs_resolve and hs_promote share: block-wide ordered compaction, and the LRU rule.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hisparse {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// Warp w owns the contiguous span [w * span, (w + 1) * span) of n items, a multiple of 32 long, so that ballots give
// ranks in item order.
__device__ __forceinline__ int span_of(int n) { return (n + kThreads - 1) / kThreads * 32; }

// Sum of the counts of the warps before this one, and of all; `counts` is shared [kWarps], filled and synchronised.
__device__ __forceinline__ int before_warp(const int* counts, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = counts[lane];
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  *total = __shfl_sync(~0u, sum, 31);
  return warp == 0 ? 0 : __shfl_sync(~0u, sum, warp - 1);
}

// Rank of this lane among the lanes that have `flag`.
__device__ __forceinline__ int rank_in(unsigned ballot) {
  return __popc(ballot & ((1u << (threadIdx.x % 32)) - 1));
}

// Division by a page's rows: a shift where they are a power of two, as they usually are.
struct Pages {
  int rows, shift;  // shift < 0: rows is no power of two

  __device__ explicit Pages(int page_rows) : rows(page_rows) {
    shift = (rows & (rows - 1)) == 0 ? 31 - __clz(rows) : -1;
  }
  __device__ int page(int row) const { return shift >= 0 ? row >> shift : row / rows; }
  __device__ int line(int row) const { return shift >= 0 ? row & (rows - 1) : row % rows; }
  __device__ int64_t row(int64_t page, int line) const { return page * rows + line; }
};

__device__ __forceinline__ int home_of(int32_t row, int size) {
  return __umulhi(static_cast<uint32_t>(row) * 2654435761u, size);
}

// Open-addressing sets of rows with the lowest index at which each was mentioned. There are more cells than rows, so
// every probe ends; `find` may not run while others insert.
//
// WideSet keeps row and index in a cell.
struct WideSet {
  using Cell = unsigned long long;
  static constexpr Cell kEmpty = ~0ull;
  Cell* cells;
  int size;

  __device__ WideSet(void* memory, int n, const int32_t*) : cells(static_cast<Cell*>(memory)), size(n) {}
  __device__ int leader(int cell) const { return static_cast<int>(cells[cell]); }

  // The cell of the row, which is put there first.
  __device__ int insert(int index, int32_t row) {
    const Cell mine = static_cast<Cell>(row) << 32 | static_cast<uint32_t>(index);
    for (int cell = home_of(row, size);; cell = cell + 1 == size ? 0 : cell + 1) {
      const Cell seen = atomicCAS(cells + cell, kEmpty, mine);
      if (seen == kEmpty) return cell;
      if (static_cast<int32_t>(seen >> 32) != row) continue;
      if (seen > mine) atomicMin(cells + cell, mine);
      return cell;
    }
  }

  // Lowest index of the row, -1 when it is not in the set.
  __device__ int find(int32_t row) const {
    for (int cell = home_of(row, size);; cell = cell + 1 == size ? 0 : cell + 1) {
      const Cell seen = cells[cell];
      if (static_cast<int32_t>(seen >> 32) == row) return static_cast<int>(seen);
      if (seen == kEmpty) return -1;
    }
  }
};

// SmallSet keeps the index alone, in 16 bits, and looks the row up.
struct SmallSet {
  using Cell = unsigned short;
  static constexpr Cell kEmpty = 0xffff;
  Cell* cells;
  int size;
  const int32_t* rows;

  __device__ SmallSet(void* memory, int n, const int32_t* of) : cells(static_cast<Cell*>(memory)), size(n), rows(of) {}
  __device__ int leader(int cell) const { return cells[cell]; }

  __device__ int insert(int index, int32_t row) {
    for (int cell = home_of(row, size);; cell = cell + 1 == size ? 0 : cell + 1) {
      Cell seen = atomicCAS(cells + cell, kEmpty, static_cast<Cell>(index));
      if (seen == kEmpty) return cell;
      if (rows[seen] != row) continue;
      while (seen > index) {
        const Cell now = atomicCAS(cells + cell, seen, static_cast<Cell>(index));
        if (now == seen) break;
        seen = now;
      }
      return cell;
    }
  }

  __device__ int find(int32_t row) const {
    for (int cell = home_of(row, size);; cell = cell + 1 == size ? 0 : cell + 1) {
      const Cell seen = cells[cell];
      if (seen == kEmpty) return -1;
      if (rows[seen] == row) return seen;
    }
  }
};

// Device row of hot slot h.
__device__ __forceinline__ int64_t hot_row(const int32_t* table, int h, const Pages& pages) {
  return pages.row(table[pages.page(h)], pages.line(h));
}

// One slot's LRU order, held in registers between reading and rewriting it: hot slots fall into victims and hits
// (protected); values that cannot be are broken. The new order is broken (as -1), unused victims, used victims, hits.
template <int kItems>
struct LruOrder {
  int32_t slot[kItems];
  unsigned victim_bits, hit_bits;  // bit i: this lane's i-th item is one
  int victims, hits, broken;       // of the whole slot
  int victim_rank, hit_rank;       // of this warp's first

  __device__ void load(const int32_t* lru, int hot_rows) {
    const int first = threadIdx.x / 32 * span_of(hot_rows) + threadIdx.x % 32, span = span_of(hot_rows);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int j = first + i * 32;
      slot[i] = i * 32 < span && j < hot_rows ? lru[j] : -1;
    }
  }

  // Sorts the items; counts: shared [2][kWarps]. Synchronises the block.
  __device__ void rank(int hot_rows, const uint32_t* is_protected, int (*counts)[kWarps]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int mine[2] = {0, 0};
    victim_bits = hit_bits = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int h = slot[i];
      const bool whole = h >= 0 && h < hot_rows;
      const bool hit = whole && (is_protected[h / 32] >> (h % 32) & 1);
      victim_bits |= static_cast<unsigned>(whole && !hit) << i;
      hit_bits |= static_cast<unsigned>(hit) << i;
      mine[0] += __popc(__ballot_sync(~0u, whole && !hit));
      mine[1] += __popc(__ballot_sync(~0u, hit));
    }
    if (lane == 0) {
      counts[0][warp] = mine[0];
      counts[1][warp] = mine[1];
    }
    __syncthreads();
    victim_rank = before_warp(counts[0], &victims);
    hit_rank = before_warp(counts[1], &hits);
    broken = hot_rows - victims - hits;
  }

  // Writes the new order once `taken` victims are used; take(rank, slot) is called for each of them.
  template <typename Take>
  __device__ void write(int32_t* lru, int taken, Take take) const {
    int before[2] = {victim_rank, hit_rank};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool victim = victim_bits >> i & 1, hit = hit_bits >> i & 1;
      const unsigned victim_lanes = __ballot_sync(~0u, victim), hit_lanes = __ballot_sync(~0u, hit);
      if (victim) {
        const int rank = before[0] + rank_in(victim_lanes);
        lru[broken + (rank < taken ? victims - taken + rank : rank - taken)] = slot[i];
        if (rank < taken) take(rank, slot[i]);
      } else if (hit) {
        lru[broken + victims + before[1] + rank_in(hit_lanes)] = slot[i];
      }
      before[0] += __popc(victim_lanes);
      before[1] += __popc(hit_lanes);
    }
    for (int i = threadIdx.x; i < broken; i += kThreads) lru[i] = -1;
  }
};

}  // namespace hisparse
