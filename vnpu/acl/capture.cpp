// Capture and replay (aclmdlRI*): what torch.npu.NPUGraph is made of.
#include <cstdio>
#include <utility>

#include "graph.h"

using namespace vnpu;

namespace {

// From the beginning of its capture to aclmdlRIDestroy; a graph's handle is its address.
std::vector<std::shared_ptr<Graph>>& Graphs() {
    static auto* graphs = new std::vector<std::shared_ptr<Graph>>;
    return *graphs;
}

std::shared_ptr<Graph> GraphOf(Handle handle, const char* function) {
    for (const auto& graph : Graphs()) {
        if (graph.get() == handle) return graph;
    }
    vnpu_error("%s: %p is no captured graph of the virtual NPU", function, handle);
    return nullptr;
}

}  // namespace

VNPU_EXPORT AclError aclmdlRICaptureBegin(Handle handle, int mode) {
    static uint32_t next_id = 1;
    return WithStream(handle, [&](Stream& stream) {
        if (stream.capture) {
            vnpu_error("aclmdlRICaptureBegin: stream %d is being captured already", stream.id);
            return kStreamCaptured;
        }
        stream.capture.reset(new Graph{next_id++, handle, mode, std::this_thread::get_id()});
        Graphs().push_back(stream.capture);
        return kSuccess;
    });
}

VNPU_EXPORT AclError aclmdlRICaptureGetInfo(Handle handle, int* status, Handle* model) {
    return WithStream(handle, [&](Stream& stream) {
        if (status) *status = stream.capture ? 1 : 0;
        if (model) *model = stream.capture.get();
        return kSuccess;
    });
}

VNPU_EXPORT AclError aclmdlRICaptureEnd(Handle handle, Handle* model) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    Stream* stream = StreamOf(handle, "aclmdlRICaptureEnd");
    if (!stream || !model) return kParamInvalid;
    if (!stream->capture) {
        vnpu_error("aclmdlRICaptureEnd: stream %d is not being captured", stream->id);
        return kStreamNotCaptured;
    }
    if (stream->capture->origin != handle) {
        vnpu_error("aclmdlRICaptureEnd: the capture was begun on another stream than %d", stream->id);
        return kCaptureUnmatched;
    }
    stream->capture->capturing = false;
    *model = stream->capture.get();
    LeaveCapture(*stream->capture);  // this stream's too
    return kSuccess;
}

VNPU_EXPORT AclError aclmdlRIExecuteAsync(Handle model, Handle stream) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    const std::shared_ptr<Graph> graph = GraphOf(model, "aclmdlRIExecuteAsync");
    Stream* target = StreamOf(stream, "aclmdlRIExecuteAsync");
    if (!graph || !target) return kInvalidHandle;
    if (graph->capturing) {
        vnpu_error("aclmdlRIExecuteAsync: graph %u is still being captured", graph->id);
        return kModelCaptured;
    }
    if (target->capture) {
        vnpu_error("aclmdlRIExecuteAsync: stream %d is being captured; graphs in graphs are not supported", target->id);
        return kModelCaptured;
    }
    for (const auto& step : graph->steps) target->last = Put(step);
    return kSuccess;
}

VNPU_EXPORT AclError aclmdlRIDestroy(Handle model) {
    std::shared_ptr<Graph> doomed;  // its work is dropped outside the lock
    std::lock_guard<std::mutex> lock(GraphMutex());
    doomed = GraphOf(model, "aclmdlRIDestroy");
    if (!doomed) return kInvalidHandle;
    auto& graphs = Graphs();
    for (size_t i = 0; i < graphs.size(); ++i) {
        if (graphs[i] == doomed) graphs.erase(graphs.begin() + static_cast<std::ptrdiff_t>(i--));
    }
    return kSuccess;
}

VNPU_EXPORT AclError aclmdlRIGetId(Handle model, uint32_t* id) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    std::shared_ptr<Graph> graph = GraphOf(model, "aclmdlRIGetId");
    if (!graph || !id) return kParamInvalid;
    *id = graph->id;
    return kSuccess;
}

VNPU_EXPORT AclError aclmdlRIDebugPrint(Handle model) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    std::shared_ptr<Graph> graph = GraphOf(model, "aclmdlRIDebugPrint");
    if (!graph) return kInvalidHandle;
    std::fprintf(stderr, "ascend_moe vnpu: graph %u: %zu steps\n", graph->id, graph->steps.size());
    return kSuccess;
}

VNPU_EXPORT AclError aclmdlRICaptureThreadExchangeMode(int* mode) {
    if (!mode) return kParamInvalid;
    std::swap(*mode, CaptureModeOfThread());
    return kSuccess;
}
