// TensorRT plugins as data: a Spec says what a plugin's fields, inputs and outputs are and how it runs; one class makes
// an IPluginV3 of it. Uses only what the headers of TensorRT 10.x and 11.x share; the enumerations and vtables of the two
// differ, so a library serves the major version it was compiled for.
#pragma once

#include <NvInferRuntime.h>
#include <NvInferRuntimePlugin.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hisparse.h"

namespace hisparse::trt {

using namespace nvinfer1;

constexpr char kNamespace[] = "trtllm_hisparse";
constexpr char kVersion[] = "1";

// A scalar that never changes in the life of an engine. All are required, whole numbers unless `real`.
struct Field {
  const char* name;
  double low, high;
  bool real = false;
};

// The fields' values, in the Spec's order; serialised as they are.
union Value {
  int32_t whole;
  float real;
};
using Values = std::vector<Value>;

// A tensor's type: fixed, or the hs_format a field names (HS_F32 or HS_BF16).
struct Type {
  DataType fixed;
  int field = -1;

  DataType of(const Values& values) const;
};

struct Tensor {
  const char* name;
  Type type;
  int rank;
};

// One call of enqueue.
struct Call {
  const Values& values;
  const PluginTensorDesc* in;
  const void* const* inputs;
  void* const* outputs;
  void* workspace;
  cudaStream_t stream;

  template <typename T>
  const T* input(int i) const { return static_cast<const T*>(inputs[i]); }
  template <typename T>
  T* output(int i) const { return static_cast<T*>(outputs[i]); }
  int32_t dim(int tensor, int axis) const { return static_cast<int32_t>(in[tensor].dims.d[axis]); }
};

struct Spec {
  const char* name;
  std::vector<Field> fields;  // without abi_version, which every plugin has
  std::vector<Tensor> inputs, outputs;
  void (*shapes)(const Values&, const DimsExprs* in, DimsExprs* out, IExprBuilder&);
  size_t (*workspace)(const Values&, const DynamicPluginTensorDesc* in);  // of the largest shapes; may be null
  int (*run)(const Call&);  // an hs_status
};

extern const std::vector<const Spec*> kSpecs;

// A pointer table the host can read (HS_OK), or a refusal that names the tensor.
int host_table(const Call& call, const char* name, int input, int size, const int64_t** table);

// Fields to values; on failure false, the reason in hs_last_error and the logger.
bool parse(const Spec& spec, const PluginFieldCollection& given, Values* values);

void log_error(const std::string& message);
void set_logger_finder(ILoggerFinder* finder);

class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  Plugin(const Spec& spec, Values values);

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override;
  IPluginV3* clone() noexcept override;

  AsciiChar const* getPluginName() const noexcept override { return spec_.name; }
  AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(spec_.outputs.size()); }
  int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const* out,
                          int32_t outputs) noexcept override;
  int32_t getOutputDataTypes(DataType* types, int32_t outputs, DataType const* in, int32_t inputs) const noexcept override;
  int32_t getOutputShapes(DimsExprs const* in, int32_t inputs, DimsExprs const* shape_in, int32_t shape_inputs,
                          DimsExprs* out, int32_t outputs, IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t at, DynamicPluginTensorDesc const* tensors, int32_t inputs,
                                 int32_t outputs) noexcept override;
  size_t getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const* out,
                          int32_t outputs) const noexcept override;

  int32_t onShapeChange(PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const* out,
                        int32_t outputs) noexcept override;
  int32_t enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
  IPluginV3* attachToContext(IPluginResourceContext* context) noexcept override;
  PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  bool count_is(int32_t inputs, int32_t outputs) const;

  const Spec& spec_;
  const Values values_;
  const int32_t abi_version_ = HS_VERSION;
  std::vector<PluginField> serialised_;  // points into this object
  PluginFieldCollection collection_;
};

class Creator final : public IPluginCreatorV3One {
 public:
  explicit Creator(const Spec& spec);

  IPluginV3* createPlugin(AsciiChar const* name, PluginFieldCollection const* given, TensorRTPhase phase) noexcept override;
  PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
  AsciiChar const* getPluginName() const noexcept override { return spec_.name; }
  AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  const Spec& spec_;
  std::vector<PluginField> names_;
  PluginFieldCollection collection_;
};

}  // namespace hisparse::trt
