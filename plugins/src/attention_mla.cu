// Partial attention results on tensor cores, for rows of 512 latent and 64 rotary elements and bfloat16 queries.
//
// A block takes one query, one chunk of entries and 64 or 16 heads. Rows come in tiles of 32 through asynchronous copies,
// two tiles ahead; a row that is not there is zero-filled without being read. FP8 rows are widened to bfloat16 on chip.
// Per tile: scores (two halves of the 576 elements, added in one order), softmax against the running maximum, weighted
// sums in registers. A head's operations are the same for both head counts, so they may be chosen by the batch.

#include <cuda_bf16.h>

#include "attention.cuh"
#include "check.h"
#include "rows.cuh"

namespace hisparse {
namespace {

constexpr int kThreadsMla = 256;
constexpr int kLatent = 512, kDim = 576;
constexpr int kStride = kDim + 8;      // elements between rows in shared memory: eight rows start in different banks
constexpr int kRows = 32;              // entries of a tile
constexpr int kStages = 3;
constexpr int kScoreStride = kRows + 4, kWeightStride = kRows + 8;

__host__ __device__ constexpr int stored_bytes(int format) { return format == HS_BF16 ? 2 * kDim : format == HS_FP8 ? kDim : kMlaBytes; }
// A tile as it arrives: bfloat16 rows at their final stride, FP8 rows dense.
__host__ __device__ constexpr int stage_bytes(int format) { return kRows * (format == HS_BF16 ? 2 * kStride : stored_bytes(format)); }

template <int kHeads>
struct __align__(16) Shared {
  __nv_bfloat16 query[kHeads][kStride];
  float score[2][kHeads][kScoreStride];
  __nv_bfloat16 weight[kHeads][kWeightStride];
  float most[kHeads], sum[kHeads], shrink[kHeads];
  int32_t location[kMlaChunk];
};

// Dynamic shared memory: Shared, the stages, and for FP8 one widened tile.
template <int kHeads>
size_t shared_bytes(int format) {
  return sizeof(Shared<kHeads>) + kStages * stage_bytes(format) + (format == HS_BF16 ? 0 : stage_bytes(HS_BF16));
}

__device__ __forceinline__ uint32_t address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void copy_16(void* shared, const void* global, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(shared)), "l"(global), "r"(real ? 16 : 0));
}

__device__ __forceinline__ void load_4(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(shared)) : "memory");
}

__device__ __forceinline__ void load_2(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(address(shared)) : "memory");
}

__device__ __forceinline__ void load_4_transposed(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(shared)) : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t two(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// FP8 rows of a tile to bfloat16. The one scale of an HS_FP8 store is applied to scores and sums instead.
template <int kFormat>
__device__ void widen(__nv_bfloat16 (*out)[kStride], const uint8_t* stage) {
  constexpr int kLatentPieces = (kFormat == HS_FP8 ? kDim : kLatent) / 8;
  for (int i = threadIdx.x; i < kRows * kLatentPieces; i += kThreadsMla) {
    const int row = i / kLatentPieces, piece = i % kLatentPieces;
    const uint8_t* const from = stage + row * stored_bytes(kFormat);
    const uint2 raw = *reinterpret_cast<const uint2*>(from + piece * 8);
    float scale = 1.0f;
    if (kFormat == HS_FP8_DS_MLA) scale = reinterpret_cast<const float*>(from + kLatent)[piece * 8 / kMlaBlock];
    uint32_t wide[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = (j < 2 ? raw.x : raw.y) >> (j % 2 * 16);
      wide[j] = two(from_fp8(static_cast<uint8_t>(pair)) * scale, from_fp8(static_cast<uint8_t>(pair >> 8)) * scale);
    }
    *reinterpret_cast<uint4*>(&out[row][piece * 8]) = make_uint4(wide[0], wide[1], wide[2], wide[3]);
  }
  if (kFormat == HS_FP8_DS_MLA) {
    for (int i = threadIdx.x; i < kRows * kMlaRotary / 8; i += kThreadsMla) {
      const int row = i / 8, piece = i % 8;
      *reinterpret_cast<uint4*>(&out[row][kLatent + piece * 8]) =
          *reinterpret_cast<const uint4*>(stage + row * kMlaBytes + kLatent + 16 + piece * 16);
    }
  }
}

template <int kHeads, int kFormat>
__global__ void __launch_bounds__(kThreadsMla, 1) mla_kernel(const hs_attention_params p, const Partial out) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kHeads>*>(memory);
  uint8_t* const stages = memory + sizeof(Shared<kHeads>);
  auto* const widened = reinterpret_cast<__nv_bfloat16(*)[kStride]>(stages + kStages * stage_bytes(kFormat));
  const int t = blockIdx.z, chunk = blockIdx.y, head = blockIdx.x * kHeads, heads = min(kHeads, p.heads - head);
  const int start = chunk * kMlaChunk, entries = min(kMlaChunk, p.top_k - start);
  const int tiles = (entries + kRows - 1) / kRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto* const rows = static_cast<const uint8_t*>(p.rows);
  const auto* const query = static_cast<const __nv_bfloat16*>(p.query) + (static_cast<int64_t>(t) * p.heads + head) * kDim;
  const float row_scale = kFormat == HS_FP8 ? p.row_scale : 1.0f;
  const float scale = p.scale * kLog2E * row_scale;

  for (int i = threadIdx.x; i < kMlaChunk; i += kThreadsMla) {
    const int32_t at = i < entries ? p.locations[static_cast<int64_t>(t) * p.top_k + start + i] : -1;
    s.location[i] = at < p.store_rows ? at : -1;
  }
  for (int i = threadIdx.x; i < kHeads * kDim / 8; i += kThreadsMla) {
    const int h = i / (kDim / 8), piece = i % (kDim / 8);
    copy_16(&s.query[h][piece * 8], query + (h < heads ? h * kDim : 0) + piece * 8, h < heads);
  }
  for (int h = threadIdx.x; h < kHeads; h += kThreadsMla) {
    s.most[h] = -INFINITY;
    s.sum[h] = 0;
  }
  __syncthreads();
  const auto fetch = [&](int tile) {
    constexpr int kPieces = stored_bytes(kFormat) / 16;
    constexpr int kPitch = kFormat == HS_BF16 ? 2 * kStride : stored_bytes(kFormat);
    if (tile < tiles) {
      for (int i = threadIdx.x; i < kRows * kPieces; i += kThreadsMla) {
        const int row = i / kPieces, piece = i % kPieces;
        const int32_t at = s.location[tile * kRows + row];
        copy_16(stages + tile % kStages * stage_bytes(kFormat) + row * kPitch + piece * 16,
                rows + (at < 0 ? 0 : static_cast<int64_t>(at) * stored_bytes(kFormat)) + piece * 16, at >= 0);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  for (int tile = 0; tile < kStages - 1; ++tile) fetch(tile);

  // Scores: warps halve the 576 elements and share heads (64) or entries (16). Sums: heads and latents, or latents.
  constexpr bool kMany = kHeads == 64;
  constexpr int kScoreTiles = kMany ? 4 : 1, kSumTiles = kMany ? 32 : 8;
  const int half = warp / 4, first_head = kMany ? warp % 4 * 16 : 0, first_entry = kMany ? 0 : warp % 4 * 8;
  const int first_latent = kMany ? half * 256 : warp * 64;
  float sums[kSumTiles][4] = {};

  for (int tile = 0; tile < tiles; ++tile) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncthreads();
    fetch(tile + kStages - 1);
    const uint8_t* const stage = stages + tile % kStages * stage_bytes(kFormat);
    const auto* row = reinterpret_cast<const __nv_bfloat16(*)[kStride]>(stage);
    if constexpr (kFormat != HS_BF16) {
      widen<kFormat>(widened, stage);
      row = widened;
      __syncthreads();
    }

    float scores[kScoreTiles][4] = {};
#pragma unroll 6
    for (int step = 0; step < kDim / 32; ++step) {
      const int d = half * (kDim / 2) + step * 16;
      uint32_t a[4], b[4];
      load_4(a, &s.query[first_head + lane % 16][d + lane / 16 * 8]);
      if constexpr (kMany) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; n += 2) {
          load_4(b, &row[n * 8 + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]);
          mma(scores[n], a, b[0], b[1]);
          mma(scores[n + 1], a, b[2], b[3]);
        }
      } else {
        load_2(b, &row[first_entry + lane % 8][d + lane / 8 % 2 * 8]);
        mma(scores[0], a, b[0], b[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const int column = first_entry + n * 8 + lane % 4 * 2, h = first_head + lane / 4;
      *reinterpret_cast<float2*>(&s.score[half][h][column]) = make_float2(scores[n][0], scores[n][1]);
      *reinterpret_cast<float2*>(&s.score[half][h + 8][column]) = make_float2(scores[n][2], scores[n][3]);
    }
    __syncthreads();

    // Four threads per head, eight entries each.
    const int h = threadIdx.x / 4, part = threadIdx.x % 4;
    if (h < kHeads) {
      float x[8], most = -INFINITY;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int entry = part * 8 + i;
        x[i] = (s.score[0][h][entry] + s.score[1][h][entry]) * scale;
        if (s.location[tile * kRows + entry] < 0) x[i] = -INFINITY;
        most = fmaxf(most, x[i]);
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float before = s.most[h], now = fmaxf(before, most), base = now == -INFINITY ? 0.0f : now;
      const float shrink = before == -INFINITY ? 0.0f : exp2f(before - base);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const __nv_bfloat16 weight = __float2bfloat16_rn(exp2f(x[i] - base));
        s.weight[h][part * 8 + i] = weight;
        sum += __bfloat162float(weight);
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      __syncwarp();
      if (part == 0) {
        s.most[h] = now;
        s.shrink[h] = shrink;
        s.sum[h] = s.sum[h] * shrink + sum;
      }
    }
    __syncthreads();

    const float shrink[2] = {s.shrink[first_head + lane / 4], s.shrink[first_head + lane / 4 + 8]};
#pragma unroll
    for (int n = 0; n < kSumTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] *= shrink[i / 2];
    }
#pragma unroll
    for (int step = 0; step < kRows; step += 16) {
      uint32_t a[4], b[4];
      load_4(a, &s.weight[first_head + lane % 16][step + lane / 16 * 8]);
#pragma unroll
      for (int n = 0; n < kSumTiles; n += 2) {
        load_4_transposed(b, &row[step + lane % 16][first_latent + n * 8 + lane / 16 * 8]);
        mma(sums[n], a, b[0], b[1]);
        mma(sums[n + 1], a, b[2], b[3]);
      }
    }
  }

  __syncthreads();
  const int64_t item = (static_cast<int64_t>(t) * gridDim.y + chunk) * p.heads + head;
  for (int h = threadIdx.x; h < heads; h += kThreadsMla) out.softmax[item + h] = make_float2(s.most[h], s.sum[h]);
#pragma unroll
  for (int n = 0; n < kSumTiles; ++n) {
    const int column = first_latent + n * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int h = first_head + lane / 4 + 8 * i;
      if (h >= heads) continue;
      *reinterpret_cast<float2*>(out.sum + (item + h) * kLatent + column) =
          make_float2(sums[n][2 * i] * row_scale, sums[n][2 * i + 1] * row_scale);
    }
  }
}

template <int kHeads, int kFormat>
int launch(const hs_attention_params& p, cudaStream_t stream) {
  const size_t bytes = shared_bytes<kHeads>(kFormat);
  const auto kernel = mla_kernel<kHeads, kFormat>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  const dim3 grid((p.heads + kHeads - 1) / kHeads, chunks_of(p), p.queries);
  kernel<<<grid, kThreadsMla, bytes, stream>>>(p, partial_of(p));
  return launched("hs_attention");
}

template <int kHeads>
int launch(const hs_attention_params& p, cudaStream_t stream) {
  if (p.row_format == HS_BF16) return launch<kHeads, HS_BF16>(p, stream);
  if (p.row_format == HS_FP8) return launch<kHeads, HS_FP8>(p, stream);
  return launch<kHeads, HS_FP8_DS_MLA>(p, stream);
}

constexpr int kFewBlocks = 132;  // below one block per multiprocessor, more blocks of fewer heads are faster

}  // namespace

bool fits_mla(const hs_attention_params& p) {
  size_t limit;
  return p.dim == kDim && p.latent == kLatent && p.query_format == HS_BF16 && p.row_format != HS_F32 &&
         shared_memory_limit(&limit) == HS_OK && shared_bytes<16>(p.row_format) <= limit;
}

int launch_mla(const hs_attention_params& p, cudaStream_t stream) {
  size_t limit;
  if (const int status = shared_memory_limit(&limit)) return status;
  const int64_t blocks = static_cast<int64_t>((p.heads + 63) / 64) * chunks_of(p) * p.queries;
  const bool many = p.heads > 16 && blocks >= kFewBlocks && shared_bytes<64>(p.row_format) <= limit;
  return many ? launch<64>(p, stream) : launch<16>(p, stream);
}

}  // namespace hisparse
