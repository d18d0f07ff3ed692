#include "api.h"

#include <unistd.h>

#include <cstring>

#include "kernels.h"
#include "lend.h"

using ascend_moe_torch::Entry;
using ascend_moe_torch::Gate;
using SharedGate = std::shared_ptr<Gate>;
using SharedPlan = std::shared_ptr<void>;

namespace {

constexpr int kInterface = 3;
constexpr uint64_t kWordsAnOutput = 4;

Gate& GateOf(void* gate) { return **static_cast<SharedGate*>(gate); }

std::shared_ptr<const Entry> EntryOf(const AmTorchCall& call, const ascend_moe_torch::Key& key) {
    auto entry = std::make_shared<Entry>();
    entry->key.assign(key.begin(), key.begin() + key.size());
    entry->plan = *static_cast<SharedPlan*>(call.plan);
    entry->gate = *static_cast<SharedGate*>(call.gate);
    entry->communicator_id = call.communicator_id;
    entry->run = reinterpret_cast<ascend_moe_torch::Run>(call.run);
    if (call.group != nullptr) entry->group = ascend_moe_torch::Group(call.group);
    entry->positions.assign(call.positions, call.positions + call.arguments);
    for (uint64_t i = 0; i < call.output_count; ++i) {
        const int64_t* words = call.outputs + i * kWordsAnOutput;
        ascend_moe_torch::Output output{static_cast<at::ScalarType>(words[0]), {}};
        output.sizes.assign(words + 2, words + 2 + words[1]);
        entry->outputs.push_back(output);
    }
    return entry;
}

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

void am_torch_watch(const char* names) { ascend_moe_torch::Watch(names); }

int am_torch_register(uint64_t number, const char* name, char* text, uint64_t bytes) {
    return Told([=] { ascend_moe_torch::RegisterOp(number, name); }, text, bytes);
}

void* am_torch_gate_create(void* communicator) { return new SharedGate(new Gate(communicator)); }
void am_torch_gate_destroy(void* gate) { delete static_cast<SharedGate*>(gate); }
void am_torch_gate_acquire(void* gate, int milliseconds, int* held) {
    *held = GateOf(gate).AcquireFor(milliseconds);
}
void am_torch_gate_release(void* gate) { GateOf(gate).Release(); }
void am_torch_gate_close(void* gate) { GateOf(gate).Close(); }

void* am_torch_plan_create(void* plan, void (*destroy)(void*)) { return new SharedPlan(plan, destroy); }
void am_torch_plan_drop(void* shared) { delete static_cast<SharedPlan*>(shared); }

int am_torch_remember(const AmTorchCall* call) {
    const ascend_moe_torch::Pending* pending = ascend_moe_torch::PendingCall();
    if (pending == nullptr || !ascend_moe_torch::Fits(call->inputs, call->output_count)) return 0;
    ascend_moe_torch::Remember(pending->generation, EntryOf(*call, *pending->key), *pending->key);
    return 1;
}

uint64_t am_torch_generation() { return ascend_moe_torch::Generation(); }

void am_torch_remember_lender(uint64_t generation, const AmTorchLender* from) {
    auto lender = std::make_shared<ascend_moe_torch::Lender>();
    lender->group_ep = from->group_ep;
    lender->world = from->world;
    lender->rank = from->rank;
    lender->place = ascend_moe_torch::Place();
    if (from->group != nullptr) lender->group = ascend_moe_torch::Group(from->group);
    lender->gate = *static_cast<SharedGate*>(from->gate);
    lender->lent = {from->area, reinterpret_cast<ascend_moe_torch::Take>(from->take),
                    reinterpret_cast<ascend_moe_torch::Release>(from->release), from->unused, getpid()};
    ascend_moe_torch::RememberLender(generation, std::move(lender));
}

void am_torch_end_lending() { ascend_moe_torch::EndLending(); }

void am_torch_forget() { ascend_moe_torch::Forget(); }
void am_torch_set_place(uint64_t place) { ascend_moe_torch::SetPlace(place); }
void am_torch_pause(int by) { ascend_moe_torch::Pause(by); }

void am_torch_counts(uint64_t* out) {
    out[0] = ascend_moe_torch::counts().compiled.load();
    out[1] = ascend_moe_torch::counts().python.load();
    out[2] = ascend_moe_torch::counts().straight.load();
}

void am_torch_clocks(int on) { ascend_moe_torch::SetClocks(on != 0); }

void am_torch_marks(int64_t* out) {
    const ascend_moe_torch::Marks& marks = ascend_moe_torch::LastMarks();
    out[0] = marks.entered;
    out[1] = marks.launched;
    out[2] = marks.returned;
    out[3] = marks.left;
}
