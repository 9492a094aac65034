// Sparse MLA decode attention in two launches: partial results of fixed chunks of entries, then their merge in order.
//
// The chunks depend on k and the formats, never on the batch, so a query's result is the same bits whatever runs beside
// it. Entries of -1 are not weighted with zero but never read: their row may hold anything. Softmax is in base 2.
//
// Here: any sizes, float32 arithmetic, and the merge. attention_mla.cu: the sizes of released models on tensor cores.

#include "attention.cuh"

#include "check.h"
#include "rows.cuh"

namespace hisparse {
namespace {

constexpr int kHeads = 8;        // heads a block serves
constexpr int kAttentionThreads = 128;
constexpr int kMaxDim = 1024;

template <int kQueryFormat, int kRowFormat>
__global__ void __launch_bounds__(kAttentionThreads) partial_kernel(const hs_attention_params p, const Partial out) {
  __shared__ int32_t location[kPlainChunk];
  __shared__ float score[kHeads][kPlainChunk];
  extern __shared__ float query[];  // [kHeads][dim]
  const int t = blockIdx.z, chunk = blockIdx.y, head = blockIdx.x * kHeads, heads = min(kHeads, p.heads - head);
  const int start = chunk * kPlainChunk, entries = min(kPlainChunk, p.top_k - start);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int bytes = row_bytes(kRowFormat, p.dim), query_bytes = row_bytes(kQueryFormat, p.dim);
  const auto* const rows = static_cast<const uint8_t*>(p.rows);
  const auto* const q = static_cast<const uint8_t*>(p.query) + (static_cast<int64_t>(t) * p.heads + head) * query_bytes;

  for (int i = threadIdx.x; i < entries; i += kAttentionThreads) {
    const int32_t at = p.locations[static_cast<int64_t>(t) * p.top_k + start + i];
    location[i] = at < p.store_rows ? at : -1;
  }
  for (int i = threadIdx.x; i < heads * p.dim; i += kAttentionThreads) {
    query[i] = element<kQueryFormat>(q + i / p.dim * query_bytes, i % p.dim, 1.0f);
  }
  __syncthreads();

  // Scores: a warp per entry, its lanes along the row.
  for (int i = warp; i < entries; i += kAttentionThreads / 32) {
    if (location[i] < 0) continue;
    const uint8_t* const row = rows + static_cast<int64_t>(location[i]) * bytes;
    float dot[kHeads] = {};
    for (int d = lane; d < p.dim; d += 32) {
      const float x = element<kRowFormat>(row, d, p.row_scale);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h < heads) dot[h] += x * query[h * p.dim + d];
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      for (int step = 16; step > 0; step /= 2) dot[h] += __shfl_xor_sync(~0u, dot[h], step);
      if (lane == h && h < heads) score[h][i] = dot[h] * (p.scale * kLog2E);
    }
  }
  __syncthreads();

  // Softmax of the chunk: a warp per head.
  for (int h = warp; h < heads; h += kAttentionThreads / 32) {
    float most = -INFINITY, sum = 0;
    for (int i = lane; i < entries; i += 32) {
      if (location[i] >= 0) most = fmaxf(most, score[h][i]);
    }
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    for (int i = lane; i < entries; i += 32) {
      const float weight = location[i] >= 0 ? exp2f(score[h][i] - most) : 0.0f;
      score[h][i] = weight;
      sum += weight;
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const int64_t item = (static_cast<int64_t>(t) * gridDim.y + chunk) * p.heads + head + h;
    if (lane == 0) out.softmax[item] = make_float2(most, sum);
  }
  __syncthreads();

  // Weighted sums: a thread per latent element, entries in order.
  for (int d = threadIdx.x; d < p.latent; d += kAttentionThreads) {
    float sum[kHeads] = {};
#pragma unroll 4
    for (int i = 0; i < entries; ++i) {
      if (location[i] < 0) continue;
      const float x = element<kRowFormat>(rows + static_cast<int64_t>(location[i]) * bytes, d, p.row_scale);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) sum[h] += score[h][i] * x;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int64_t item = (static_cast<int64_t>(t) * gridDim.y + chunk) * p.heads + head + h;
      if (h < heads) out.sum[item * p.latent + d] = sum[h];
    }
  }
}

__global__ void __launch_bounds__(kAttentionThreads) merge_kernel(const hs_attention_params p, const Partial in,
                                                                  const int chunks) {
  const int h = blockIdx.x, t = blockIdx.y;
  float most = -INFINITY, sum = 0;
  for (int c = 0; c < chunks; ++c) {
    most = fmaxf(most, in.softmax[(static_cast<int64_t>(t) * chunks + c) * p.heads + h].x);
  }
  for (int c = 0; c < chunks; ++c) {
    const float2 part = in.softmax[(static_cast<int64_t>(t) * chunks + c) * p.heads + h];
    if (part.y > 0) sum += part.y * exp2f(part.x - most);
  }
  const int64_t row = (static_cast<int64_t>(t) * p.heads + h) * p.latent;
  for (int d = threadIdx.x; d < p.latent; d += kAttentionThreads) {
    float value = 0;
    for (int c = 0; c < chunks; ++c) {
      const int64_t item = (static_cast<int64_t>(t) * chunks + c) * p.heads + h;
      const float2 part = in.softmax[item];
      // A chunk that holds nothing, or all of whose weights vanished, says nothing.
      if (part.y > 0) value += in.sum[item * p.latent + d] * exp2f(part.x - most);
      if (isnan(part.y)) value = part.y;
    }
    value = sum == 0 ? value : value / sum;
    if (p.out_format == HS_F32) {
      static_cast<float*>(p.out)[row + d] = value;
    } else {
      static_cast<__nv_bfloat16*>(p.out)[row + d] = __float2bfloat16_rn(value);
    }
  }
}

template <int kQueryFormat, int kRowFormat>
int launch(const hs_attention_params& p, cudaStream_t stream) {
  const dim3 grid((p.heads + kHeads - 1) / kHeads, chunks_of(p), p.queries);
  partial_kernel<kQueryFormat, kRowFormat>
      <<<grid, kAttentionThreads, kHeads * p.dim * sizeof(float), stream>>>(p, partial_of(p));
  return launched("hs_attention");
}

template <int kQueryFormat>
int launch(const hs_attention_params& p, cudaStream_t stream) {
  switch (p.row_format) {
    case HS_F32: return launch<kQueryFormat, HS_F32>(p, stream);
    case HS_BF16: return launch<kQueryFormat, HS_BF16>(p, stream);
    case HS_FP8: return launch<kQueryFormat, HS_FP8>(p, stream);
    default: return launch<kQueryFormat, HS_FP8_DS_MLA>(p, stream);
  }
}

}  // namespace

int chunks_of(const hs_attention_params& p) {
  const int chunk = fits_mla(p) ? kMlaChunk : kPlainChunk;
  return (p.top_k + chunk - 1) / chunk;
}

Partial partial_of(const hs_attention_params& p) {
  auto* const softmax = static_cast<float2*>(p.workspace);
  const int64_t items = static_cast<int64_t>(p.queries) * chunks_of(p) * p.heads;
  return {softmax, reinterpret_cast<float*>(softmax + items)};
}

}  // namespace hisparse

size_t hs_attention_workspace(const hs_attention_params* params) {
  const hs_attention_params& p = *params;
  const size_t items = static_cast<size_t>(p.queries) * hisparse::chunks_of(p) * p.heads;
  return items * (sizeof(float2) + sizeof(float) * p.latent);
}

int hs_attention(const hs_attention_params* params, hs_stream stream) {
  using namespace hisparse;
  const hs_attention_params& p = *params;
  HS_RANGE(p.queries, 0, 65535);
  HS_RANGE(p.heads, 1, 1024);
  HS_RANGE(p.dim, 1, kMaxDim);
  HS_RANGE(p.latent, 1, p.dim);
  HS_RANGE(p.top_k, 1, HS_MAX_TOP_K);
  HS_ONE_OF(p.query_format, "HS_F32 or HS_BF16", HS_F32, HS_BF16);
  HS_ONE_OF(p.row_format, "an hs_format", HS_F32, HS_BF16, HS_FP8, HS_FP8_DS_MLA);
  HS_ONE_OF(p.out_format, "HS_F32 or HS_BF16", HS_F32, HS_BF16);
  if (p.row_format == HS_FP8_DS_MLA) {
    HS_RANGE(p.dim, kMlaLatents + kMlaRotary, kMlaLatents + kMlaRotary);
    HS_RANGE(p.latent, kMlaLatents, kMlaLatents);
  }
  HS_RANGE(p.store_rows, 0, INT64_MAX / 65536);
  if (p.queries == 0) return HS_OK;
  const bool wide = fits_mla(p);  // rows and queries are read 16 bytes at a time
  HS_POINTER(p.query, wide ? 16 : p.query_format == HS_F32 ? 4 : 2);
  HS_POINTER(p.rows, wide ? 16 : p.row_format == HS_F32 || p.row_format == HS_FP8_DS_MLA ? 4 : p.row_format == HS_BF16 ? 2 : 1);
  HS_POINTER(p.locations, 4);
  HS_POINTER(p.out, p.out_format == HS_F32 ? 4 : 2);
  HS_POINTER(p.workspace, 256);
  const auto s = static_cast<cudaStream_t>(stream);
  const int status = fits_mla(p) ? launch_mla(p, s) : p.query_format == HS_F32 ? launch<HS_F32>(p, s) : launch<HS_BF16>(p, s);
  if (status) return status;
  merge_kernel<<<dim3(p.heads, p.queries), kAttentionThreads, 0, s>>>(p, partial_of(p), chunks_of(p));
  return launched("hs_attention: merge");
}
