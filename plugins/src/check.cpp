#include "check.h"

#include <cstdarg>
#include <cstdio>

namespace {
thread_local char message[512] = "";
}

namespace hisparse {

int fail(hs_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return status;
}

int shared_memory_limit(size_t* bytes) {
  int device = 0, limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return fail(HS_CUDA_ERROR, "shared memory limit: %s", cudaGetErrorString(error));
  *bytes = limit;
  return HS_OK;
}

int launched(const char* call) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return HS_OK;
  return fail(HS_CUDA_ERROR, "%s: %s", call, cudaGetErrorString(error));
}

}  // namespace hisparse

int hs_version(void) { return HS_VERSION; }

const char* hs_architectures(void) { return HISPARSE_ARCHITECTURES; }

const char* hs_last_error(void) { return message; }
