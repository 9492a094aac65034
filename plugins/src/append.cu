// New rows into a store, quantised on the way. One block per row.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "check.h"
#include "rows.cuh"

namespace hisparse {
namespace {

constexpr int kAppendThreads = 128;
constexpr float kFp8Max = 448.0f;
constexpr float kLeastScale = 1.17549435e-38f;  // smallest normal number: a row of zeros divides by it

template <typename T>
__device__ float value(T x) {
  return static_cast<float>(x);
}

__device__ uint8_t to_fp8(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

__device__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

template <typename T>
__global__ void __launch_bounds__(kAppendThreads) append_kernel(const hs_append_params p) {
  const int64_t at = p.destination[blockIdx.x];
  if (at < 0 || at >= p.store_rows) return;
  const T* const row = static_cast<const T*>(p.source) + static_cast<int64_t>(blockIdx.x) * p.dim;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* const store = static_cast<uint8_t*>(p.store);
  if (p.format == p.source_format) {
    T* const out = static_cast<T*>(p.store) + at * p.dim;
    for (int i = threadIdx.x; i < p.dim; i += kAppendThreads) out[i] = row[i];
  } else if (p.format == HS_FP8_DS_MLA) {
    uint8_t* const out = store + at * kMlaBytes;
    float amax = 0;  // of this warp's block
    for (int i = lane; i < kMlaBlock; i += 32) amax = fmaxf(amax, fabsf(value(row[warp * kMlaBlock + i])));
    const float scale = fmaxf(warp_max(amax) / kFp8Max, kLeastScale);
    for (int i = lane; i < kMlaBlock; i += 32) {
      out[warp * kMlaBlock + i] = to_fp8(value(row[warp * kMlaBlock + i]) / scale);
    }
    if (lane == 0) reinterpret_cast<float*>(out + kMlaLatents)[warp] = scale;
    auto* const rotary = reinterpret_cast<__nv_bfloat16*>(out + kMlaLatents + 16);
    if (threadIdx.x < kMlaRotary) rotary[threadIdx.x] = __float2bfloat16_rn(value(row[kMlaLatents + threadIdx.x]));
  } else if (p.paged_keys) {
    if (warp != 0) return;
    float amax = 0;
    for (int i = lane; i < p.dim; i += 32) amax = fmaxf(amax, fabsf(value(row[i])));
    const float least = fmaxf(warp_max(amax) / kFp8Max, kLeastScale);
    int exponent;  // the power of two at or above `least`
    const float mantissa = frexpf(least, &exponent);
    const float scale = ldexpf(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
    uint8_t* const page = store + at / p.page_rows * p.page_rows * (p.dim + 4);
    uint8_t* const out = page + at % p.page_rows * p.dim;
    for (int i = lane; i < p.dim; i += 32) out[i] = to_fp8(value(row[i]) / scale);
    if (lane == 0) reinterpret_cast<float*>(page + static_cast<int64_t>(p.page_rows) * p.dim)[at % p.page_rows] = scale;
  } else {
    uint8_t* const out = store + at * p.dim;
    for (int i = threadIdx.x; i < p.dim; i += kAppendThreads) out[i] = to_fp8(value(row[i]) / p.scale);
  }
}

}  // namespace
}  // namespace hisparse

int hs_append(const hs_append_params* params, hs_stream stream) {
  const hs_append_params& p = *params;
  HS_RANGE(p.rows, 0, INT32_MAX);
  HS_RANGE(p.dim, 1, 65536);
  HS_ONE_OF(p.source_format, "HS_F32 or HS_BF16", HS_F32, HS_BF16);
  HS_ONE_OF(p.format, "the source's format, HS_FP8 or HS_FP8_DS_MLA", p.source_format, HS_FP8, HS_FP8_DS_MLA);
  HS_RANGE(p.store_rows, 0, INT64_MAX / 65536 / 4);
  if (p.format == HS_FP8_DS_MLA) {
    HS_RANGE(p.dim, hisparse::kMlaLatents + hisparse::kMlaRotary, hisparse::kMlaLatents + hisparse::kMlaRotary);
  }
  if (p.paged_keys) {
    HS_ONE_OF(p.format, "HS_FP8 with paged_keys", HS_FP8);
    HS_RANGE(p.page_rows, 1, INT32_MAX);
    HS_RANGE(p.dim % 4, 0, 0);  // the scales behind the keys are floats
  } else if (p.format == HS_FP8 && !(p.scale > 0)) {
    return hisparse::fail(HS_BAD_ARGUMENT, "p.scale: expected a positive number, got %g", p.scale);
  }
  if (p.rows == 0) return HS_OK;
  const int item = p.source_format == HS_F32 ? 4 : 2;
  HS_POINTER(p.source, item);
  HS_POINTER(p.destination, 8);
  HS_POINTER(p.store, p.format == p.source_format ? item : p.format == HS_FP8_DS_MLA || p.paged_keys ? 4 : 1);
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.source_format == HS_F32) {
    hisparse::append_kernel<float><<<p.rows, hisparse::kAppendThreads, 0, s>>>(p);
  } else {
    hisparse::append_kernel<__nv_bfloat16><<<p.rows, hisparse::kAppendThreads, 0, s>>>(p);
  }
  return hisparse::launched("hs_append");
}
