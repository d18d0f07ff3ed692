#include "op_launch.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "ascend_moe.h"

namespace ops {

namespace {

// All ranks of a process share one recording; each launch has a timeline of its own until it ends.
struct Session {
    std::mutex mutex;
    std::atomic<uint64_t> number{0};  // odd: going on
    twin::Timeline all;
};
Session g_session;

#if defined(TWIN_CHECKED) || defined(TWIN_TIMED)
constexpr bool kRecords = false;
#else
constexpr bool kRecords = true;
#endif

}  // namespace

TracedLaunch::TracedLaunch(twin::LaunchSpec& spec) : spec_(spec) {
    if (g_session.number.load(std::memory_order_acquire) % 2 == 0) return;
    const std::lock_guard<std::mutex> lock(g_session.mutex);
    const uint64_t number = g_session.number.load();
    if (number % 2 == 0) return;
    session_ = number;
    timeline_.limit = g_session.all.limit;
    spec_.timeline = &timeline_;
}

TracedLaunch::~TracedLaunch() {
    if (session_ == 0) return;
    spec_.timeline = nullptr;
    const std::lock_guard<std::mutex> lock(g_session.mutex);
    twin::Timeline& all = g_session.all;
    // A recording that has been stopped still includes the launches that began before the stop.
    if ((g_session.number.load() + 1) / 2 != (session_ + 1) / 2) return;
    const uint64_t room = all.limit - std::min<uint64_t>(all.limit, all.events.size());
    const uint64_t taken = std::min<uint64_t>(room, timeline_.events.size());
    all.dropped += timeline_.dropped + timeline_.events.size() - taken;
    all.events.insert(all.events.end(), timeline_.events.begin(),
                      timeline_.events.begin() + static_cast<int64_t>(taken));
}

}  // namespace ops

int am_trace_start(uint64_t limit) {
    if (!ops::kRecords) return 2;
    const std::lock_guard<std::mutex> lock(ops::g_session.mutex);
    const uint64_t number = ops::g_session.number.load();
    if (number % 2 != 0) return 1;
    ops::g_session.all = twin::Timeline();
    ops::g_session.all.limit = limit;
    ops::g_session.number.store(number + 1, std::memory_order_release);
    return 0;
}

void am_trace_stop(void) {
    const std::lock_guard<std::mutex> lock(ops::g_session.mutex);
    const uint64_t number = ops::g_session.number.load();
    if (number % 2 != 0) ops::g_session.number.store(number + 1);
}

uint64_t am_trace_events(void* out, uint64_t most, uint64_t* dropped) {
    const std::lock_guard<std::mutex> lock(ops::g_session.mutex);
    const twin::Timeline& all = ops::g_session.all;
    const uint64_t count = std::min<uint64_t>(most, all.events.size());
    std::copy_n(all.events.data(), count, static_cast<twin::TimelineEvent*>(out));
    if (dropped != nullptr) *dropped = all.dropped;
    return all.events.size();
}

uint64_t am_trace_event_bytes(void) { return sizeof(twin::TimelineEvent); }
