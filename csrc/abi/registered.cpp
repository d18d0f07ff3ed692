#include "window.h"

#include <algorithm>
#include <vector>

#include "ascend_moe.h"
#include "communicator.h"

namespace ops {

namespace {

constexpr uint64_t kRegisteredAlignment = 512;  // as for the regions of a ping-pong buffer

// Areas that tensors live in, of this process.
struct Registry {
    std::mutex mutex;
    std::vector<const RegisteredArea*> areas;
};
Registry& TheRegistry() {
    static Registry registry;
    return registry;
}

}  // namespace

RegisteredArea::RegisteredArea(int rank, uint8_t* base, uint64_t bytes) : rank_(rank), base_(base), bytes_(bytes) {
    Registry& registry = TheRegistry();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.areas.push_back(this);
}

RegisteredArea::~RegisteredArea() {
    Registry& registry = TheRegistry();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.areas.erase(std::find(registry.areas.begin(), registry.areas.end(), this));
}

bool RegisteredArea::Contains(const void* address) const {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    return at >= base_ && at < base_ + bytes_;
}

// The lowest free place: pages that were touched before come first.
bool RegisteredArea::Take(uint64_t bytes, Grant& grant) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool sane = bytes <= UINT64_MAX / 2;
    const uint64_t size = sane ? moe::CeilTo(std::max<uint64_t>(bytes, 1), kRegisteredAlignment) : UINT64_MAX;
    uint64_t at = 0;
    for (const auto& [offset, block] : blocks_) {
        if (offset - at >= size) break;
        at = offset + block.bytes;
    }
    if (size > bytes_ || at > bytes_ - size) {
        grant = {0, 0, held_, sane ? at + size : UINT64_MAX};
        return false;
    }
    if (++generation_ == 0) ++generation_;
    blocks_[at] = Block{size, generation_};
    ++held_;
    grant = {at, generation_, held_, 0};
    return true;
}

void RegisteredArea::Forget(Blocks::iterator block) {
    if (!block->second.held && block->second.quiet) blocks_.erase(block);
}

bool RegisteredArea::Release(uint32_t generation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
        if (block->second.generation != generation || !block->second.held) continue;
        block->second.held = false;
        --held_;
        Forget(block);
        break;
    }
    return closed_ && held_ == 0;
}

bool RegisteredArea::Close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    return held_ == 0;
}

RegisteredArea::State RegisteredArea::StateOf(const void* rows, uint64_t bytes) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t at = static_cast<uint64_t>(static_cast<const uint8_t*>(rows) - base_);
    auto next = blocks_.upper_bound(at);
    if (next == blocks_.begin()) return {Use::kNoBlock, 0, 0};
    const auto& [offset, block] = *--next;
    if (!block.held || at + bytes > offset + block.bytes) return {Use::kNoBlock, block.generation, 0};
    if (block.epoch != 0) return {Use::kConsumed, block.generation, block.epoch};
    if (at % moe::kBlock != 0) return {Use::kMisaligned, block.generation, 0};
    return {Use::kGood, block.generation, 0};
}

void RegisteredArea::Complete(uint32_t generation, uint32_t epoch, bool left) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto next = blocks_.begin(); next != blocks_.end();) {
        const auto block = next++;
        if (block->second.generation == generation && generation != 0) {
            block->second.epoch = epoch;
            block->second.quiet = false;
        } else if (left && !block->second.quiet) {
            block->second.quiet = true;
            Forget(block);
        }
    }
}

std::string RegisteredArea::Refusal(const State& state) {
    const std::string of_block = "(generation " + std::to_string(state.generation) + ")";
    switch (state.use) {
        case Use::kGood: return "";
        case Use::kConsumed:
            return "expand_x: this window tensor " + of_block + " was consumed by the combine of epoch " +
                   std::to_string(state.detail) + "; take a new one from window_empty for every combine";
        case Use::kMisaligned:
            return "expand_x: it begins inside a 32-byte block of its window tensor " + of_block +
                   "; pass the tensor as window_empty returned it, or rows of it that begin at a multiple of 32 bytes";
        case Use::kNoBlock:
            return "expand_x: it lies in this rank's registered window memory, but not inside one live window tensor; "
                   "pass a tensor that window_empty returned";
        case Use::kCommQuant:
            return "expand_x: it is a window tensor " + of_block +
                   ", whose rows peers read where they lie, but "
                   "comm_quant_mode 2 sends int8 rows; pass a tensor of ordinary memory, or comm_quant_mode 0";
        case Use::kElsewhere: break;
    }
    return "expand_x: it is a window tensor of other windows: those of rank " + std::to_string(state.detail) +
           " of another group, of another rank, or of a group that has been closed; take one from window_empty of this "
           "group and rank";
}

RegisteredArea::State RegisteredArea::ElsewhereOf(const RegisteredArea* own, const void* rows) {
    Registry& registry = TheRegistry();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    for (const RegisteredArea* area : registry.areas) {
        if (area != own && area->Contains(rows)) return {Use::kElsewhere, 0, static_cast<uint32_t>(area->rank_)};
    }
    return {};
}

}  // namespace ops

namespace {
using Handle = std::shared_ptr<ops::RegisteredArea>;
Handle& HandleOf(void* area) { return *static_cast<Handle*>(area); }

// The last use of a handle when it is over: what is left of the area goes with it.
int Drop(void* area, bool over) {
    if (over) delete &HandleOf(area);
    return over ? 1 : 0;
}
}  // namespace

void* am_comm_registered(void* comm) {
    return ops::Made([=] {
        const Handle area = static_cast<ops::Communicator*>(comm)->OpenRegisteredArea();
        return area ? new Handle(area) : nullptr;
    });
}
int am_registered_take(void* area, uint64_t bytes, uint64_t* out) {
    ops::RegisteredArea::Grant grant;
    const bool taken = HandleOf(area)->Take(bytes, grant);
    out[0] = reinterpret_cast<uintptr_t>(HandleOf(area)->base()) + grant.offset;
    out[1] = grant.generation;
    out[2] = grant.held;
    out[3] = grant.needed;
    return taken ? 0 : 1;
}
int am_registered_release(void* area, uint32_t generation) { return Drop(area, HandleOf(area)->Release(generation)); }
int am_registered_close(void* area) { return Drop(area, HandleOf(area)->Close()); }

void* am_registered_open(int rank, uint64_t base, uint64_t bytes) {
    return ops::Made([=] {
        return new Handle(std::make_shared<ops::RegisteredArea>(rank, reinterpret_cast<uint8_t*>(base), bytes));
    });
}
