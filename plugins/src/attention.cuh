// What the two ways of computing partial attention results share.
#pragma once

#include <cuda_runtime.h>

#include "hisparse.h"

namespace hisparse {

constexpr int kPlainChunk = 256, kMlaChunk = 512;  // entries of one partial result
constexpr float kLog2E = 1.4426950408889634f;

// Workspace: [T, chunks, H] of (maximum score, sum of weights), then [T, chunks, H, latent] of weighted sums.
struct Partial {
  float2* softmax;
  float* sum;
};

int chunks_of(const hs_attention_params& p);
Partial partial_of(const hs_attention_params& p);

// Whether the tensor-core kernel serves these sizes and formats on the current device.
bool fits_mla(const hs_attention_params& p);
int launch_mla(const hs_attention_params& p, cudaStream_t stream);

}  // namespace hisparse
