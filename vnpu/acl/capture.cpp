// Capture, replay and update (aclmdlRI*): what torch.npu.NPUGraph is made of.
#include <algorithm>
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
        vnpu_error("aclmdlRICaptureEnd: the capture was started on another stream than %d", stream->id);
        return kCaptureUnmatched;
    }
    if (stream->tasks) {
        vnpu_error("aclmdlRICaptureEnd: a task group of stream %d has not ended", stream->id);
        return kCaptureUnmatched;
    }
    stream->capture->capturing = false;
    *model = stream->capture.get();
    LeaveCapture(*stream->capture);  // this stream's too
    return kSuccess;
}

// ---- task groups: what a stream is given between the two calls is one step of the graph, to be exchanged later

VNPU_EXPORT AclError aclmdlRICaptureTaskGrpBegin(Handle handle) {
    return WithStream(handle, [](Stream& stream) {
        if (!stream.capture || stream.tasks) {
            vnpu_error("aclmdlRICaptureTaskGrpBegin: stream %d is %s", stream.id,
                       stream.tasks ? "in a task group already" : "not being captured");
            return stream.tasks ? kParamInvalid : kStreamNotCaptured;
        }
        stream.tasks = std::make_shared<Works>();
        return kSuccess;
    });
}

VNPU_EXPORT AclError aclmdlRICaptureTaskGrpEnd(Handle handle, Handle* group) {
    return WithStream(handle, [&](Stream& stream) {
        if (!group || !stream.capture || !stream.tasks) {
            vnpu_error("aclmdlRICaptureTaskGrpEnd: stream %d has no task group that has begun", stream.id);
            return kParamInvalid;
        }
        const auto made = std::make_shared<TaskGroup>(TaskGroup{stream.tasks->size(), std::move(*stream.tasks)});
        stream.tasks.reset();
        stream.capture->groups.push_back(made);
        Enqueue(stream, WorkOf([made] {
                    for (const auto& task : made->tasks) Run(*task);
                }));
        *group = made.get();
        return kSuccess;
    });
}

VNPU_EXPORT AclError aclmdlRICaptureTaskUpdateBegin(Handle handle, Handle group) {
    return WithStream(handle, [&](Stream& stream) {
        if (stream.capture || stream.tasks) {
            vnpu_error("aclmdlRICaptureTaskUpdateBegin: stream %d is being captured, or updates already", stream.id);
            return kStreamCaptured;
        }
        for (const auto& graph : Graphs()) {
            for (const auto& known : graph->groups) {
                if (known.get() == group) stream.updated = known;
            }
        }
        if (!stream.updated) {
            vnpu_error("aclmdlRICaptureTaskUpdateBegin: %p is no task group of the virtual NPU", group);
            return kInvalidHandle;
        }
        stream.tasks = std::make_shared<Works>();
        return kSuccess;
    });
}

// The exchange is work of the stream, as on a device.
VNPU_EXPORT AclError aclmdlRICaptureTaskUpdateEnd(Handle handle) {
    std::shared_ptr<Works> tasks;  // dropped outside the lock
    return WithStream(handle, [&](Stream& stream) {
        const std::shared_ptr<TaskGroup> group = std::exchange(stream.updated, nullptr);
        if (!group) {
            vnpu_error("aclmdlRICaptureTaskUpdateEnd: stream %d does not update a task group", stream.id);
            return kParamInvalid;
        }
        tasks.swap(stream.tasks);
        if (tasks->size() != group->count) {
            vnpu_error("aclmdlRICaptureTaskUpdateEnd: the group was captured with %zu tasks, its update has %zu",
                       group->count, tasks->size());
            return kParamInvalid;
        }
        Enqueue(stream, WorkOf([group, tasks] { group->tasks.swap(*tasks); }));
        return kSuccess;
    });
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
    for (const auto& step : graph->steps) Enqueue(*target, step);
    return kSuccess;
}

VNPU_EXPORT AclError aclmdlRIDestroy(Handle model) {
    std::shared_ptr<Graph> doomed;  // its work is dropped outside the lock
    std::lock_guard<std::mutex> lock(GraphMutex());
    doomed = GraphOf(model, "aclmdlRIDestroy");
    if (!doomed) return kInvalidHandle;
    auto& graphs = Graphs();
    graphs.erase(std::find(graphs.begin(), graphs.end(), doomed));
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
