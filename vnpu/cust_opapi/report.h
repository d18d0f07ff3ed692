// What was launched, for tests: no fallback can pass for a launch.
#pragma once

#include <cstdint>

namespace vnpu_moe {

void CountLaunch(const char* op_type);
void CountSkip(const char* op_type);  // all outputs empty

}  // namespace vnpu_moe
