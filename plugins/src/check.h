// Argument checks of the C ABI: the first thing that is wrong is named, with what was expected and what came.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "hisparse.h"

namespace hisparse {

// Records a message for hs_last_error and returns `status`. printf-style.
int fail(hs_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Dynamic shared memory one block may have on the current device.
int shared_memory_limit(size_t* bytes);

// HS_OK, or the failure of the launch that just happened in `call`.
int launched(const char* call);

}  // namespace hisparse

// These return from the enclosing function.
#define HS_RANGE(field, low, high)                                                                              \
  do {                                                                                                          \
    if (static_cast<int64_t>(field) < static_cast<int64_t>(low) ||                                              \
        static_cast<int64_t>(field) > static_cast<int64_t>(high))                                               \
      return hisparse::fail(HS_BAD_ARGUMENT, "%s: expected %lld..%lld, got %lld", #field,                       \
                            static_cast<long long>(low), static_cast<long long>(high),                         \
                            static_cast<long long>(field));                                                    \
  } while (0)

#define HS_POINTER(field, alignment)                                                                            \
  do {                                                                                                          \
    if ((field) == nullptr) return hisparse::fail(HS_BAD_ARGUMENT, "%s: expected a pointer, got null", #field);  \
    if (reinterpret_cast<uintptr_t>(field) % (alignment) != 0)                                                  \
      return hisparse::fail(HS_BAD_ARGUMENT, "%s: expected %d-byte alignment, got %p", #field,                  \
                            static_cast<int>(alignment), static_cast<const void*>(field));                      \
  } while (0)

#define HS_ONE_OF(field, what, ...)                                                                             \
  do {                                                                                                          \
    bool found = false;                                                                                         \
    for (int allowed : std::initializer_list<int>{__VA_ARGS__}) found |= (field) == allowed; \
    if (!found) return hisparse::fail(HS_BAD_ARGUMENT, "%s: expected %s, got %d", #field, what, (int)(field));   \
  } while (0)
