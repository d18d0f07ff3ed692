// Stand-in for CANN's header of this name: collects what an op definition says.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exe_graph/runtime/infer_datatype_context.h"
#include "exe_graph/runtime/infer_shape_context.h"
#include "exe_graph/runtime/tiling_context.h"

namespace ge {
class Operator {};
class AscendString {
public:
    AscendString() = default;
    explicit AscendString(const char* text) : text_(text) {}
    const char* GetString() const { return text_.c_str(); }

private:
    std::string text_;
};
}  // namespace ge

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

#define OP_ADD(opType)                                      \
    [[maybe_unused]] static const bool g_##opType##_added = \
        ops::Registered().emplace(#opType, opType(#opType)).second
