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

__device__ __forceinline__ bool bit(const uint32_t* bits, int i) { return bits[i / 32] >> (i % 32) & 1; }

// Open-addressing set of rows. A cell holds the lowest index of its row in `rows`, kEmpty when free; there are more
// cells than rows, so every probe ends.
template <typename Cell>
struct RowSet {
  static constexpr Cell kEmpty = static_cast<Cell>(~0u);
  Cell* cells;
  int size;
  const int32_t* rows;

  __device__ int home(int32_t row) const { return __umulhi(static_cast<uint32_t>(row) * 2654435761u, size); }
  __device__ int next(int cell) const { return cell + 1 == size ? 0 : cell + 1; }

  // The cell of rows[index], which is put there first.
  __device__ int insert(int index, int32_t row) {
    for (int cell = home(row);; cell = next(cell)) {
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

  // Lowest index of the row, -1 when it is not in the set. Not while others insert.
  __device__ int find(int32_t row) const {
    for (int cell = home(row);; cell = next(cell)) {
      const Cell seen = cells[cell];
      if (seen == kEmpty) return -1;
      if (rows[seen] == row) return seen;
    }
  }
};

// Device row of hot slot h.
__device__ __forceinline__ int64_t hot_row(const int32_t* table, int h, int page_rows) {
  return static_cast<int64_t>(table[h / page_rows]) * page_rows + h % page_rows;
}

// One slot's LRU order, held in registers between reading and rewriting it: hot slots fall into victims, hits
// (protected) and broken values; the new order is broken (as -1), unused victims, used victims, hits.
template <int kItems>
struct LruOrder {
  uint16_t slot[kItems];                   // kBroken marks a value that cannot be
  int victims, hits, broken;               // of the whole slot
  int victim_rank, hit_rank, broken_rank;  // of this warp's first

  static constexpr uint16_t kBroken = 0xffff;

  // counts: shared [3][kWarps]. Synchronises the block.
  __device__ void read(const int32_t* lru, int hot_rows, const uint32_t* is_protected, int (*counts)[kWarps]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, span = span_of(hot_rows);
    int mine[3] = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int j = warp * span + i * 32 + lane;
      const bool real = i * 32 < span && j < hot_rows;
      const int32_t h = real ? lru[j] : -1;
      const bool whole = h >= 0 && h < hot_rows;
      const bool hit = whole && bit(is_protected, h);
      slot[i] = whole ? static_cast<uint16_t>(h) : kBroken;
      mine[0] += __popc(__ballot_sync(~0u, whole && !hit));
      mine[1] += __popc(__ballot_sync(~0u, hit));
      mine[2] += __popc(__ballot_sync(~0u, real && !whole));
    }
    if (lane == 0) {
      for (int c = 0; c < 3; ++c) counts[c][warp] = mine[c];
    }
    __syncthreads();
    victim_rank = before_warp(counts[0], &victims);
    hit_rank = before_warp(counts[1], &hits);
    broken_rank = before_warp(counts[2], &broken);
  }

  // Writes the new order once `taken` victims are used; take(rank, slot) is called for each of them.
  template <typename Take>
  __device__ void write(int32_t* lru, int hot_rows, const uint32_t* is_protected, int taken, Take take) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, span = span_of(hot_rows);
    int before[3] = {victim_rank, hit_rank, broken_rank};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int j = warp * span + i * 32 + lane;
      const bool real = i * 32 < span && j < hot_rows;
      const int h = slot[i];
      const bool whole = h != kBroken;
      const bool hit = whole && bit(is_protected, h);
      const unsigned victim_lanes = __ballot_sync(~0u, whole && !hit);
      const unsigned hit_lanes = __ballot_sync(~0u, hit);
      const unsigned broken_lanes = __ballot_sync(~0u, real && !whole);
      if (whole && !hit) {
        const int rank = before[0] + rank_in(victim_lanes);
        lru[broken + (rank < taken ? victims - taken + rank : rank - taken)] = h;
        if (rank < taken) take(rank, h);
      } else if (hit) {
        lru[broken + victims + before[1] + rank_in(hit_lanes)] = h;
      } else if (real) {
        lru[before[2] + rank_in(broken_lanes)] = -1;
      }
      before[0] += __popc(victim_lanes);
      before[1] += __popc(hit_lanes);
      before[2] += __popc(broken_lanes);
    }
  }
};

}  // namespace hisparse
