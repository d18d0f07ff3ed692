// Event ids that the queues of a step hold at the same time, by pair of pipes. A queue of n tensors holds up to n ids
// of the pair by which its consumer returns tensors, because a free tensor keeps its id until it is filled again, and
// one id of the pair by which its producer hands over for each tensor that is filled and not taken.
#pragma once

#include "call_plan.h"

namespace moe {

// As AscendC's HardEvent names them.
enum class EventPair : uint32_t { kMte2V, kVMte2, kMte3V, kVMte3, kMte3Mte2, kMte2Mte3, kMte2S, kCount };

class EventBudget {
public:
    EventBudget(const CallPlan& plan, Step step) : plan_(plan), info_(plan.info()) {
        switch (step) {
            case Step::kSend: plan.op == kOpDispatch ? DispatchSend() : CombineSend(); break;
            case Step::kCopy: Through(plan.dispatch.copyRing, 1); break;
            case Step::kSum: Sums(plan.combine.sumRing, 1); break;
            case Step::kPublish: Rows(); break;
            case Step::kGather: Gather(); break;
            case Step::kReturn: Return(); break;
            case Step::kStatus:
            case Step::kLists: break;  // single waits
            case Step::kForward:
                Through(plan.dispatch.sendRing, plan.dispatch.sendRing);
                Hold(EventPair::kMte2S, plan.dispatch.sendRing);
                Through(kRelayedMessages, 1);
                break;
            case Step::kServerSum:
                Through(kRelayedMessages, 1);
                Sums(plan.combine.sumRing, 1);
                if (CommQuantMode(info_) != 0) Out(1);
                break;
            case Step::kWaitSums: break;  // only ServerTokens
        }
        const bool forwards = step == Step::kForward || step == Step::kServerSum || step == Step::kCopy;
        if (info_.algorithm == kAlgorithmHierarchy && !forwards) In(1, 1);  // ServerTokens
    }
    // The number for the pair with most.
    uint32_t Most() const { return *std::max_element(held_, held_ + kPairs); }

private:
    void Hold(EventPair pair, uint32_t ids) { held_[static_cast<uint32_t>(pair)] += ids; }
    // Queues of `ring` tensors, of which at most `filled` are filled and not taken: into UB for the vector unit, out of
    // it, and from GM to GM.
    void In(uint32_t ring, uint32_t filled) {
        Hold(EventPair::kMte2V, filled);
        Hold(EventPair::kVMte2, ring);
    }
    void Out(uint32_t ring) {
        Hold(EventPair::kVMte3, 1);
        Hold(EventPair::kMte3V, ring);
    }
    void Through(uint32_t ring, uint32_t filled) {
        Hold(EventPair::kMte2Mte3, filled);
        Hold(EventPair::kMte3Mte2, ring);
    }

    // RowLoader. Direct loads rows before it quantizes them.
    void Rows() {
        const uint32_t ring = plan_.dispatch.sendRing;
        if (info_.quantMode == 0) return Through(ring, 1);
        In(ring, info_.algorithm == kAlgorithmDirect ? ring : 1);
        Out(ring);
    }
    void DispatchSend() {
        Rows();
        if (plan_.dispatch.trailerRing != 0) Out(plan_.dispatch.trailerRing);
    }
    // If rows are read once for several experts, the whole ring is in flight before the first store.
    void Gather() { Through(plan_.dispatch.copyRing, plan_.dispatch.sharedLanes != 0 ? plan_.dispatch.copyRing : 1); }
    void CombineSend() {
        SourceIndices();
        ReturnedRows();
    }
    // ReturnLoader.
    void ReturnedRows() {
        const uint32_t ring = plan_.combine.returnRing;
        if (!CodesRows(info_)) return Through(ring, 1);
        In(ring, 1);
        Out(ring);
    }
    void SourceIndices() {
        if (info_.sourceIndices != 0) Hold(EventPair::kMte2S, 1);  // from Begin to the first chunk
    }
    void Sums(uint32_t groups, uint32_t filled) {
        In(groups, filled);
        Out(info_.xType == kTypeFp32 ? 1 : 2);
    }
    void Return() {
        const uint32_t groups = plan_.combine.sumRing / plan_.combine.sumGroup;
        SourceIndices();
        ReturnedRows();
        Sums(groups, groups);
    }

    static constexpr uint32_t kPairs = static_cast<uint32_t>(EventPair::kCount);
    const CallPlan& plan_;
    const MoeDistributeInfo& info_;
    uint32_t held_[kPairs] = {};
};

}  // namespace moe
