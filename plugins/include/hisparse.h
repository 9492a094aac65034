/* C ABI of the HiSparse kernels. Everything above it (torch ops, TensorRT plugins, benchmarks) calls these.
 *
 * A call checks its arguments, launches on `stream` and returns; it never allocates, never waits for the device,
 * and may be captured in a CUDA graph. Pointers are device pointers unless a comment says otherwise; arrays are
 * dense and row-major; every row offset is 64-bit. Work whose size is only known on the device (lengths, plans)
 * is bounded by the sizes in the struct, so a captured graph stays right when lengths change.
 *
 * Returns HS_OK, HS_BAD_ARGUMENT (nothing was launched; the message names the field) or HS_CUDA_ERROR.
 */
#ifndef HISPARSE_H
#define HISPARSE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define HS_VERSION 1 /* of this ABI and of the plugins' serialised fields */

#define HS_MAX_TOP_K 2048
#define HS_MAX_WIDTH 16      /* K_max: queries of one request in one call */
#define HS_MAX_HOT_ROWS 32768
#define HS_MAX_MEMBERS 8     /* payload stores one copy call serves */
#define HS_MAX_REQUESTS 1024
#define HS_MAX_CONTEXT (1 << 20)

typedef void* hs_stream; /* cudaStream_t */

enum hs_status { HS_OK = 0, HS_BAD_ARGUMENT = 1, HS_CUDA_ERROR = 2 };

/* How elements are stored. Payload rows are `latent | rotary key`; index keys are one vector.
 *
 * HS_F32, HS_BF16   plain elements.
 * HS_FP8            e4m3 elements, value = element * scale, one scale per store (GLM-5.x: 576 B a row). As index
 *                   keys: a page is [page_rows x dim e4m3][page_rows x f32 scale], scale = 2^ceil(log2(amax/448)).
 * HS_FP8_DS_MLA     512 e4m3 latents, 4 f32 scales (one per 128, amax/448), 64 bf16 rotary: 656 B (DeepSeek-V3.2).
 */
enum hs_format { HS_F32 = 0, HS_BF16 = 1, HS_FP8 = 2, HS_FP8_DS_MLA = 3 };

/* The loaded library: version, compute capabilities ("80,90"), TensorRT headers ("10.14.1") its plugins were compiled
 * with. And the message of this thread's last failed call. */
int hs_version(void);
const char* hs_architectures(void);
const char* hs_tensorrt_version(void);
const char* hs_last_error(void);

/* What a resolver call found, in int64 counters it adds to. */
enum hs_counter { HS_DIRECT, HS_HOT, HS_HOST, HS_STAGED, HS_COPIED, HS_LOST, HS_CORRUPT, HS_COUNTERS };

/* Rows to copy, made by hs_resolve and hs_promote and run by hs_copy_rows for every member.
 * Request r's part starts at cu_queries[r] * top_k; capacity of each array is queries * top_k.
 * row: logical row; src, dst: physical row in the source and in the destination store. */
typedef struct {
  int32_t* row;    /* [T * k] */
  int64_t* src;    /* [T * k] */
  int64_t* dst;    /* [T * k] */
  int32_t* count;  /* [R] */
} hs_plan;

/* One step of one cache state; contract and order as in resolver/oracle.py. */
typedef struct {
  int32_t requests;    /* R */
  int32_t queries;     /* T = cu_queries[R], at most; queries past cu_queries[R] are padding and get -1 */
  int32_t max_width;   /* no request has more queries than this */
  int32_t top_k;       /* k */
  int32_t slots;       /* N */
  int32_t pages;       /* J, logical pages of a slot */
  int32_t hot_rows;    /* B */
  int32_t hot_pages;   /* H >= ceil(B / p) */
  int32_t page_rows;   /* p */
  int32_t stage_rows;  /* rows of each request's arena; 0 = none */
  const int32_t* selections;  /* [T, k] */
  const int32_t* cu_queries;  /* [R + 1] */
  const int32_t* slot_of;     /* [R], -1 = padding: touches no state */
  const int32_t* visible;     /* [T] */
  const int32_t* page_map;    /* [N, J] device page readable in place, else -1 */
  const int32_t* host_map;    /* [N, J] host page with a complete backup, else -1 */
  const int32_t* hot_table;   /* [N, H] device pages of the hot cache; [n, 0] = -1: the slot has none */
  int32_t* owners;            /* [N, B] */
  int32_t* lru;               /* [N, B] */
  const int64_t* stage_base;  /* [R] first row of the arena; may be null when stage_rows = 0 */
  int32_t* locations;         /* [T, k] out */
  hs_plan plan;               /* out */
  int64_t* counters;          /* [HS_COUNTERS] added to */
} hs_resolve_params;
int hs_resolve(const hs_resolve_params* params, hs_stream stream);

/* Copy-back, first half: choose which staged rows become hot, and make the plan of it (src = arena rows).
 * Candidates are the plan's staged rows: those the last accepted query selected, in its order, then the others,
 * latest first. They take the oldest hot slots whose rows that query did not select; the LRU rule is hs_resolve's.
 */
typedef struct {
  hs_resolve_params step;       /* as it was given to hs_resolve; locations, counters are not touched */
  const int32_t* last_query;    /* [R] row of selections, -1 = promote nothing for the request */
  hs_plan promoted;             /* out */
} hs_promote_params;
int hs_promote(const hs_promote_params* params, hs_stream stream);

/* Copies rows of `members` stores by one plan. Sources may be pinned host memory: the kernel reads it itself. */
typedef struct {
  int32_t requests;
  int32_t queries;
  int32_t top_k;
  int32_t members;
  const int32_t* cu_queries;  /* [R + 1] */
  hs_plan plan;
  const void* src[HS_MAX_MEMBERS];   /* stores, of src_rows rows each */
  void* dst[HS_MAX_MEMBERS];         /* stores, of dst_rows rows each */
  int32_t row_bytes[HS_MAX_MEMBERS]; /* multiples of 16 are fast, others correct */
  int64_t src_rows;
  int64_t dst_rows;
  int64_t* counters; /* HS_CORRUPT counts plan entries outside the stores, which are skipped; may be null */
} hs_copy_params;
int hs_copy_rows(const hs_copy_params* params, hs_stream stream);

/* New rows into a store, quantised to its format. Rows with destination -1 are padding. */
typedef struct {
  int32_t rows;
  int32_t dim;            /* elements of a row */
  int32_t source_format;  /* HS_F32 or HS_BF16 */
  int32_t format;         /* of the store; HS_F32 and HS_BF16 must equal source_format */
  int32_t paged_keys;     /* 1: HS_FP8 in the page layout of index keys */
  int32_t page_rows;      /* used when paged_keys */
  float scale;            /* HS_FP8 payload: value = element * scale */
  const void* source;     /* [rows, dim] */
  const int64_t* destination; /* [rows] store row, -1 = none */
  void* store;
  int64_t store_rows;
} hs_append_params;
int hs_append(const hs_append_params* params, hs_stream stream);

/* Scattered chunks (pages) between any memories, by the copy engines. The arrays are host arrays, read during the
 * call. */
int hs_copy_chunks(int64_t count, void* const* dst, const void* const* src, const size_t* bytes, hs_stream stream);

/* The lightning indexer: score[t, s] = sum_h weight[t, h] * relu(query[t, h] . key[s] * scale), then each query's
 * top_k best of its `visible` first positions, by descending score, equal scores by ascending position, -1 behind.
 * HS_F32 keys: every score is the CPU op's float32 sequence of operations, bit for bit (engine/index_cpu.py).
 * A score never depends on the batch. */
typedef struct {
  int32_t requests;
  int32_t queries;
  int32_t heads;
  int32_t dim;
  int32_t top_k;
  int32_t page_rows;
  int32_t table_pages;       /* width of page_table */
  int32_t query_format;      /* HS_F32 (exact) or HS_BF16 */
  int32_t key_format;        /* HS_F32, HS_BF16 or HS_FP8 (page layout) */
  float scale;
  const void* query;         /* [T, heads, dim] */
  const float* weight;       /* [T, heads] */
  const void* keys;          /* pages of page_rows keys */
  int64_t key_pages;         /* capacity of keys */
  const int32_t* page_table; /* [R, table_pages] */
  const int32_t* cu_queries; /* [R + 1] */
  const int32_t* visible;    /* [T]; 0 = padding */
  int32_t* selections;       /* [T, top_k] out */
  uint8_t* unordered;        /* [T] out: 1 where a visible score is NaN; the selection is then all -1 */
  void* workspace;           /* hs_index_workspace bytes, 256-byte aligned */
} hs_index_params;
size_t hs_index_workspace(const hs_index_params* params); /* pointers are not looked at */
int hs_index_top_k(const hs_index_params* params, hs_stream stream);

/* Sparse MLA decode attention: out[t, h] = sum_i softmax_i(scale * query[t, h] . row[i]) row[i][:latent] over the
 * entries i of locations[t] that are not -1; zeros where there are none. The order of operations is fixed by k
 * alone, so a result depends neither on where rows lie nor on the batch. */
typedef struct {
  int32_t queries;
  int32_t heads;
  int32_t dim;               /* latent + rotary */
  int32_t latent;
  int32_t top_k;
  int32_t query_format;      /* HS_F32 or HS_BF16 */
  int32_t row_format;
  int32_t out_format;        /* HS_F32 or HS_BF16 */
  float scale;
  float row_scale;           /* HS_FP8 */
  const void* query;         /* [T, heads, dim] */
  const void* rows;          /* store */
  int64_t store_rows;
  const int32_t* locations;  /* [T, top_k] */
  void* out;                 /* [T, heads, latent] */
  void* workspace;           /* hs_attention_workspace bytes, 256-byte aligned */
} hs_attention_params;
size_t hs_attention_workspace(const hs_attention_params* params);
int hs_attention(const hs_attention_params* params, hs_stream stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
