#include "api.h"

#include <cstring>
#include <exception>

#include "call.h"
#include "engine.h"

using ascend_moe_torch::End;
using SharedEnd = std::shared_ptr<End>;

namespace {

constexpr int kInterface = 4;

End& EndOf(void* end) { return **static_cast<SharedEnd*>(end); }

// 0, or 1 when `function` throws: `text` says what.
template <class Function>
int Told(Function function, char* text, uint64_t bytes) {
    try {
        function();
        return 0;
    } catch (const std::exception& error) {
        strncpy(text, error.what(), bytes - 1);
        text[bytes - 1] = '\0';
        return 1;
    }
}

}  // namespace

int am_torch_interface() { return kInterface; }

int am_torch_python(const AmTorchPython* python, const char* variables, char* text, uint64_t bytes) {
    ascend_moe_torch::UsePython(*python);
    ascend_moe_torch::Watch(variables);
    return Told([] { ascend_moe_torch::RegisterTakeRecord(); }, text, bytes);
}

int am_torch_register(const char* name, const char* schema, char* text, uint64_t bytes) {
    return Told([=] { ascend_moe_torch::RegisterOp(name, schema); }, text, bytes);
}
int am_torch_use_engine(const char* path, char* text, uint64_t bytes) {
    return Told([=] { ascend_moe_torch::UseEngine(path); }, text, bytes);
}
int am_torch_use_adapter(const char* path, char* text, uint64_t bytes) {
    return Told([=] { ascend_moe_torch::UseAdapter(path); }, text, bytes);
}

void* am_torch_end_create(const AmTorchEnd* end) { return new SharedEnd(new End(*end)); }
void am_torch_end_destroy(void* end) { delete static_cast<SharedEnd*>(end); }
void am_torch_end_acquire(void* end, int milliseconds, int* held) {
    *held = EndOf(end).AcquireFor(milliseconds) ? 1 : 0;
}
void am_torch_end_release(void* end) { EndOf(end).Release(); }
void am_torch_end_shut(void* end) { EndOf(end).Shut(); }
uint32_t am_torch_end_algorithm(void* end) { return EndOf(end).algorithm(); }

void am_torch_forget() { ascend_moe_torch::Forget(); }
void am_torch_set_place(uint64_t place) { ascend_moe_torch::SetPlace(place); }
void am_torch_prepare_always(int by) { ascend_moe_torch::PrepareAlways(by); }

void am_torch_counts(uint64_t* out) {
    const ascend_moe_torch::Counts counts = ascend_moe_torch::CallCounts();
    out[0] = counts.known;
    out[1] = counts.prepared;
}

void am_torch_marks(int64_t* out) {
    const ascend_moe_torch::Marks& marks = ascend_moe_torch::LastMarks();
    out[0] = marks.entered;
    out[1] = marks.launched;
    out[2] = marks.returned;
    out[3] = marks.left;
}
