// The lightning indexer in two launches: a float32 score for every visible position, then each query's top k.
//
// A score is a fixed sequence of operations whatever runs beside it. With a float32 query it is the CPU op's, rounded
// product by rounded product; with a bfloat16 query the tensor cores form the dot products.

#include <algorithm>

#include "check.h"
#include "rows.cuh"

namespace hisparse {
namespace {

constexpr int kScoreThreads = 128;
constexpr int kTile = 64;        // positions a block scores at a time
constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kBins = 2048;
constexpr int kMaxIndexDim = 256, kMaxIndexHeads = 128;

// Scores of query t start at t * stride.
int64_t stride_of(const hs_index_params& p) { return static_cast<int64_t>(p.table_pages) * p.page_rows; }

// The request that owns query t; -1 behind the last one.
__device__ int request_of(const hs_index_params& p, int t) {
  if (t >= p.cu_queries[p.requests]) return -1;
  int low = 0, high = p.requests - 1;  // the last request that starts at or before t and is not empty
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.cu_queries[middle] <= t) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// A key in its page, and its scale. Null where the table names no page: such a position scores NaN.
template <int kFormat>
__device__ const uint8_t* key_at(const hs_index_params& p, const int32_t* table, int position, float* scale) {
  const int page = table[position / p.page_rows], line = position % p.page_rows;
  if (page < 0 || page >= p.key_pages) return nullptr;
  const auto* const keys = static_cast<const uint8_t*>(p.keys);
  const int bytes = row_bytes(kFormat, p.dim);
  if constexpr (kFormat == HS_FP8) {
    const uint8_t* const start = keys + static_cast<int64_t>(page) * p.page_rows * (bytes + 4);
    *scale = reinterpret_cast<const float*>(start + static_cast<int64_t>(p.page_rows) * bytes)[line];
    return start + static_cast<int64_t>(line) * bytes;
  } else {
    *scale = 1.0f;
    return keys + (static_cast<int64_t>(page) * p.page_rows + line) * bytes;
  }
}

// The CPU op's scores: a thread per position and half of the heads' turns taken four at a time.
template <int kQueryFormat, int kFormat>
__global__ void __launch_bounds__(kTile) exact_score_kernel(const hs_index_params p, float* scores, int64_t stride) {
  extern __shared__ float shared[];  // keys [dim][kTile], query [dim][4]
  float* const keys = shared;
  float* const query = shared + p.dim * kTile;
  const int t = blockIdx.y, r = request_of(p, t);
  if (r < 0) return;
  const int visible = min(static_cast<int64_t>(p.visible[t]), stride);
  const int32_t* const table = p.page_table + static_cast<int64_t>(r) * p.table_pages;
  const int bytes = row_bytes(kQueryFormat, p.dim);
  const auto* const q = static_cast<const uint8_t*>(p.query) + static_cast<int64_t>(t) * p.heads * bytes;
  for (int first = blockIdx.x * kTile; first < visible; first += gridDim.x * kTile) {
    const int position = first + threadIdx.x;
    float scale = 1.0f;
    const uint8_t* const key = position < visible ? key_at<kFormat>(p, table, position, &scale) : nullptr;
    __syncthreads();
    for (int i = 0; i < p.dim; ++i) {
      keys[i * kTile + threadIdx.x] = key != nullptr ? element<kFormat>(key, i, scale) : NAN;
    }
    float total = 0;
    for (int h = 0; h < p.heads; h += 4) {
      __syncthreads();
      for (int i = threadIdx.x; i < 4 * p.dim; i += kTile) {
        const int head = h + i % 4;
        query[i] = head < p.heads ? element<kQueryFormat>(q + head * bytes, i / 4, 1.0f) : 0.0f;
      }
      __syncthreads();
      float product[4] = {};
      for (int i = 0; i < p.dim; ++i) {
        const float x = keys[i * kTile + threadIdx.x];
        const float4 of = reinterpret_cast<const float4*>(query)[i];
        product[0] = __fadd_rn(product[0], __fmul_rn(of.x, x));
        product[1] = __fadd_rn(product[1], __fmul_rn(of.y, x));
        product[2] = __fadd_rn(product[2], __fmul_rn(of.z, x));
        product[3] = __fadd_rn(product[3], __fmul_rn(of.w, x));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (h + j >= p.heads) break;
        float value = __fmul_rn(product[j], p.scale);
        if (value < 0) value = 0;  // relu; a NaN stays
        total = __fadd_rn(total, __fmul_rn(p.weight[static_cast<int64_t>(t) * p.heads + h + j], value));
      }
    }
    if (position < visible) scores[t * stride + position] = total;
  }
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Eight consecutive elements of a key as bfloat16 pairs. e4m3 values are bfloat16 values.
template <int kFormat>
__device__ __forceinline__ uint4 eight(const uint8_t* key, int first) {
  if (key == nullptr) return make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);  // NaN
  if constexpr (kFormat == HS_BF16) {
    return *reinterpret_cast<const uint4*>(key + 2 * first);
  } else {
    const uint2 raw = *reinterpret_cast<const uint2*>(key + first);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = (i < 2 ? raw.x : raw.y) >> (i % 2 * 16);
      const __nv_bfloat162 pair =
          __floats2bfloat162_rn(from_fp8(static_cast<uint8_t>(two)), from_fp8(static_cast<uint8_t>(two >> 8)));
      pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// Tensor-core scores: a warp takes 16 positions as the rows of A and eight heads at a time as the columns of B. The order
// of elements along k is the one that lets a lane load them 16 bytes at a time, the same for A and B.
template <int kFormat, int kDim>
__global__ void __launch_bounds__(kScoreThreads) tensor_score_kernel(const hs_index_params p, float* scores,
                                                                     int64_t stride) {
  constexpr int kRow = kDim + 8;  // padded: eight heads' rows start in different banks
  extern __shared__ __align__(16) __nv_bfloat16 query[];  // [heads rounded up to 8][kRow]
  __shared__ float weight[kMaxIndexHeads];
  const int t = blockIdx.y, r = request_of(p, t);
  if (r < 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, part = lane % 4;
  const int visible = min(static_cast<int64_t>(p.visible[t]), stride);
  const int32_t* const table = p.page_table + static_cast<int64_t>(r) * p.table_pages;
  const int heads = (p.heads + 7) / 8 * 8;
  if (static_cast<int>(blockIdx.x) * kTile >= visible) return;
  const auto* const q = static_cast<const __nv_bfloat16*>(p.query) + static_cast<int64_t>(t) * p.heads * kDim;
  for (int i = threadIdx.x; i < heads * kDim; i += kScoreThreads) {
    query[i / kDim * kRow + i % kDim] = i < p.heads * kDim ? q[i] : __float2bfloat16_rn(0.0f);
  }
  for (int h = threadIdx.x; h < heads; h += kScoreThreads) {
    weight[h] = h < p.heads ? p.weight[static_cast<int64_t>(t) * p.heads + h] : 0.0f;
  }
  __syncthreads();
  for (int first = blockIdx.x * kTile; first < visible; first += gridDim.x * kTile) {
    const int low = first + warp * 16 + group, high = low + 8;
    float scale[2] = {1.0f, 1.0f}, total[2] = {};
    const uint8_t* const keys[2] = {low < visible ? key_at<kFormat>(p, table, low, &scale[0]) : nullptr,
                                    high < visible ? key_at<kFormat>(p, table, high, &scale[1]) : nullptr};
    uint4 a[kDim / 32][2];
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) {
      for (int i = 0; i < 2; ++i) a[j][i] = eight<kFormat>(keys[i], (j * 4 + part) * 8);
    }
    for (int h = 0; h < heads; h += 8) {
      float dot[4] = {};
      const __nv_bfloat16* const column = query + (h + group) * kRow;
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j) {
        const uint4 b = *reinterpret_cast<const uint4*>(column + (j * 4 + part) * 8);
        mma_bf16(dot, {a[j][0].x, a[j][1].x, a[j][0].y, a[j][1].y}, {b.x, b.y});
        mma_bf16(dot, {a[j][0].z, a[j][1].z, a[j][0].w, a[j][1].w}, {b.z, b.w});
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows low, low, high, high; heads 2 part and 2 part + 1
        float value = dot[i] * scale[i / 2] * p.scale;
        if (value < 0) value = 0;
        if (h + 2 * part + i % 2 < p.heads) total[i / 2] += weight[h + 2 * part + i % 2] * value;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] += __shfl_xor_sync(~0u, total[i], 1);
      total[i] += __shfl_xor_sync(~0u, total[i], 2);
    }
    if (part == 0 && low < visible) scores[t * stride + low] = total[0];
    if (part == 0 && high < visible) scores[t * stride + high] = total[1];
  }
}

// Unsigned order = order of scores; the two zeros are equal (a fused product that underflows can leave -0).
__device__ __forceinline__ uint32_t ordered(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Select {
  unsigned bins[kBins];
  int warps[kSelectWarps];
  unsigned long long best[HS_MAX_TOP_K];  // ~ordered score, position: ascending is the result's order
  unsigned prefix;
  int wanted, above;
};

// Narrows to the bin that holds the wanted-th best of the scores whose high bits equal the prefix.
__device__ void narrow(Select& s, const float* scores, int n, int shift, int bits) {
  const int bins = 1 << bits;
  for (int i = threadIdx.x; i < bins; i += kSelectThreads) s.bins[i] = 0;
  __syncthreads();
  const unsigned prefix = s.prefix;
  for (int i = threadIdx.x; i < n; i += kSelectThreads) {
    const uint32_t key = ordered(scores[i]);
    if (shift + bits == 32 || key >> (shift + bits) == prefix) atomicAdd(&s.bins[key >> shift & (bins - 1)], 1u);
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // from the highest bin down, a warp's worth of bins per lane
    const int each = bins / 32, high = bins - 1 - static_cast<int>(threadIdx.x) * each;
    int sum = 0;
    for (int i = 0; i < each; ++i) sum += s.bins[high - i];
    int upto = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, upto, step);
      if (threadIdx.x >= step) upto += other;
    }
    int before = upto - sum;
    const int wanted = s.wanted;
    __syncwarp();  // one lane is about to change it
    if (before < wanted && wanted <= upto) {
      int bin = high;
      while (before + static_cast<int>(s.bins[bin]) < wanted) before += s.bins[bin--];
      s.prefix = prefix << bits | bin;
      s.wanted = wanted - before;
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(const hs_index_params p, const float* all, int64_t stride) {
  extern __shared__ __align__(16) uint8_t memory[];
  Select& s = *reinterpret_cast<Select*>(memory);
  const int t = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* const scores = all + t * stride;
  int32_t* const out = p.selections + static_cast<int64_t>(t) * p.top_k;
  const int n = request_of(p, t) < 0 ? 0 : max(0, static_cast<int>(min(static_cast<int64_t>(p.visible[t]), stride)));
  bool unordered = false;
  for (int i = threadIdx.x; i < n; i += kSelectThreads) unordered |= isnan(scores[i]);
  unordered = __syncthreads_or(unordered);
  if (threadIdx.x == 0) p.unordered[t] = unordered;
  const int count = unordered ? 0 : min(n, p.top_k);
  for (int i = count + threadIdx.x; i < p.top_k; i += kSelectThreads) out[i] = -1;
  if (count == 0) return;

  uint32_t least = 0;  // the worst score taken, and how many of its equals
  int equals = count;
  if (n > p.top_k) {
    if (threadIdx.x == 0) {
      s.prefix = 0;
      s.wanted = p.top_k;
    }
    __syncthreads();
    narrow(s, scores, n, 21, 11);
    narrow(s, scores, n, 10, 11);
    narrow(s, scores, n, 0, 10);
    least = s.prefix;
    equals = s.wanted;
  }
  if (threadIdx.x == 0) s.above = 0;
  // Warps own contiguous spans, so that of equal scores the lowest positions are taken.
  const int span = (n + kSelectThreads - 1) / kSelectThreads * 32;
  int mine = 0;
  for (int i = warp * span + lane; i - lane < (warp + 1) * span; i += 32) {
    mine += __popc(__ballot_sync(~0u, i < n && ordered(scores[i]) == least));
  }
  if (lane == 0) s.warps[warp] = mine;
  __syncthreads();
  int rank = 0;
  for (int w = 0; w < warp; ++w) rank += s.warps[w];
  const int above = count - equals;
  for (int i = warp * span + lane; i - lane < (warp + 1) * span; i += 32) {
    const uint32_t key = i < n ? ordered(scores[i]) : 0;
    const bool same = i < n && n > p.top_k && key == least;
    const unsigned lanes = __ballot_sync(~0u, same);
    int at = -1;
    if (same) {
      const int of = rank + __popc(lanes & ((1u << lane) - 1));
      if (of < equals) at = above + of;
    } else if (i < n && (n <= p.top_k || key > least)) {
      at = atomicAdd(&s.above, 1);
    }
    if (at >= 0) s.best[at] = static_cast<unsigned long long>(~key) << 32 | static_cast<unsigned>(i);
    rank += __popc(lanes);
  }
  int size = 1;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kSelectThreads) s.best[i] = ~0ull;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {  // bitonic
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += kSelectThreads) {
        const int low = i / step * 2 * step + i % step, high = low + step;
        const bool ascending = (low & run) == 0;
        if ((s.best[low] > s.best[high]) == ascending) {
          const unsigned long long swapped = s.best[low];
          s.best[low] = s.best[high];
          s.best[high] = swapped;
        }
      }
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < count; i += kSelectThreads) out[i] = static_cast<int32_t>(s.best[i]);
}

// Blocks along positions: enough to fill the device with all queries, no more than the longest history needs.
dim3 score_grid(const hs_index_params& p) {
  const int64_t tiles = (stride_of(p) + kTile - 1) / kTile, fill = 132 * 8 / p.queries + 1;
  return dim3(static_cast<unsigned>(std::max<int64_t>(1, std::min(tiles, fill))), p.queries);
}

template <typename Kernel>
int launch_score(Kernel kernel, const hs_index_params& p, int threads, size_t bytes, cudaStream_t stream) {
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
  kernel<<<score_grid(p), threads, bytes, stream>>>(p, static_cast<float*>(p.workspace), stride_of(p));
  return launched("hs_index_top_k: scores");
}

template <int kQueryFormat>
int launch_exact(const hs_index_params& p, cudaStream_t stream) {
  const size_t bytes = sizeof(float) * p.dim * (kTile + 4);
  if (p.key_format == HS_F32) return launch_score(exact_score_kernel<kQueryFormat, HS_F32>, p, kTile, bytes, stream);
  if (p.key_format == HS_BF16) return launch_score(exact_score_kernel<kQueryFormat, HS_BF16>, p, kTile, bytes, stream);
  return launch_score(exact_score_kernel<kQueryFormat, HS_FP8>, p, kTile, bytes, stream);
}

int launch_scores(const hs_index_params& p, cudaStream_t stream) {
  if (p.query_format == HS_F32) return launch_exact<HS_F32>(p, stream);
  if (p.dim != 128 || p.key_format == HS_F32) return launch_exact<HS_BF16>(p, stream);
  const size_t bytes = sizeof(__nv_bfloat16) * ((p.heads + 7) / 8 * 8) * (128 + 8);
  if (p.key_format == HS_BF16) return launch_score(tensor_score_kernel<HS_BF16, 128>, p, kScoreThreads, bytes, stream);
  return launch_score(tensor_score_kernel<HS_FP8, 128>, p, kScoreThreads, bytes, stream);
}

}  // namespace
}  // namespace hisparse

size_t hs_index_workspace(const hs_index_params* params) {
  return sizeof(float) * static_cast<size_t>(params->queries) * hisparse::stride_of(*params);
}

int hs_index_top_k(const hs_index_params* params, hs_stream stream) {
  using namespace hisparse;
  const hs_index_params& p = *params;
  HS_RANGE(p.requests, 0, HS_MAX_REQUESTS);
  HS_RANGE(p.queries, 0, static_cast<int64_t>(HS_MAX_REQUESTS) * HS_MAX_WIDTH);
  HS_RANGE(p.heads, 1, kMaxIndexHeads);
  HS_RANGE(p.dim, 1, kMaxIndexDim);
  HS_RANGE(p.top_k, 1, HS_MAX_TOP_K);
  HS_RANGE(p.page_rows, 1, HS_MAX_CONTEXT);
  HS_RANGE(p.table_pages, 1, HS_MAX_CONTEXT / p.page_rows);
  HS_ONE_OF(p.query_format, "HS_F32 or HS_BF16", HS_F32, HS_BF16);
  HS_ONE_OF(p.key_format, "HS_F32, HS_BF16 or HS_FP8", HS_F32, HS_BF16, HS_FP8);
  HS_RANGE(p.key_pages, 0, INT32_MAX);
  if (p.key_format == HS_FP8) {
    HS_RANGE(p.dim % 8, 0, 0);
    HS_RANGE(p.page_rows % 2, 0, 0);  // keys are read 8 bytes at a time, and a page ends with its scales
  }
  if (p.queries == 0) return HS_OK;
  HS_POINTER(p.query, p.query_format == HS_F32 ? 4 : 16);
  HS_POINTER(p.weight, 4);
  HS_POINTER(p.keys, p.key_format == HS_F32 ? 4 : p.key_format == HS_BF16 ? 16 : 8);
  HS_POINTER(p.cu_queries, 4);
  HS_POINTER(p.visible, 4);
  HS_POINTER(p.selections, 4);
  HS_POINTER(p.unordered, 1);
  HS_POINTER(p.workspace, 256);
  if (p.requests > 0) HS_POINTER(p.page_table, 4);
  const auto s = static_cast<cudaStream_t>(stream);
  if (const int status = launch_scores(p, s)) return status;
  select_kernel<<<p.queries, kSelectThreads, sizeof(Select), s>>>(p, static_cast<const float*>(p.workspace),
                                                                  stride_of(p));
  return launched("hs_index_top_k: selection");
}
