// Rows by a plan, and chunks by the copy engines.
//
// The plans of all requests are one list of rows, cut into tiles; a block takes every gridDim-th tile of every member.
// A tile's rows are cut into 16-byte pieces that neighbouring threads load together, several in flight per thread:
// reads of host memory are short of nothing but outstanding requests.

#include <algorithm>
#include <vector>

#include "check.h"

namespace hisparse {
namespace {

constexpr int kCopyThreads = 256;
constexpr int kTileRows = 16;
constexpr int kInFlight = 8;   // pieces per thread
constexpr int kMaxBlocks = 264;

// First request whose rows end after `row`; ends: shared [requests], ascending.
__device__ int request_of(const int* ends, int requests, int row) {
  int low = 0, high = requests - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <typename Piece>
__global__ void __launch_bounds__(kCopyThreads) copy_rows_kernel(const hs_copy_params p) {
  __shared__ int ends[HS_MAX_REQUESTS];
  __shared__ int64_t from[kTileRows], to[kTileRows];
  for (int r = threadIdx.x; r < p.requests; r += kCopyThreads) ends[r] = p.plan.count[r];
  __syncthreads();
  if (threadIdx.x < 32) {  // running sum, a warp at a time
    int before = 0;
    for (int r = threadIdx.x; r - static_cast<int>(threadIdx.x) < p.requests; r += 32) {
      int sum = r < p.requests ? ends[r] : 0;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (threadIdx.x >= step) sum += other;
      }
      if (r < p.requests) ends[r] = before + sum;
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
  const int total = p.requests > 0 ? ends[p.requests - 1] : 0;
  const int tiles = (total + kTileRows - 1) / kTileRows;
  for (int work = blockIdx.x; work < tiles * p.members; work += gridDim.x) {
    const int member = work / tiles, start = work % tiles * kTileRows, rows = min(kTileRows, total - start);
    if (threadIdx.x < rows) {
      const int row = start + threadIdx.x, r = request_of(ends, p.requests, row);
      const int64_t at = static_cast<int64_t>(p.cu_queries[r]) * p.top_k + row - (r > 0 ? ends[r - 1] : 0);
      const int64_t src = p.plan.src[at], dst = p.plan.dst[at];
      const bool inside = src >= 0 && src < p.src_rows && dst >= 0 && dst < p.dst_rows;
      from[threadIdx.x] = inside ? src : -1;
      to[threadIdx.x] = dst;
      if (!inside && member == 0 && p.counters != nullptr) {
        atomicAdd(reinterpret_cast<unsigned long long*>(p.counters) + HS_CORRUPT, 1ull);
      }
    }
    __syncthreads();
    const int pieces = p.row_bytes[member] / static_cast<int>(sizeof(Piece)), all = rows * pieces;
    const auto* const src = static_cast<const Piece*>(p.src[member]);
    auto* const dst = static_cast<Piece*>(p.dst[member]);
    for (int first = threadIdx.x; first < all; first += kCopyThreads * kInFlight) {
      Piece value[kInFlight];
      int64_t target[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int piece = first + i * kCopyThreads;
        target[i] = -1;
        if (piece >= all) continue;
        const int row = piece / pieces, column = piece - row * pieces;
        if (from[row] < 0) continue;
        target[i] = to[row] * pieces + column;
        value[i] = __ldcs(src + from[row] * pieces + column);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (target[i] >= 0) dst[target[i]] = value[i];
      }
    }
    __syncthreads();
  }
}

template <typename Piece>
int launch_copy(const hs_copy_params& p, cudaStream_t stream) {
  const int64_t tiles = (static_cast<int64_t>(p.queries) * p.top_k + kTileRows - 1) / kTileRows * p.members;
  const int blocks = static_cast<int>(std::min<int64_t>(tiles, kMaxBlocks));
  copy_rows_kernel<Piece><<<blocks, kCopyThreads, 0, stream>>>(p);
  return launched("hs_copy_rows");
}

}  // namespace
}  // namespace hisparse

int hs_copy_rows(const hs_copy_params* params, hs_stream stream) {
  const hs_copy_params& p = *params;
  HS_RANGE(p.requests, 0, HS_MAX_REQUESTS);
  HS_RANGE(p.queries, 0, static_cast<int64_t>(HS_MAX_REQUESTS) * HS_MAX_WIDTH);
  HS_RANGE(p.top_k, 1, HS_MAX_TOP_K);
  HS_RANGE(p.members, 1, HS_MAX_MEMBERS);
  HS_RANGE(p.src_rows, 0, INT64_MAX / 65536);
  HS_RANGE(p.dst_rows, 0, INT64_MAX / 65536);
  if (p.requests == 0 || p.queries == 0) return HS_OK;
  HS_POINTER(p.cu_queries, 4);
  HS_POINTER(p.plan.src, 8);
  HS_POINTER(p.plan.dst, 8);
  HS_POINTER(p.plan.count, 4);
  uintptr_t bits = 0;  // what rows and stores are all multiples of
  for (int m = 0; m < p.members; ++m) {
    HS_POINTER(p.src[m], 1);
    HS_POINTER(p.dst[m], 1);
    HS_RANGE(p.row_bytes[m], 1, 65536);
    bits |= reinterpret_cast<uintptr_t>(p.src[m]) | reinterpret_cast<uintptr_t>(p.dst[m]) | p.row_bytes[m];
  }
  const auto s = static_cast<cudaStream_t>(stream);
  if (bits % 16 == 0) return hisparse::launch_copy<uint4>(p, s);
  if (bits % 4 == 0) return hisparse::launch_copy<uint32_t>(p, s);
  return hisparse::launch_copy<uint8_t>(p, s);
}

int hs_copy_chunks(int64_t count, void* const* dst, const void* const* src, const size_t* bytes, hs_stream stream) {
  HS_RANGE(count, 0, INT32_MAX);
  if (count == 0) return HS_OK;
  HS_POINTER(dst, 8);
  HS_POINTER(src, 8);
  HS_POINTER(bytes, 8);
  for (int64_t i = 0; i < count; ++i) {
    HS_POINTER(dst[i], 1);
    HS_POINTER(src[i], 1);
  }
  // A legacy stream cannot take a batch.
  if (stream != nullptr && stream != cudaStreamLegacy) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t which = 0;
    const cudaError_t error = cudaMemcpyBatchAsync(dst, src, bytes, count, &attributes, &which, 1,
                                                   static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) return HS_OK;
    return hisparse::fail(HS_CUDA_ERROR, "hs_copy_chunks: %s", cudaGetErrorString(error));
  }
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t error =
        cudaMemcpyAsync(dst[i], src[i], bytes[i], cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) {
      return hisparse::fail(HS_CUDA_ERROR, "hs_copy_chunks: chunk %lld of %lld: %s", static_cast<long long>(i),
                            static_cast<long long>(count), cudaGetErrorString(error));
    }
  }
  return HS_OK;
}
