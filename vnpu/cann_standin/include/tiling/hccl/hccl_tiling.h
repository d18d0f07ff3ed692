// Stand-in for CANN's header of this name: communication tiling in the sizes of CANN 9.1, filled in so that
// one can see what op_host asked for. CANN's own bytes are its secret; nobody but its libraries reads them.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

struct Mc2InitTiling {
    uint8_t reserved[64];
};
struct Mc2CcTiling {
    uint8_t reserved[512];
};

namespace AscendC {

class Mc2CcTilingConfig {
public:
    Mc2CcTilingConfig(const std::string& group, uint32_t opType, const std::string& algorithm)
        : group_(group), algorithm_(algorithm), opType_(opType) {}

    struct Init {
        uint32_t version;
        uint32_t count;
        uint32_t offset;  // of the task from the start of this struct
    };
    struct Task {
        char group[128];
        char algorithm[128];
        uint32_t opType;
    };

    uint32_t GetTiling(::Mc2InitTiling& tiling) {
        init_ = reinterpret_cast<uint8_t*>(&tiling);
        const Init init = {kVersion, 0, 0};
        memset(&tiling, 0, sizeof(tiling));
        memcpy(&tiling, &init, sizeof(init));
        return 0;
    }
    uint32_t GetTiling(::Mc2CcTiling& tiling) {
        Task task = {};
        if (init_ == nullptr || group_.size() >= sizeof(task.group)) return 1;
        group_.copy(task.group, sizeof(task.group) - 1);
        algorithm_.copy(task.algorithm, sizeof(task.algorithm) - 1);
        task.opType = opType_;
        memset(&tiling, 0, sizeof(tiling));
        memcpy(&tiling, &task, sizeof(task));
        const auto offset = reinterpret_cast<uint8_t*>(&tiling) - init_;
        const Init init = {kVersion, 1, static_cast<uint32_t>(offset)};
        memcpy(init_, &init, sizeof(init));
        return 0;
    }

private:
    static constexpr uint32_t kVersion = 100;
    std::string group_;
    std::string algorithm_;
    uint32_t opType_;
    uint8_t* init_ = nullptr;
};

}  // namespace AscendC
