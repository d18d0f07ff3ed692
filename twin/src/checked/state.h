// The checked engine's state of one core.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../core/fiber.h"
#include "shadow.h"
#include "twin/engine/copy_agent.h"

namespace twin {
class World;
}

namespace twin::checked {

enum class Queued : uint8_t { kEffect, kSet, kWait, kBarrier };

// An instruction, or a token between instructions, on its way through a pipe.
struct QueuedOp {
    Queued kind;
    uint32_t number;  // program order, and the site of an effect
    ClockId clock;    // what the scalar pipe knew when it issued this
    uint32_t flag;
    uint32_t turn;  // which set of the flag, or which one is waited for
    void (*run)(void*);
    void* effect;
    Instruction instruction;
};

struct PipeQueue {
    std::vector<QueuedOp> ops;
    size_t head = 0;
    uint32_t last = 0;    // number of the latest instruction that ran
    uint32_t issued = 0;  // and of the latest that was queued
    bool empty() const { return head == ops.size(); }
};

// A UB to GM copy that has left its pipe; pieces of it land one after another.
struct Store {
    struct Piece {
        uintptr_t to;
        uint32_t bytes;
        size_t from;  // in the core's store memory
        bool landed;
    };
    uint32_t number;
    uint32_t left;
    ClockId release;
    bool flag;         // of status blocks: they land one by one
    uintptr_t target;  // begin of the range it goes to
    GmKind kind;
    int owner;  // windows: whose
    std::vector<Piece> pieces;
};

struct FlagState {
    static constexpr uint32_t kDepth = 16;
    uint32_t sets_issued = 0, waits_issued = 0, sets_done = 0, waits_done = 0;
    ClockId clocks[kDepth] = {};
};

struct CacheLine {
    uint8_t bytes[64];
    uint64_t valid = 0;  // bits: bytes that lie in the range
    uint64_t dirty = 0;
    uint8_t fetched[64];  // as they were in GM
    uint32_t stored_by = 0;
    Loc fetched_at = {"", 0};
};

enum class CoreStatus : uint8_t { kDone, kReady, kFlag, kDrain, kBarrier, kPolling, kCross };

struct PollRange {
    uintptr_t begin;
    uintptr_t end;
};

struct RankState;

struct CoreState {
    Core core;
    Fiber fiber;
    void* host = nullptr;  // whose fiber it is
    World* world = nullptr;
    uint32_t global = 0;  // index over all ranks
    RankState* rank = nullptr;
    CoreStatus status = CoreStatus::kDone;
    bool started = false;
    bool woken = false;      // polling: bytes that it looked at have landed
    bool suspected = false;  // its poll was noticed, not declared
    uint32_t fruitless = 0;  // suspected polls since anything landed
    uint32_t wait_flag = 0, wait_turn = 0;
    int cross_id = 0;
    uint32_t cross_turn = 0;
    bool eager_vector = false;
    int64_t priority[6] = {};  // fiber, V, MTE2, MTE3, stores, agents
    uint8_t* ub = nullptr;
    std::vector<Block> ub_blocks;
    uint32_t ub_high = 0;  // bytes of UB that were ever carved in this launch
    PipeQueue pipes[kPipes];
    std::vector<uint32_t> clock[kPipes];
    ClockId issue_clock = kNoClock;  // copy of clock[S], or none
    FlagState flags[kFlags];
    std::vector<Store> stores;
    std::vector<uint8_t> store_bytes;
    std::vector<std::unique_ptr<uint8_t[]>> effect_chunks;
    size_t effect_chunk = 0, effect_used = 0;
    std::unordered_map<uintptr_t, CacheLine> cache;
    uint32_t dirty_lines = 0;
    std::vector<PollRange> looked;    // GM that was read as flags since the last poll
    std::vector<Loc> looks;           // where, since the last poll
    std::vector<CopyQueues*> agents;  // the copy agents' queues of tasks that this core posted

    uint16_t Agent(Pipe pipe) const {
        return static_cast<uint16_t>(global * kPipes + static_cast<uint32_t>(pipe));
    }
};

}  // namespace twin::checked
