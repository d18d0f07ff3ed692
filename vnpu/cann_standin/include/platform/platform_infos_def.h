// Stand-in for CANN's header of this name: the platform of a virtual SoC.
#pragma once

#include <cstdint>
#include <string>

namespace fe {

class PlatFormInfos {
public:
    PlatFormInfos(std::string soc, uint32_t vectorCores) : soc_(std::move(soc)), vectorCores_(vectorCores) {}
    bool GetPlatformRes(const std::string& label, const std::string& key, std::string& value) const {
        if (label != "version" || key != "Short_SoC_version") return false;
        // As CANN's platform files have it: Ascend910B3 is an Ascend910B, Ascend910_9391 an Ascend910_93.
        for (const char* family : {"Ascend910_93", "Ascend910B"}) {
            if (soc_.compare(0, std::string(family).size(), family) == 0) return value = family, true;
        }
        value = soc_;
        return true;
    }
    uint32_t vectorCores() const { return vectorCores_; }

private:
    std::string soc_;
    uint32_t vectorCores_;
};

}  // namespace fe
