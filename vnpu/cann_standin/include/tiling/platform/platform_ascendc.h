// Stand-in for CANN's header of this name.
#pragma once

#include "platform/platform_infos_def.h"

namespace platform_ascendc {

class PlatformAscendC {
public:
    explicit PlatformAscendC(fe::PlatFormInfos* platform) : platform_(platform) {}
    uint32_t GetCoreNumAiv() const { return platform_->vectorCores(); }
    uint32_t CalcTschBlockDim(uint32_t slices, uint32_t, uint32_t) const { return slices; }
    uint32_t GetLibApiWorkSpaceSize() const { return 16 * 1024 * 1024; }

private:
    fe::PlatFormInfos* platform_;
};

}  // namespace platform_ascendc
