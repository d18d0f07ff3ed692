// What the tiling function must know of the machine: SoC family, vector cores, window, deadline.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tiling/platform/platform_ascendc.h"

#include "protocol/tiling.h"

// PlatformAscendC::GetSocVersion gives A2 and A3 the same value, by its documentation. The platform's own
// table tells them apart, and so does the runtime, where that is loaded.
#if defined(__has_include)
#if __has_include("platform/platform_infos_def.h")
#include "platform/platform_infos_def.h"
#define ASCEND_MOE_HAS_PLATFORM_INFOS 1
#endif
#endif
extern "C" __attribute__((weak)) const char* aclrtGetSocName();
extern "C" __attribute__((weak)) int aclrtGetOpExecuteTimeout(uint32_t* milliseconds);

namespace moe {

constexpr int64_t kDefaultWindowMiB = 200;  // HCCL's own default of HCCL_BUFFSIZE
constexpr int64_t kA2RanksPerServer = 8;
constexpr int64_t kA2StateMiB = 1;  // the last MiB of windowsIn; A3 has an area of its own for it
constexpr int64_t kMicros = 1000 * 1000;
constexpr int64_t kLongestWaitSeconds = 300, kTimeoutMarginSeconds = 10;

struct SocName {
    char text[64];
    bool IsA3() const { return strncmp(text, "Ascend910_93", 12) == 0; }
    bool IsA2() const { return strncmp(text, "Ascend910B", 10) == 0; }
};

// "Ascend910B" or "Ascend910_93", maybe with a model number behind; empty when nobody knows.
inline SocName SocOf(fe::PlatFormInfos* platform) {
    SocName soc = {};
    std::string name;
#ifdef ASCEND_MOE_HAS_PLATFORM_INFOS
    if (platform != nullptr) platform->GetPlatformRes("version", "Short_SoC_version", name);
#else
    (void)platform;
#endif
    if (name.empty() && aclrtGetSocName != nullptr) {
        const char* running = aclrtGetSocName();
        if (running != nullptr) name = running;
    }
    name.copy(soc.text, sizeof(soc.text) - 1);
    return soc;
}

// A number above zero from the environment, else `otherwise`; -1 for text that is no such number.
inline double NumberFromEnvironment(const char* name, double otherwise) {
    const char* text = getenv(name);
    if (text == nullptr || *text == '\0') return otherwise;
    char* end = nullptr;
    errno = 0;
    const double value = strtod(text, &end);
    return errno == 0 && end != text && *end == '\0' && value > 0 ? value : -1;
}

// MiB of a communicator's window, as HCCL_BUFFSIZE says it; -1 when that is no whole number.
inline int64_t WindowMiBOf(int64_t attribute) {
    if (attribute > 0) return attribute;
    const double given = NumberFromEnvironment("HCCL_BUFFSIZE", static_cast<double>(kDefaultWindowMiB));
    const int64_t whole = given > 0 && given < 1e9 ? static_cast<int64_t>(given) : -1;
    return static_cast<double>(whole) == given ? whole : -1;
}

// Longest wait of a kernel: PROTOCOL's rule, the smaller of 300 s and the op-execute timeout less 10 s,
// unless the call or ASCEND_MOE_TIMEOUT_S says otherwise. -1 when the latter is no number above 0.
inline int64_t DeadlineMicrosOf(int64_t attribute) {
    if (attribute > 0) return attribute;
    const double given = NumberFromEnvironment("ASCEND_MOE_TIMEOUT_S", 0);
    if (given != 0)
        return given > 0 && given < 1e9 ? std::max<int64_t>(1, static_cast<int64_t>(given * kMicros)) : -1;
    int64_t seconds = kLongestWaitSeconds;
    uint32_t milliseconds = 0;
    if (aclrtGetOpExecuteTimeout != nullptr && aclrtGetOpExecuteTimeout(&milliseconds) == 0 &&
        milliseconds > 0) {
        seconds = std::min(seconds, std::max<int64_t>(1, milliseconds / 1000 - kTimeoutMarginSeconds));
    }
    return seconds * kMicros;
}

}  // namespace moe
