// Device memory is host memory: anonymous pages, so that a kernel of the twin reads it like any other.
#pragma once

#include <cstddef>

#include "abi.h"

namespace vnpu {

// kLocationDevice, kLocationHost or kLocationUnregistered; the device's number in *device.
int WhereIs(const void* pointer, int* device);

}  // namespace vnpu
