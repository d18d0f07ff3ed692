// Stand-in for CANN's header of this name.
#pragma once

#include "exe_graph/runtime/context.h"

namespace gert {

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
