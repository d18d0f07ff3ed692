// Stand-in for CANN's header of this name: what a shape or tiling function sees of a call. One class stands
// behind the three contexts of CANN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

// Element types and status codes have CANN's numbers, which are also those of aclDataType.
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

}  // namespace ge

namespace fe {
class PlatFormInfos;
}

namespace gert {

class Shape {
public:
    static constexpr size_t kMaxDimNum = 25;
    Shape() = default;
    explicit Shape(const std::vector<int64_t>& dims) : count_(dims.size()) {
        for (size_t i = 0; i < dims.size() && i < kMaxDimNum; ++i) dims_[i] = dims[i];
    }
    size_t GetDimNum() const { return count_; }
    int64_t GetDim(size_t index) const { return index < count_ ? dims_[index] : 0; }
    void SetDimNum(size_t count) { count_ = count; }
    void SetDim(size_t index, int64_t value) {
        if (index < kMaxDimNum) dims_[index] = value;
    }

private:
    size_t count_ = 0;
    int64_t dims_[kMaxDimNum] = {};
};

class StorageShape {
public:
    explicit StorageShape(const Shape& shape) : shape_(shape) {}
    const Shape& GetOriginShape() const { return shape_; }
    const Shape& GetStorageShape() const { return shape_; }

private:
    Shape shape_;
};

class CompileTimeTensorDesc {
public:
    explicit CompileTimeTensorDesc(ge::DataType type) : type_(type) {}
    ge::DataType GetDataType() const { return type_; }

private:
    ge::DataType type_;
};

class RuntimeAttrs {
public:
    struct Value {
        bool isText;
        int64_t number;
        std::string text;
    };
    explicit RuntimeAttrs(std::vector<Value> values) : values_(std::move(values)) {}
    size_t GetAttrNum() const { return values_.size(); }
    const int64_t* GetInt(size_t index) const {
        return index < values_.size() && !values_[index].isText ? &values_[index].number : nullptr;
    }
    const char* GetStr(size_t index) const {
        return index < values_.size() && values_[index].isText ? values_[index].text.c_str() : nullptr;
    }

private:
    std::vector<Value> values_;
};

class TilingData {
public:
    explicit TilingData(size_t capacity) : bytes_(capacity) {}
    size_t GetCapacity() const { return bytes_.size(); }
    size_t GetDataSize() const { return size_; }
    void SetDataSize(size_t size) { size_ = size; }
    void* GetData() { return bytes_.data(); }

private:
    std::vector<unsigned char> bytes_;
    size_t size_ = 0;
};

// Inputs by place in the call; an absent optional one has no desc. Like CANN's, the accessors of optional
// inputs count by the definition, those of others by what the call really has.
struct CallData {
    struct Input {
        bool given;
        StorageShape shape;
        CompileTimeTensorDesc desc;
    };
    std::vector<Input> inputs;
    std::vector<Shape> outputs;
    std::vector<ge::DataType> outputTypes;
    RuntimeAttrs attributes;
};

class CallContext {
public:
    explicit CallContext(CallData& call) : call_(call) {}
    const RuntimeAttrs* GetAttrs() const { return &call_.attributes; }
    const CompileTimeTensorDesc* GetInputDesc(size_t index) const {
        const CallData::Input* input = Present(index);
        return input == nullptr ? nullptr : &input->desc;
    }
    const CompileTimeTensorDesc* GetOptionalInputDesc(size_t index) const {
        const CallData::Input* input = Defined(index);
        return input == nullptr ? nullptr : &input->desc;
    }

protected:
    const CallData::Input* Present(size_t index) const {
        for (const CallData::Input& input : call_.inputs) {
            if (input.given && index-- == 0) return &input;
        }
        return nullptr;
    }
    const CallData::Input* Defined(size_t index) const {
        return index < call_.inputs.size() && call_.inputs[index].given ? &call_.inputs[index] : nullptr;
    }
    CallData& call_;
};

class TilingContext : public CallContext {
public:
    TilingContext(CallData& call, fe::PlatFormInfos& platform, TilingData& data)
        : CallContext(call), platform_(platform), data_(data) {}
    const StorageShape* GetInputShape(size_t index) const {
        const CallData::Input* input = Present(index);
        return input == nullptr ? nullptr : &input->shape;
    }
    const StorageShape* GetOptionalInputShape(size_t index) const {
        const CallData::Input* input = Defined(index);
        return input == nullptr ? nullptr : &input->shape;
    }
    fe::PlatFormInfos* GetPlatformInfo() const { return &platform_; }
    TilingData* GetRawTilingData() { return &data_; }
    size_t* GetWorkspaceSizes(size_t count) {
        workspaces_.resize(count);
        return workspaces_.data();
    }
    ge::graphStatus SetTilingKey(uint64_t key) { return tilingKey_ = key, ge::GRAPH_SUCCESS; }
    ge::graphStatus SetBlockDim(uint32_t blockDim) { return blockDim_ = blockDim, ge::GRAPH_SUCCESS; }
    ge::graphStatus SetScheduleMode(uint32_t mode) { return scheduleMode_ = mode, ge::GRAPH_SUCCESS; }
    uint64_t GetTilingKey() const { return tilingKey_; }
    uint32_t GetBlockDim() const { return blockDim_; }
    uint32_t GetScheduleMode() const { return scheduleMode_; }
    const std::vector<size_t>& workspaces() const { return workspaces_; }

private:
    fe::PlatFormInfos& platform_;
    TilingData& data_;
    std::vector<size_t> workspaces_;
    uint64_t tilingKey_ = 0;
    uint32_t blockDim_ = 0;
    uint32_t scheduleMode_ = 0;
};

}  // namespace gert
