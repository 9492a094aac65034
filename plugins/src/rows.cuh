// Elements of stored rows as float, whatever their format. Layouts: hs_format in hisparse.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "hisparse.h"

namespace hisparse {

constexpr int kMlaLatents = 512, kMlaBlock = 128, kMlaRotary = 64, kMlaBytes = 656;  // HS_FP8_DS_MLA

__host__ __device__ inline int row_bytes(int format, int dim) {
  return format == HS_F32 ? 4 * dim : format == HS_BF16 ? 2 * dim : format == HS_FP8 ? dim : kMlaBytes;
}

__device__ __forceinline__ float from_fp8(uint8_t x) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(x, __NV_E4M3);
  return __half2float(__half(half));
}

// Element i of the row at `row`.
template <int kFormat>
__device__ __forceinline__ float element(const uint8_t* row, int i, float scale) {
  if constexpr (kFormat == HS_F32) {
    return reinterpret_cast<const float*>(row)[i];
  } else if constexpr (kFormat == HS_BF16) {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
  } else if constexpr (kFormat == HS_FP8) {
    return from_fp8(row[i]) * scale;
  } else {
    if (i >= kMlaLatents) {
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row + kMlaLatents + 16)[i - kMlaLatents]);
    }
    return from_fp8(row[i]) * reinterpret_cast<const float*>(row + kMlaLatents)[i / kMlaBlock];
  }
}

}  // namespace hisparse
