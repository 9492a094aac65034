// What each plugin takes, gives and calls. Tables: hisparse_tables.h; everything else: hisparse.h.
//
// Plugins write state behind TensorRT's back, so an order it must keep is a tensor: a plugin that others have to wait
// for gives a `token`, and they take it.

#include <cfloat>

#include "check.h"
#include "hisparse_tables.h"
#include "plugin.h"

namespace hisparse::trt {
namespace {

constexpr Type kI8{DataType::kINT8}, kI32{DataType::kINT32}, kI64{DataType::kINT64}, kF32{DataType::kFLOAT};
const Tensor kToken{"token", kI32, 1};
constexpr double kAny = INT32_MAX;

template <typename T>
T* pointer(int64_t address) { return reinterpret_cast<T*>(address); }

int give_token(void* token, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(token, 0, sizeof(int32_t), stream);
  return error == cudaSuccess ? HS_OK : fail(HS_CUDA_ERROR, "token: %s", cudaGetErrorString(error));
}

void one_element(DimsExprs& out, IExprBuilder& builder) { out.d[0] = builder.constant(1); }

const IDimensionExpr* elements(const DimsExprs& of, IExprBuilder& builder) {
  return builder.operation(DimensionOperation::kPROD, *of.d[0], *of.d[1]);
}

// Copies rows of one store by a plan, from its host side or (copy-back) from its own arena.
int copy(const Call& call, const hs_plan& plan, const int32_t* cu_queries, int32_t requests, int32_t queries, int32_t top_k,
         const int64_t* store, int32_t row_bytes, bool from_device) {
  hs_copy_params p{};
  p.requests = requests;
  p.queries = queries;
  p.top_k = top_k;
  p.members = 1;
  p.cu_queries = cu_queries;
  p.plan = plan;
  p.src[0] = pointer<const void>(store[from_device ? HS_STORE_DEVICE : HS_STORE_HOST]);
  p.dst[0] = pointer<void>(store[HS_STORE_DEVICE]);
  p.row_bytes[0] = row_bytes;
  p.src_rows = store[from_device ? HS_STORE_DEVICE_ROWS : HS_STORE_HOST_ROWS];
  p.dst_rows = store[HS_STORE_DEVICE_ROWS];
  p.counters = pointer<int64_t>(store[HS_STORE_COUNTERS]);
  return hs_copy_rows(&p, call.stream);
}

// -- HiSparseAppend: new rows into a store ----------------------------------------------------------------------------
namespace append {
enum { kSourceFormat, kFormat, kPagedKeys, kPageRows, kScale };
const Spec spec{
    "HiSparseAppend",
    {{"source_format", HS_F32, HS_BF16},
     {"format", HS_F32, HS_FP8_DS_MLA},
     {"paged_keys", 0, 1},
     {"page_rows", 1, kAny},
     {"scale", FLT_MIN, FLT_MAX, true}},
    {{"rows", {DataType::kFLOAT, kSourceFormat}, 2}, {"destination", kI64, 1}, {"store", kI64, 1}},
    {kToken},
    [](const Values&, const DimsExprs*, DimsExprs* out, IExprBuilder& builder) { one_element(out[0], builder); },
    nullptr,
    [](const Call& call) {
      const int64_t* store;
      if (const int status = host_table(call, "store", 2, HS_STORE_SIZE, &store)) return status;
      hs_append_params p{};
      p.rows = call.dim(0, 0);
      p.dim = call.dim(0, 1);
      p.source_format = call.values[kSourceFormat].whole;
      p.format = call.values[kFormat].whole;
      p.paged_keys = call.values[kPagedKeys].whole;
      p.page_rows = call.values[kPageRows].whole;
      p.scale = call.values[kScale].real;
      p.source = call.inputs[0];
      p.destination = call.input<int64_t>(1);
      p.store = pointer<void>(store[HS_STORE_DEVICE]);
      p.store_rows = store[HS_STORE_DEVICE_ROWS];
      if (const int status = hs_append(&p, call.stream)) return status;
      return give_token(call.outputs[0], call.stream);
    }};
}  // namespace append

// -- HiSparseIndexTopK: scores and selection; waits for the append of this step's keys -----------------------------------
namespace index {
enum { kTopK, kPageRows, kQueryFormat, kKeyFormat, kScale };
enum { kQuery, kWeight, kPageTable, kCuQueries, kVisible, kStore };

hs_index_params sizes(const Values& values, const Dims& query, const Dims& table) {
  hs_index_params p{};
  p.queries = static_cast<int32_t>(query.d[0]);
  p.heads = static_cast<int32_t>(query.d[1]);
  p.dim = static_cast<int32_t>(query.d[2]);
  p.requests = static_cast<int32_t>(table.d[0]);
  p.table_pages = static_cast<int32_t>(table.d[1]);
  p.top_k = values[kTopK].whole;
  p.page_rows = values[kPageRows].whole;
  p.query_format = values[kQueryFormat].whole;
  p.key_format = values[kKeyFormat].whole;
  p.scale = values[kScale].real;
  return p;
}

const Spec spec{
    "HiSparseIndexTopK",
    {{"top_k", 1, HS_MAX_TOP_K},
     {"page_rows", 1, HS_MAX_CONTEXT},
     {"query_format", HS_F32, HS_BF16},
     {"key_format", HS_F32, HS_FP8},
     {"scale", FLT_MIN, FLT_MAX, true}},
    {{"query", {DataType::kFLOAT, kQueryFormat}, 3},
     {"weight", kF32, 2},
     {"page_table", kI32, 2},
     {"cu_queries", kI32, 1},
     {"visible", kI32, 1},
     {"store", kI64, 1},
     kToken},
    {{"selections", kI32, 2}, {"unordered", kI8, 1}},
    [](const Values& values, const DimsExprs* in, DimsExprs* out, IExprBuilder& builder) {
      out[0].d[0] = out[1].d[0] = in[kQuery].d[0];
      out[0].d[1] = builder.constant(values[kTopK].whole);
    },
    [](const Values& values, const DynamicPluginTensorDesc* in) {
      const hs_index_params p = sizes(values, in[kQuery].max, in[kPageTable].max);
      return hs_index_workspace(&p);
    },
    [](const Call& call) {
      const int64_t* store;
      if (const int status = host_table(call, "store", kStore, HS_STORE_SIZE, &store)) return status;
      hs_index_params p = sizes(call.values, call.in[kQuery].dims, call.in[kPageTable].dims);
      p.query = call.inputs[kQuery];
      p.weight = call.input<float>(kWeight);
      p.keys = pointer<const void>(store[HS_STORE_DEVICE]);
      p.key_pages = store[HS_STORE_DEVICE_ROWS] / p.page_rows;
      p.page_table = call.input<int32_t>(kPageTable);
      p.cu_queries = call.input<int32_t>(kCuQueries);
      p.visible = call.input<int32_t>(kVisible);
      p.selections = call.output<int32_t>(0);
      p.unordered = call.output<uint8_t>(1);
      p.workspace = call.workspace;
      return hs_index_top_k(&p, call.stream);
    }};
}  // namespace index

// -- HiSparseResolve: locations and plan, and the producer's own rows; waits for the append of this step's rows ----------
namespace resolve {
enum { kPageRows, kStageRows, kMaxWidth, kRowBytes };
enum { kSelections, kCuQueries, kSlotOf, kVisible, kStageBase, kState, kStore };

hs_resolve_params step(const Values& values, const Call& call, const int64_t* state) {
  hs_resolve_params p{};
  p.requests = call.dim(kSlotOf, 0);
  p.queries = call.dim(kSelections, 0);
  p.top_k = call.dim(kSelections, 1);
  p.max_width = values[kMaxWidth].whole;
  p.page_rows = values[kPageRows].whole;
  p.stage_rows = values[kStageRows].whole;
  p.slots = static_cast<int32_t>(state[HS_STATE_SLOTS]);
  p.pages = static_cast<int32_t>(state[HS_STATE_PAGES]);
  p.hot_rows = static_cast<int32_t>(state[HS_STATE_HOT_ROWS]);
  p.hot_pages = static_cast<int32_t>(state[HS_STATE_HOT_PAGES]);
  p.selections = call.input<int32_t>(kSelections);
  p.cu_queries = call.input<int32_t>(kCuQueries);
  p.slot_of = call.input<int32_t>(kSlotOf);
  p.visible = call.input<int32_t>(kVisible);
  p.stage_base = call.input<int64_t>(kStageBase);
  p.page_map = pointer<const int32_t>(state[HS_STATE_PAGE_MAP]);
  p.host_map = pointer<const int32_t>(state[HS_STATE_HOST_MAP]);
  p.hot_table = pointer<const int32_t>(state[HS_STATE_HOT_TABLE]);
  p.owners = pointer<int32_t>(state[HS_STATE_OWNERS]);
  p.lru = pointer<int32_t>(state[HS_STATE_LRU]);
  p.counters = pointer<int64_t>(state[HS_STATE_COUNTERS]);
  return p;
}

void plan_shapes(const DimsExprs* in, DimsExprs* out, IExprBuilder& builder) {
  for (int i = 0; i < 3; ++i) out[i].d[0] = elements(in[kSelections], builder);
  out[3].d[0] = in[kSlotOf].d[0];
}

hs_plan plan_of(const Call& call, int first) {
  return {call.output<int32_t>(first), call.output<int64_t>(first + 1), call.output<int64_t>(first + 2),
          call.output<int32_t>(first + 3)};
}

const std::vector<Field> fields{
    {"page_rows", 1, kAny}, {"stage_rows", 0, kAny}, {"max_width", 1, HS_MAX_WIDTH}, {"row_bytes", 1, 65536}};
const std::vector<Tensor> inputs{{"selections", kI32, 2}, {"cu_queries", kI32, 1}, {"slot_of", kI32, 1},
                                 {"visible", kI32, 1},    {"stage_base", kI64, 1}, {"state", kI64, 1},
                                 {"store", kI64, 1},      kToken};
const std::vector<Tensor> plan{
    {"plan_row", kI32, 1}, {"plan_src", kI64, 1}, {"plan_dst", kI64, 1}, {"plan_count", kI32, 1}};

std::vector<Tensor> join(std::vector<Tensor> first, const std::vector<Tensor>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

const Spec spec{
    "HiSparseResolve",
    fields,
    inputs,
    join({{"locations", kI32, 2}}, plan),
    [](const Values&, const DimsExprs* in, DimsExprs* out, IExprBuilder& builder) {
      out[0] = in[kSelections];
      plan_shapes(in, out + 1, builder);
    },
    nullptr,
    [](const Call& call) {
      const int64_t *state, *store;
      if (const int status = host_table(call, "state", kState, HS_STATE_SIZE, &state)) return status;
      if (const int status = host_table(call, "store", kStore, HS_STORE_SIZE, &store)) return status;
      hs_resolve_params p = step(call.values, call, state);
      p.locations = call.output<int32_t>(0);
      p.plan = plan_of(call, 1);
      if (const int status = hs_resolve(&p, call.stream)) return status;
      return copy(call, p.plan, p.cu_queries, p.requests, p.queries, p.top_k, store, call.values[kRowBytes].whole, false);
    }};
}  // namespace resolve

// -- HiSparseFollow: another member's rows by a plan -------------------------------------------------------------------
namespace follow {
enum { kTopK, kRowBytes, kFromDevice };
enum { kCuQueries, kSrc, kDst, kCount, kStore };
const Spec spec{
    "HiSparseFollow",
    {{"top_k", 1, HS_MAX_TOP_K}, {"row_bytes", 1, 65536}, {"from_device", 0, 1}},
    {{"cu_queries", kI32, 1}, {"plan_src", kI64, 1}, {"plan_dst", kI64, 1}, {"plan_count", kI32, 1}, {"store", kI64, 1},
     kToken},
    {kToken},
    [](const Values&, const DimsExprs*, DimsExprs* out, IExprBuilder& builder) { one_element(out[0], builder); },
    nullptr,
    [](const Call& call) {
      const int64_t* store;
      if (const int status = host_table(call, "store", kStore, HS_STORE_SIZE, &store)) return status;
      const int32_t top_k = call.values[kTopK].whole;
      const hs_plan plan{nullptr, const_cast<int64_t*>(call.input<int64_t>(kSrc)),
                         const_cast<int64_t*>(call.input<int64_t>(kDst)), const_cast<int32_t*>(call.input<int32_t>(kCount))};
      if (const int status = copy(call, plan, call.input<int32_t>(kCuQueries), call.dim(kCount, 0), call.dim(kSrc, 0) / top_k,
                                  top_k, store, call.values[kRowBytes].whole, call.values[kFromDevice].whole != 0)) {
        return status;
      }
      return give_token(call.outputs[0], call.stream);
    }};
}  // namespace follow

// -- HiSparseAttention: waits for the rows it reads ----------------------------------------------------------------------
namespace attention {
enum { kLatent, kQueryFormat, kRowFormat, kOutFormat, kScale, kRowScale };
enum { kQuery, kLocations, kStore };

hs_attention_params sizes(const Values& values, const Dims& query, const Dims& locations) {
  hs_attention_params p{};
  p.queries = static_cast<int32_t>(query.d[0]);
  p.heads = static_cast<int32_t>(query.d[1]);
  p.dim = static_cast<int32_t>(query.d[2]);
  p.top_k = static_cast<int32_t>(locations.d[1]);
  p.latent = values[kLatent].whole;
  p.query_format = values[kQueryFormat].whole;
  p.row_format = values[kRowFormat].whole;
  p.out_format = values[kOutFormat].whole;
  p.scale = values[kScale].real;
  p.row_scale = values[kRowScale].real;
  return p;
}

const Spec spec{
    "HiSparseAttention",
    {{"latent", 1, 65536},
     {"query_format", HS_F32, HS_BF16},
     {"row_format", HS_F32, HS_FP8_DS_MLA},
     {"out_format", HS_F32, HS_BF16},
     {"scale", FLT_MIN, FLT_MAX, true},
     {"row_scale", FLT_MIN, FLT_MAX, true}},
    {{"query", {DataType::kFLOAT, kQueryFormat}, 3}, {"locations", kI32, 2}, {"store", kI64, 1}, kToken},
    {{"out", {DataType::kFLOAT, kOutFormat}, 3}},
    [](const Values& values, const DimsExprs* in, DimsExprs* out, IExprBuilder& builder) {
      out[0].d[0] = in[kQuery].d[0];
      out[0].d[1] = in[kQuery].d[1];
      out[0].d[2] = builder.constant(values[kLatent].whole);
    },
    [](const Values& values, const DynamicPluginTensorDesc* in) {
      const hs_attention_params p = sizes(values, in[kQuery].max, in[kLocations].max);
      return hs_attention_workspace(&p);
    },
    [](const Call& call) {
      const int64_t* store;
      if (const int status = host_table(call, "store", kStore, HS_STORE_SIZE, &store)) return status;
      hs_attention_params p = sizes(call.values, call.in[kQuery].dims, call.in[kLocations].dims);
      p.query = call.inputs[kQuery];
      p.locations = call.input<int32_t>(kLocations);
      p.rows = pointer<const void>(store[HS_STORE_DEVICE]);
      p.store_rows = store[HS_STORE_DEVICE_ROWS];
      p.out = call.outputs[0];
      p.workspace = call.workspace;
      return hs_attention(&p, call.stream);
    }};
}  // namespace attention

// -- HiSparseCopyBack: staged rows into hot slots, once the arena's last reader is done; other members follow its plan ----
namespace copy_back {
using namespace resolve;
enum { kLastQuery = 8, kStagedRow, kStagedSrc, kStagedDst, kStagedCount };
const Spec spec{
    "HiSparseCopyBack",
    fields,
    join(join(inputs, {{"last_query", kI32, 1}}), plan),
    plan,
    [](const Values&, const DimsExprs* in, DimsExprs* out, IExprBuilder& builder) { plan_shapes(in, out, builder); },
    nullptr,
    [](const Call& call) {
      const int64_t *state, *store;
      if (const int status = host_table(call, "state", kState, HS_STATE_SIZE, &state)) return status;
      if (const int status = host_table(call, "store", kStore, HS_STORE_SIZE, &store)) return status;
      hs_promote_params q{};
      q.step = step(call.values, call, state);
      q.step.plan = {const_cast<int32_t*>(call.input<int32_t>(kStagedRow)),
                     const_cast<int64_t*>(call.input<int64_t>(kStagedSrc)),
                     const_cast<int64_t*>(call.input<int64_t>(kStagedDst)),
                     const_cast<int32_t*>(call.input<int32_t>(kStagedCount))};
      q.last_query = call.input<int32_t>(kLastQuery);
      q.promoted = plan_of(call, 0);
      if (const int status = hs_promote(&q, call.stream)) return status;
      return copy(call, q.promoted, q.step.cu_queries, q.step.requests, q.step.queries, q.step.top_k, store,
                  call.values[kRowBytes].whole, true);
    }};
}  // namespace copy_back

}  // namespace

const std::vector<const Spec*> kSpecs{&append::spec,  &index::spec,     &resolve::spec,
                                      &follow::spec, &attention::spec, &copy_back::spec};

}  // namespace hisparse::trt
