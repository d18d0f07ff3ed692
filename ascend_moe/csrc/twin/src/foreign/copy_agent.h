// Which agent an engine gives a rank.
#pragma once

#include <memory>

#include "twin/copy_agent.h"

namespace twin {

// The agent of one rank and group. The checked engine brings its own: one that its scheduler steps.
std::unique_ptr<CopyAgent> MakeCopyAgent(int rank);

}  // namespace twin
