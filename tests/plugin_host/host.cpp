// Calls a plugin library as TensorRT does: through getCreators, the capability interfaces and their descriptors. A C
// interface for ctypes. Tensors are given as concatenated dimensions; types and formats as TensorRT's numbers.

#include <NvInferRuntime.h>
#include <NvInferRuntimePlugin.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct Number final : IDimensionExpr, apiv::VDimensionExpr {
  int64_t value;
  explicit Number(int64_t v) : value(v) { mImpl = this; }
  bool isConstant() const override { return true; }
  int64_t getConstantValue() const override { return value; }
  bool isSizeTensor() const override { return false; }
};

struct Arithmetic final : IExprBuilder, apiv::VExprBuilder {
  std::vector<std::unique_ptr<Number>> made;
  Arithmetic() { mImpl = this; }
  const IDimensionExpr* constant(int64_t value) override {
    made.push_back(std::make_unique<Number>(value));
    return made.back().get();
  }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) override {
    const int64_t x = a.getConstantValue(), y = b.getConstantValue();
    return constant(op == DimensionOperation::kPROD ? x * y : op == DimensionOperation::kSUM ? x + y : -1);
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    return nullptr;
  }
};

struct Finder final : ILoggerFinder, ILogger {
  std::string last;
  ILogger* findLogger() override { return this; }
  void log(Severity, const AsciiChar* message) noexcept override { last = message; }
} finder;

std::vector<DynamicPluginTensorDesc> described(int count, const int* types, const int* ranks, const int64_t* dims) {
  std::vector<DynamicPluginTensorDesc> out(count);
  for (int i = 0; i < count; ++i) {
    PluginTensorDesc& desc = out[i].desc;
    desc.type = static_cast<DataType>(types[i]);
    desc.format = TensorFormat::kLINEAR;
    desc.dims.nbDims = ranks[i];
    for (int d = 0; d < ranks[i]; ++d) desc.dims.d[d] = *dims++;
    out[i].min = out[i].opt = out[i].max = desc.dims;
  }
  return out;
}

template <typename T>
T* as(void* plugin, PluginCapabilityType type) {
  return static_cast<T*>(static_cast<IPluginV3*>(plugin)->getCapabilityInterface(type));
}

auto* build(void* plugin) { return as<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD); }
auto* runtime(void* plugin) { return as<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME); }

}  // namespace

extern "C" {

const char* host_log() { return finder.last.c_str(); }

// The plugin, or null; names, types (PluginFieldType) and data of its fields.
void* host_create(const char* library, const char* name, int phase, int count, const char* const* names, const int* types,
                  const void* const* data) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  using Creators = IPluginCreatorInterface* const* (*)(int32_t&);
  const auto creators = reinterpret_cast<Creators>(dlsym(handle, "getCreators"));
  reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(handle, "setLoggerFinder"))(&finder);
  std::vector<PluginField> fields;
  for (int i = 0; i < count; ++i) fields.emplace_back(names[i], data[i], static_cast<PluginFieldType>(types[i]), 1);
  const PluginFieldCollection collection{count, fields.data()};
  int32_t n = 0;
  IPluginCreatorInterface* const* const all = creators(n);
  for (int i = 0; i < n; ++i) {
    auto* const creator = static_cast<IPluginCreatorV3One*>(all[i]);
    if (strcmp(creator->getPluginName(), name) == 0) {
      return creator->createPlugin("layer", &collection, static_cast<TensorRTPhase>(phase));
    }
  }
  return nullptr;
}

void host_destroy(void* plugin) { delete static_cast<IPluginV3*>(plugin); }
void* host_clone(void* plugin) { return static_cast<IPluginV3*>(plugin)->clone(); }
void* host_attach(void* plugin) { return runtime(plugin)->attachToContext(nullptr); }
int host_outputs(void* plugin) { return build(plugin)->getNbOutputs(); }
const char* host_name(void* plugin) {
  return as<IPluginV3OneCore>(plugin, PluginCapabilityType::kCORE)->getPluginName();
}

// Serialised fields; their number.
int host_fields(void* plugin, const char** names, int* types, const void** data) {
  const PluginFieldCollection& given = *runtime(plugin)->getFieldsToSerialize();
  for (int i = 0; i < given.nbFields; ++i) {
    names[i] = given.fields[i].name;
    types[i] = static_cast<int>(given.fields[i].type);
    data[i] = given.fields[i].data;
  }
  return given.nbFields;
}

int host_types(void* plugin, int inputs, int* out) {
  std::vector<DataType> types(host_outputs(plugin));
  const std::vector<DataType> in(inputs);
  const int status = build(plugin)->getOutputDataTypes(types.data(), types.size(), in.data(), inputs);
  std::transform(types.begin(), types.end(), out, [](DataType type) { return static_cast<int>(type); });
  return status;
}

// Ranks of the outputs, and their dimensions, eight places each.
int host_shapes(void* plugin, int inputs, const int* ranks, const int64_t* dims, int* out_ranks, int64_t* out_dims) {
  Arithmetic builder;
  std::vector<DimsExprs> in(inputs), out(host_outputs(plugin));
  for (int i = 0; i < inputs; ++i) {
    in[i].nbDims = ranks[i];
    for (int d = 0; d < ranks[i]; ++d) in[i].d[d] = builder.constant(*dims++);
  }
  const int status = build(plugin)->getOutputShapes(in.data(), inputs, nullptr, 0, out.data(), out.size(), builder);
  for (size_t i = 0; status == 0 && i < out.size(); ++i) {
    out_ranks[i] = out[i].nbDims;
    for (int d = 0; d < out[i].nbDims; ++d) out_dims[8 * i + d] = out[i].d[d]->getConstantValue();
  }
  return status;
}

// Whether the tensor at `at` may have `type` in `format`.
int host_supports(void* plugin, int at, int inputs, int outputs, int type, int format) {
  std::vector<DynamicPluginTensorDesc> all(inputs + outputs);
  all[at].desc.type = static_cast<DataType>(type);
  all[at].desc.format = static_cast<TensorFormat>(format);
  return build(plugin)->supportsFormatCombination(at, all.data(), inputs, outputs);
}

size_t host_workspace(void* plugin, int inputs, const int* types, const int* ranks, const int64_t* dims) {
  const auto in = described(inputs, types, ranks, dims);
  return build(plugin)->getWorkspaceSize(in.data(), inputs, nullptr, host_outputs(plugin));
}

int host_configure(void* plugin, int inputs, const int* types, const int* ranks, const int64_t* dims) {
  const auto in = described(inputs, types, ranks, dims);
  return build(plugin)->configurePlugin(in.data(), inputs, nullptr, host_outputs(plugin));
}

// onShapeChange, then enqueue.
int host_enqueue(void* plugin, int inputs, const int* types, const int* ranks, const int64_t* dims,
                 const void* const* in, void* const* out, void* workspace, void* stream) {
  std::vector<PluginTensorDesc> descs;
  for (const auto& dynamic : described(inputs, types, ranks, dims)) descs.push_back(dynamic.desc);
  const int changed = runtime(plugin)->onShapeChange(descs.data(), inputs, nullptr, host_outputs(plugin));
  if (changed != 0) return changed;
  return runtime(plugin)->enqueue(descs.data(), nullptr, in, out, workspace, static_cast<cudaStream_t>(stream));
}
}
