// A core's clocks in the timed engine, and the time that its critical path has spent so far.
#pragma once

#include <cstring>
#include <vector>

#include "../core/fiber.h"
#include "twin/engine/engine.h"
#include "twin/engine/predict.h"

namespace twin::timed {

constexpr uint32_t kPhases = 20;  // names a run may have; later ones count as the last
constexpr uint32_t kCauses = static_cast<uint32_t>(Cause::kCount);
constexpr uint32_t kMaxDepth = 64;

// How the time from 0 to a core's `now` was spent, followed back through the cores for which it waited.
struct Path {
    double ns[kPhases][kCauses] = {};
};

// Bytes that a pipe has under way: no more than so many at once.
class Flights {
public:
    // The earliest time from `start` on at which `bytes` more may leave.
    double Admit(double start, double bytes, double most) {
        while (!flights_.empty() && bytes_ + bytes > most) {
            const Flight first = flights_[head_];
            if (first.end > start) start = first.end;
            bytes_ -= first.bytes;
            if (++head_ == flights_.size()) {
                flights_.clear();
                head_ = 0;
                bytes_ = 0;
            }
        }
        return start;
    }
    void Add(double end, double bytes) {
        if (head_ > 256 && 2 * head_ > flights_.size()) {
            flights_.erase(flights_.begin(), flights_.begin() + static_cast<long>(head_));
            head_ = 0;
        }
        flights_.push_back({end, bytes});
        bytes_ += bytes;
    }
    void Clear() { *this = Flights(); }

private:
    struct Flight {
        double end;
        double bytes;
    };
    std::vector<Flight> flights_;
    size_t head_ = 0;
    double bytes_ = 0;
};

struct PipeClock {
    double free = 0;   // the next instruction may start
    double ready = 0;  // flags that the pipe has waited for
    double done = 0;   // everything it was given is complete
    double started[kMaxDepth] = {};
    uint32_t issued = 0;
    Flights flights;
};

enum class CoreStatus : uint8_t { kReady, kBarrier, kCross, kDone };

struct RankState;

struct CoreState : Hot {
    Core core;
    Fiber fiber;
    void* host = nullptr;  // whose fiber it is
    RankState* rank = nullptr;
    uint32_t global = 0;
    PipeClock pipes[kPipes];
    double flag[kFlags] = {};
    Pipe flag_from[kFlags] = {};
    CoreStatus status = CoreStatus::kDone;
    bool started = false;
    const char* phase = nullptr;  // whose number is `phase_number`
    uint32_t phase_number = 0;
    double phase_began = 0;
    Path path;
    // Of the wait that is going on: when the looks that were fruitless last began, and the landings known
    // then.
    bool looking = false;
    double looked_at = 0;
    double fruitless_at = -1;
    size_t look_size = 0;
    size_t scan_from = 0;
    double wait_began = 0;
    uint64_t released_by = 0;  // flow of the store that ended it, as far as is known
    int cross_id = 0;
    uint32_t cross_turn = 0;
};

}  // namespace twin::timed
