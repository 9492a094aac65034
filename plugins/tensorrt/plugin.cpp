#include "plugin.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "check.h"

namespace hisparse::trt {
namespace {

constexpr char kAbiVersion[] = "abi_version";

std::mutex finder_lock;
ILoggerFinder* finder = nullptr;

PluginFieldType type_of(const Field& field) { return field.real ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32; }

bool refuse(const char* plugin, const std::string& reason) {
  fail(HS_BAD_ARGUMENT, "%s: %s", plugin, reason.c_str());
  log_error(hs_last_error());
  return false;
}

std::string number(double value) {
  char text[32];
  snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

void set_logger_finder(ILoggerFinder* given) {
  const std::lock_guard<std::mutex> lock(finder_lock);
  finder = given;
}

void log_error(const std::string& message) {
  const std::lock_guard<std::mutex> lock(finder_lock);
  ILogger* const logger = finder != nullptr ? finder->findLogger() : nullptr;
  if (logger != nullptr) {
    logger->log(ILogger::Severity::kERROR, message.c_str());
  } else {
    fprintf(stderr, "trtllm_hisparse: %s\n", message.c_str());
  }
}

DataType Type::of(const Values& values) const {
  if (field < 0) return fixed;
  return values[field].whole == HS_BF16 ? DataType::kBF16 : DataType::kFLOAT;
}

int host_table(const Call& call, const char* name, int input, int size, const int64_t** table) {
  if (call.dim(input, 0) != size) {
    return fail(HS_BAD_ARGUMENT, "%s: expected a table of %d entries, got %d", name, size, call.dim(input, 0));
  }
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, call.inputs[input]);
  if (error != cudaSuccess) return fail(HS_CUDA_ERROR, "%s: %s", name, cudaGetErrorString(error));
  if (attributes.type == cudaMemoryTypeDevice) {
    return fail(HS_BAD_ARGUMENT, "%s: expected a table in pinned host memory, got device memory at %p", name,
                call.inputs[input]);
  }
  *table = call.input<int64_t>(input);
  return HS_OK;
}

bool parse(const Spec& spec, const PluginFieldCollection& given, Values* values) {
  values->assign(spec.fields.size(), Value{});
  std::vector<bool> seen(spec.fields.size(), false);
  bool versioned = false;
  for (int32_t i = 0; i < given.nbFields; ++i) {
    const PluginField& field = given.fields[i];
    const std::string name = field.name != nullptr ? field.name : "(null)";
    if (field.data == nullptr || field.length < 1) return refuse(spec.name, name + ": expected one value, got none");
    if (name == kAbiVersion) {
      if (field.type != PluginFieldType::kINT32) return refuse(spec.name, name + ": expected INT32");
      const int32_t version = *static_cast<const int32_t*>(field.data);
      if (version != HS_VERSION) {
        return refuse(spec.name, name + ": expected " + std::to_string(HS_VERSION) + ", got " + std::to_string(version) +
                                     "; build the engine again");
      }
      versioned = true;
      continue;
    }
    size_t at = 0;
    while (at < spec.fields.size() && name != spec.fields[at].name) ++at;
    if (at == spec.fields.size()) return refuse(spec.name, name + ": no such field");
    const Field& wanted = spec.fields[at];
    if (field.type != type_of(wanted)) {
      return refuse(spec.name, name + ": expected " + (wanted.real ? "FLOAT32" : "INT32") + ", got field type " +
                                   std::to_string(static_cast<int>(field.type)));
    }
    Value& value = (*values)[at];
    memcpy(&value, field.data, sizeof value);
    const double is = wanted.real ? value.real : value.whole;
    if (!(is >= wanted.low && is <= wanted.high)) {
      return refuse(spec.name, name + ": expected " + number(wanted.low) + ".." + number(wanted.high) + ", got " + number(is));
    }
    seen[at] = true;
  }
  if (!versioned) return refuse(spec.name, std::string(kAbiVersion) + ": missing");
  for (size_t i = 0; i < seen.size(); ++i) {
    if (!seen[i]) return refuse(spec.name, std::string(spec.fields[i].name) + ": missing");
  }
  return true;
}

// -- Plugin ---------------------------------------------------------------------------------------------------------
Plugin::Plugin(const Spec& spec, Values values) : spec_(spec), values_(std::move(values)) {
  serialised_.emplace_back(kAbiVersion, &abi_version_, PluginFieldType::kINT32, 1);
  for (size_t i = 0; i < spec_.fields.size(); ++i) {
    serialised_.emplace_back(spec_.fields[i].name, &values_[i], type_of(spec_.fields[i]), 1);
  }
  collection_ = {static_cast<int32_t>(serialised_.size()), serialised_.data()};
}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

IPluginV3* Plugin::clone() noexcept { return new (std::nothrow) Plugin(spec_, values_); }

// The clone shares nothing with this one; the plugins keep no state between calls.
IPluginV3* Plugin::attachToContext(IPluginResourceContext*) noexcept { return clone(); }

bool Plugin::count_is(int32_t inputs, int32_t outputs) const {
  if (inputs == static_cast<int32_t>(spec_.inputs.size()) && outputs == getNbOutputs()) return true;
  return refuse(spec_.name, "expected " + std::to_string(spec_.inputs.size()) + " inputs and " +
                                std::to_string(getNbOutputs()) + " outputs, got " + std::to_string(inputs) + " and " +
                                std::to_string(outputs));
}

int32_t Plugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const*,
                                int32_t outputs) noexcept {
  if (!count_is(inputs, outputs)) return 1;
  for (int32_t i = 0; i < inputs; ++i) {
    if (in[i].desc.dims.nbDims == spec_.inputs[i].rank) continue;
    refuse(spec_.name, std::string(spec_.inputs[i].name) + ": expected " + std::to_string(spec_.inputs[i].rank) +
                           " dimensions, got " + std::to_string(in[i].desc.dims.nbDims));
    return 1;
  }
  return 0;
}

int32_t Plugin::getOutputDataTypes(DataType* types, int32_t outputs, DataType const*, int32_t inputs) const noexcept {
  if (!count_is(inputs, outputs)) return 1;
  for (int32_t i = 0; i < outputs; ++i) types[i] = spec_.outputs[i].type.of(values_);
  return 0;
}

int32_t Plugin::getOutputShapes(DimsExprs const* in, int32_t inputs, DimsExprs const*, int32_t, DimsExprs* out,
                                int32_t outputs, IExprBuilder& builder) noexcept {
  if (!count_is(inputs, outputs)) return 1;
  for (int32_t i = 0; i < outputs; ++i) out[i].nbDims = spec_.outputs[i].rank;
  spec_.shapes(values_, in, out, builder);
  return 0;
}

bool Plugin::supportsFormatCombination(int32_t at, DynamicPluginTensorDesc const* tensors, int32_t inputs,
                                       int32_t outputs) noexcept {
  if (!count_is(inputs, outputs) || at < 0 || at >= inputs + outputs) return false;
  const Tensor& wanted = at < inputs ? spec_.inputs[at] : spec_.outputs[at - inputs];
  return tensors[at].desc.format == TensorFormat::kLINEAR && tensors[at].desc.type == wanted.type.of(values_);
}

size_t Plugin::getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const*,
                                int32_t outputs) const noexcept {
  return spec_.workspace == nullptr || !count_is(inputs, outputs) ? 0 : spec_.workspace(values_, in);
}

int32_t Plugin::onShapeChange(PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const*,
                              int32_t outputs) noexcept {
  if (!count_is(inputs, outputs)) return 1;
  for (int32_t i = 0; i < inputs; ++i) {
    if (in[i].dims.nbDims == spec_.inputs[i].rank && in[i].type == spec_.inputs[i].type.of(values_)) continue;
    refuse(spec_.name, std::string(spec_.inputs[i].name) + ": type or number of dimensions is not what was built");
    return 1;
  }
  return 0;
}

int32_t Plugin::enqueue(PluginTensorDesc const* in, PluginTensorDesc const*, void const* const* inputs,
                        void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  const int status = spec_.run({values_, in, inputs, outputs, workspace, stream});
  if (status != HS_OK) log_error(std::string(spec_.name) + ": " + hs_last_error());
  return status;
}

// -- Creator --------------------------------------------------------------------------------------------------------
Creator::Creator(const Spec& spec) : spec_(spec) {
  names_.emplace_back(kAbiVersion, nullptr, PluginFieldType::kINT32, 1);
  for (const Field& field : spec_.fields) names_.emplace_back(field.name, nullptr, type_of(field), 1);
  collection_ = {static_cast<int32_t>(names_.size()), names_.data()};
}

// Restoring (kRUNTIME) takes the fields building takes: what was serialised is what was given.
IPluginV3* Creator::createPlugin(AsciiChar const*, PluginFieldCollection const* given, TensorRTPhase) noexcept {
  Values values;
  if (given == nullptr || !parse(spec_, *given, &values)) return nullptr;
  return new (std::nothrow) Plugin(spec_, std::move(values));
}

}  // namespace hisparse::trt

// -- what TensorRT looks up when it loads the library ------------------------------------------------------------------
#pragma GCC visibility push(default)
extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using hisparse::trt::Creator;
  static std::vector<Creator>* const creators = [] {
    auto* const made = new std::vector<Creator>;
    made->reserve(hisparse::trt::kSpecs.size());  // their collections point into them
    for (const auto* spec : hisparse::trt::kSpecs) made->emplace_back(*spec);
    return made;
  }();
  static auto* const pointers = [] {
    auto* const made = new std::vector<nvinfer1::IPluginCreatorInterface*>;
    for (Creator& creator : *creators) made->push_back(&creator);
    return made;
  }();
  count = static_cast<int32_t>(pointers->size());
  return pointers->data();
}

extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { hisparse::trt::set_logger_finder(finder); }

#pragma GCC visibility pop

const char* hs_tensorrt_version(void) {
#define HS_TEXT_OF(x) #x
#define HS_TEXT(x) HS_TEXT_OF(x)
  return HS_TEXT(NV_TENSORRT_MAJOR) "." HS_TEXT(NV_TENSORRT_MINOR) "." HS_TEXT(NV_TENSORRT_PATCH);
}
