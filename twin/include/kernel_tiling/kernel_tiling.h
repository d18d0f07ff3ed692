// What tiling structs of communicating kernels begin with. The host fills both blocks; a kernel passes them
// on.
#pragma once

#include <cstdint>

struct Mc2InitTiling {
    uint8_t reserved[64] = {};
};
struct Mc2CcTiling {
    uint8_t reserved[280] = {};
};

namespace AscendC {
namespace tiling {
using ::Mc2CcTiling;
using ::Mc2InitTiling;
}  // namespace tiling
}  // namespace AscendC
