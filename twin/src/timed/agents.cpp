// The server beside the cores that executes Hccl::BatchWrite, with modelled times.
#ifdef TWIN_TIMED

#include <algorithm>

#include "world.h"

namespace twin {

namespace timed {
World& WorldOf(const CoreState& core);
}

namespace {

class TimedAgent final : public CopyAgent {
public:
    uint32_t Post(std::vector<CopyItem> items, const Loc&) override {
        timed::CoreState& core = static_cast<timed::CoreState&>(*current_core().timed);
        double end = core.now;
        for (const CopyItem& item : items) end = std::max(end, timed::WorldOf(core).Post(core, item));
        ends_.push_back(ends_.empty() ? end : std::max(end, ends_.back()));
        return static_cast<uint32_t>(ends_.size());
    }
    uint32_t Finished() override {
        const double now = current_core().timed->now;
        return static_cast<uint32_t>(std::upper_bound(ends_.begin(), ends_.end(), now) - ends_.begin());
    }
    void Begin() override { ends_.clear(); }
    void End(bool) override {}  // what is under way lands by the world's clock

private:
    std::vector<double> ends_;  // of each task, ascending
};

}  // namespace

std::unique_ptr<CopyAgent> MakeCopyAgent() { return std::make_unique<TimedAgent>(); }

}  // namespace twin

#endif  // TWIN_TIMED
