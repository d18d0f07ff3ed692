// Runs op_host, unchanged, without CANN: its op definitions, tiling and shape functions are compiled against
// this header, which is written from CANN's public API and has no more than op_host uses. CMake writes a
// header of one #include for each of CANN's names (CMakeLists.txt has the list).
//
// The definitions register themselves at start-up, so they are linked as objects, never as an archive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

// ---- element types and status codes: CANN's numbers, which are also those of aclDataType ----

namespace ge {

enum DataType {
    DT_FLOAT = 0,
    DT_FLOAT16 = 1,
    DT_INT8 = 2,
    DT_INT32 = 3,
    DT_INT64 = 9,
    DT_BOOL = 12,
    DT_BF16 = 27,
    DT_UNDEFINED = 28,
};
enum Format { FORMAT_ND = 2 };

using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0;
constexpr graphStatus GRAPH_FAILED = 0xFFFFFFFF;

class Operator {};
class AscendString {
public:
    AscendString() = default;
    explicit AscendString(const char* text) : text_(text) {}
    const char* GetString() const { return text_.c_str(); }

private:
    std::string text_;
};

// The message goes to whoever called the shim.
__attribute__((weak, visibility("hidden"), format(printf, 2, 3))) int32_t ReportUserDefinedErrMsg(const char* code,
                                                                                                  const char* format,
                                                                                                  ...);

}  // namespace ge

// ---- a call, as a shape or tiling function sees it ----

namespace gert {

class Shape {
public:
    size_t GetDimNum() const { return dims.size(); }
    int64_t GetDim(size_t index) const { return index < dims.size() ? dims[index] : 0; }
    void SetDimNum(size_t count) { dims.resize(count); }
    void SetDim(size_t index, int64_t value) { dims.at(index) = value; }

    std::vector<int64_t> dims;
};

struct StorageShape {
    const Shape& GetOriginShape() const { return origin; }
    Shape origin;
};

struct CompileTimeTensorDesc {
    ge::DataType GetDataType() const { return type; }
    ge::DataType type = ge::DT_UNDEFINED;
};

// An integer, or a text.
struct Attribute {
    Attribute(int64_t value) : number(value) {}                                        // NOLINT: written in lists
    Attribute(std::string value) : isText(true), number(0), text(std::move(value)) {}  // NOLINT
    bool isText = false;
    int64_t number;
    std::string text;
};

class RuntimeAttrs {
public:
    const int64_t* GetInt(size_t index) const {
        return index < values.size() && !values[index].isText ? &values[index].number : nullptr;
    }
    const char* GetStr(size_t index) const {
        return index < values.size() && values[index].isText ? values[index].text.c_str() : nullptr;
    }

    std::vector<Attribute> values;
};

class TilingData {
public:
    size_t GetCapacity() const { return kCapacity; }
    void SetDataSize(size_t size) { bytes.resize(size); }
    void* GetData() { return bytes.data(); }

    static constexpr size_t kCapacity = 4096;  // more than op_host needs; CANN's is set by the op's compilation
    std::vector<uint8_t> bytes = std::vector<uint8_t>(kCapacity);
};

}  // namespace gert

namespace cann_shim {

struct Tensor {
    bool given = false;  // an optional one may be absent
    gert::CompileTimeTensorDesc desc;
    gert::StorageShape shape;
    void* data = nullptr;  // for whoever runs the call; nothing here looks at it
};

// Everything in the order of the definition.
struct Call {
    std::string opType;  // "AscendMoeDistributeDispatch"
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;  // InferShapes fills them in
    gert::RuntimeAttrs attributes;
    std::string soc = "Ascend910_9391";
    uint32_t vectorCores = 48;
};

struct Tiling {
    bool ok = false;
    std::string error;  // one line, where not ok
    gert::TilingData data;
    uint64_t tilingKey = 0;
    uint32_t blockDim = 0;
    uint32_t scheduleMode = 0;
    uint32_t aicpuBlockDim = 0;
    std::vector<size_t> workspaces;
};

// What CANN adds to a workspace before the op's own part.
constexpr uint32_t kSystemWorkspaceBytes = 16 * 1024 * 1024;
constexpr uint64_t kUbBytes = 196352;  // what CANN grants of a core's 192 KiB

}  // namespace cann_shim

namespace fe {

class PlatFormInfos {
public:
    explicit PlatFormInfos(const cann_shim::Call& call) : call_(call) {}
    bool GetPlatformRes(const std::string& label, const std::string& key, std::string& value) const {
        if (label != "version" || key != "Short_SoC_version") return false;
        value = call_.soc;
        // As CANN's platform files have it: Ascend910B3 is an Ascend910B, Ascend910_9391 an Ascend910_93.
        for (const char* family : {"Ascend910_93", "Ascend910B"}) {
            if (call_.soc.compare(0, strlen(family), family) == 0) value = family;
        }
        return true;
    }
    uint32_t vectorCores() const { return call_.vectorCores; }

private:
    const cann_shim::Call& call_;
};

}  // namespace fe

namespace platform_ascendc {

enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM, RESERVED };

class PlatformAscendC {
public:
    explicit PlatformAscendC(fe::PlatFormInfos* platform) : platform_(platform) {}
    uint32_t GetCoreNumAiv() const { return platform_->vectorCores(); }
    uint32_t CalcTschBlockDim(uint32_t slices, uint32_t, uint32_t) const { return slices; }
    uint32_t GetLibApiWorkSpaceSize() const { return cann_shim::kSystemWorkspaceBytes; }
    void GetCoreMemSize(const CoreMemType& type, uint64_t& bytes) const {
        bytes = type == CoreMemType::UB ? cann_shim::kUbBytes : 0;
    }

private:
    fe::PlatFormInfos* platform_;
};

}  // namespace platform_ascendc

namespace gert {

// Like CANN's, the accessors of optional inputs count by the definition, those of others by what the call
// really has.
class CallContext {
public:
    explicit CallContext(cann_shim::Call& call) : call_(call) {}
    const RuntimeAttrs* GetAttrs() const { return &call_.attributes; }
    const CompileTimeTensorDesc* GetInputDesc(size_t index) const { return DescOf(Present(index)); }
    const CompileTimeTensorDesc* GetOptionalInputDesc(size_t index) const { return DescOf(Defined(index)); }

protected:
    static const CompileTimeTensorDesc* DescOf(const cann_shim::Tensor* input) {
        return input == nullptr ? nullptr : &input->desc;
    }
    const cann_shim::Tensor* Present(size_t index) const {
        for (const cann_shim::Tensor& input : call_.inputs) {
            if (input.given && index-- == 0) return &input;
        }
        return nullptr;
    }
    const cann_shim::Tensor* Defined(size_t index) const {
        return index < call_.inputs.size() && call_.inputs[index].given ? &call_.inputs[index] : nullptr;
    }
    cann_shim::Call& call_;
};

class InferDataTypeContext : public CallContext {
public:
    using CallContext::CallContext;
    ge::DataType GetInputDataType(size_t index) const { return TypeOf(Present(index)); }
    ge::DataType GetOptionalInputDataType(size_t index) const { return TypeOf(Defined(index)); }
    ge::graphStatus SetOutputDataType(size_t index, ge::DataType type) {
        if (index >= call_.outputs.size()) return ge::GRAPH_FAILED;
        call_.outputs[index].desc.type = type;
        return ge::GRAPH_SUCCESS;
    }

private:
    static ge::DataType TypeOf(const cann_shim::Tensor* input) {
        return input == nullptr ? ge::DT_UNDEFINED : input->desc.type;
    }
};

class InferShapeContext : public CallContext {
public:
    using CallContext::CallContext;
    const Shape* GetInputShape(size_t index) const { return ShapeOf(Present(index)); }
    const Shape* GetOptionalInputShape(size_t index) const { return ShapeOf(Defined(index)); }
    Shape* GetOutputShape(size_t index) {
        return index < call_.outputs.size() ? &call_.outputs[index].shape.origin : nullptr;
    }

private:
    static const Shape* ShapeOf(const cann_shim::Tensor* input) {
        return input == nullptr ? nullptr : &input->shape.origin;
    }
};

class TilingContext : public CallContext {
public:
    TilingContext(cann_shim::Call& call, cann_shim::Tiling& made) : CallContext(call), platform_(call), made_(made) {}
    const StorageShape* GetInputShape(size_t index) const { return ShapeOf(Present(index)); }
    const StorageShape* GetOptionalInputShape(size_t index) const { return ShapeOf(Defined(index)); }
    fe::PlatFormInfos* GetPlatformInfo() { return &platform_; }
    TilingData* GetRawTilingData() { return &made_.data; }
    size_t* GetWorkspaceSizes(size_t count) {
        made_.workspaces.resize(count);
        return made_.workspaces.data();
    }
    ge::graphStatus SetTilingKey(uint64_t key) { return made_.tilingKey = key, ge::GRAPH_SUCCESS; }
    ge::graphStatus SetBlockDim(uint32_t dim) { return made_.blockDim = dim, ge::GRAPH_SUCCESS; }
    ge::graphStatus SetScheduleMode(uint32_t mode) { return made_.scheduleMode = mode, ge::GRAPH_SUCCESS; }
    ge::graphStatus SetAicpuBlockDim(uint32_t dim) { return made_.aicpuBlockDim = dim, ge::GRAPH_SUCCESS; }

private:
    static const StorageShape* ShapeOf(const cann_shim::Tensor* input) {
        return input == nullptr ? nullptr : &input->shape;
    }
    fe::PlatFormInfos platform_;
    cann_shim::Tiling& made_;
};

}  // namespace gert

namespace ops {

enum Option { IGNORE = 0, OPTIONAL = 1, REQUIRED = 2, DYNAMIC = 3, VIRTUAL = 4 };

class OpParamDef {
public:
    explicit OpParamDef(const char* name) : name(name) {}
    OpParamDef& ParamType(Option type) { return required = type == REQUIRED, *this; }
    OpParamDef& DataType(std::vector<ge::DataType> list) { return types = std::move(list), *this; }
    OpParamDef& Format(std::vector<ge::Format> list) { return formats = std::move(list), *this; }
    OpParamDef& UnknownShapeFormat(std::vector<ge::Format>) { return *this; }
    OpParamDef& AutoContiguous() { return contiguous = true, *this; }

    std::string name;
    bool required = false;
    bool contiguous = false;
    std::vector<ge::DataType> types;
    std::vector<ge::Format> formats;
};

class OpAttrDef {
public:
    explicit OpAttrDef(const char* name) : name(name) {}
    OpAttrDef& AttrType(Option type) { return required = type == REQUIRED, *this; }
    OpAttrDef& Int(int64_t value = 0) { return number = value, isText = false, *this; }
    OpAttrDef& String(const char* value = "") { return text = value, isText = true, *this; }

    std::string name;
    bool required = false;
    bool isText = false;
    int64_t number = 0;
    std::string text;
};

class OpAICoreConfig {
public:
    OpAICoreConfig& DynamicCompileStaticFlag(bool on) { return Flag("dynamicCompileStatic.flag", on); }
    OpAICoreConfig& DynamicFormatFlag(bool on) { return Flag("dynamicFormat.flag", on); }
    OpAICoreConfig& DynamicRankSupportFlag(bool on) { return Flag("dynamicRankSupport.flag", on); }
    OpAICoreConfig& DynamicShapeSupportFlag(bool on) { return Flag("dynamicShapeSupport.flag", on); }
    OpAICoreConfig& NeedCheckSupportFlag(bool on) { return Flag("needCheckSupport.flag", on); }
    OpAICoreConfig& PrecisionReduceFlag(bool on) { return Flag("precision_reduce.flag", on); }
    OpAICoreConfig& ExtendCfgInfo(const char* key, const char* value) { return items[key] = value, *this; }

    std::map<std::string, std::string> items;

private:
    OpAICoreConfig& Flag(const char* key, bool on) { return items[key] = on ? "true" : "false", *this; }
};

class OpAICoreDef {
public:
    using Tiling = ge::graphStatus (*)(gert::TilingContext*);
    using CheckSupport = ge::graphStatus (*)(const ge::Operator&, ge::AscendString&);
    OpAICoreDef& SetTiling(Tiling function) { return tiling = function, *this; }
    OpAICoreDef& SetCheckSupport(CheckSupport function) { return checkSupport = function, *this; }
    OpAICoreDef& AddConfig(const char* soc, OpAICoreConfig& config) { return configs[soc] = config, *this; }

    Tiling tiling = nullptr;
    CheckSupport checkSupport = nullptr;
    std::map<std::string, OpAICoreConfig> configs;
};

class OpMC2Def {
public:
    OpMC2Def& HcclGroup(const char* group) { return groups.push_back(group), *this; }

    std::vector<std::string> groups;
};

class OpDef {
public:
    using InferShape = ge::graphStatus (*)(gert::InferShapeContext*);
    using InferDataType = ge::graphStatus (*)(gert::InferDataTypeContext*);
    explicit OpDef(const char* type) : type(type) {}
    // Deques: a reference handed out stays good when more are added.
    OpParamDef& Input(const char* name) { return inputs.emplace_back(name); }
    OpParamDef& Output(const char* name) { return outputs.emplace_back(name); }
    OpAttrDef& Attr(const char* name) { return attributes.emplace_back(name); }
    OpDef& SetInferShape(InferShape function) { return inferShape = function, *this; }
    OpDef& SetInferDataType(InferDataType function) { return inferDataType = function, *this; }
    OpAICoreDef& AICore() { return aiCore; }
    OpMC2Def& MC2() { return mc2; }

    std::string type;
    std::deque<OpParamDef> inputs;
    std::deque<OpParamDef> outputs;
    std::deque<OpAttrDef> attributes;
    InferShape inferShape = nullptr;
    InferDataType inferDataType = nullptr;
    OpAICoreDef aiCore;
    OpMC2Def mc2;
};

// Registered ops by type.
__attribute__((visibility("hidden"))) std::map<std::string, OpDef>& Registered();

}  // namespace ops

#define OP_ADD(opType) \
    [[maybe_unused]] static const bool g_##opType##_added = ops::Registered().emplace(#opType, opType(#opType)).second

// ---- communication tiling in the sizes of CANN 9.1, filled in so that one can see what op_host asked for.
// CANN's own bytes are its secret; nobody but its libraries reads them ----

struct Mc2InitTiling {
    uint8_t reserved[64];
};
struct Mc2CcTiling {
    uint8_t reserved[512];
};

namespace AscendC {

class Mc2CcTilingConfig {
public:
    Mc2CcTilingConfig(const std::string& group, uint32_t opType, const std::string& algorithm)
        : group_(group), algorithm_(algorithm), opType_(opType) {}

    struct Init {
        uint32_t version;
        uint32_t count;
        uint32_t offset;  // of the task from the start of this struct
    };
    struct Task {
        char group[128];
        char algorithm[128];
        uint32_t opType;
        uint32_t engine;
    };

    uint32_t SetCommEngine(uint8_t engine) { return engine_ = engine, 0; }
    uint32_t GetTiling(::Mc2InitTiling& tiling) {
        init_ = reinterpret_cast<uint8_t*>(&tiling);
        const Init init = {kVersion, 0, 0};
        memset(&tiling, 0, sizeof(tiling));
        memcpy(&tiling, &init, sizeof(init));
        return 0;
    }
    uint32_t GetTiling(::Mc2CcTiling& tiling) {
        Task task = {};
        if (init_ == nullptr || group_.size() >= sizeof(task.group)) return 1;
        group_.copy(task.group, sizeof(task.group) - 1);
        algorithm_.copy(task.algorithm, sizeof(task.algorithm) - 1);
        task.opType = opType_;
        task.engine = engine_;
        memset(&tiling, 0, sizeof(tiling));
        memcpy(&tiling, &task, sizeof(task));
        const auto offset = reinterpret_cast<uint8_t*>(&tiling) - init_;
        const Init init = {kVersion, 1, static_cast<uint32_t>(offset)};
        memcpy(init_, &init, sizeof(init));
        return 0;
    }

private:
    static constexpr uint32_t kVersion = 100;
    std::string group_;
    std::string algorithm_;
    uint32_t opType_;
    uint32_t engine_ = 0;
    uint8_t* init_ = nullptr;
};

}  // namespace AscendC

// ---- what runs op_host ----

namespace cann_shim {

Tiling Tile(Call& call);
// The outputs' shapes and types into the call. Empty, or the error.
std::string InferShapes(Call& call);
// Null for an op type that op_host does not define. Names, types and defaults are its public members.
const ops::OpDef* Definition(const std::string& opType);

}  // namespace cann_shim
