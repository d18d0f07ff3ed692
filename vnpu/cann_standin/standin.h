// Runs op_host, unchanged, without CANN: its op definitions, tiling and shape functions are compiled against
// the headers in include/, which are written from CANN's public API and have no more than op_host uses.
//
// For CMake: include(cmake/opp_standin.cmake), then target_link_libraries(<library> PRIVATE opp_standin):
// objects, position independent, hidden symbols. Without CMake: standin.cpp and the .cpp files right in
// op_host/, with
//   -std=c++17 -fvisibility=hidden -Icann_standin/include -Icann_standin -Iop_host -Iop_kernel
// The definitions register themselves at start-up, so never link them as an archive.
//
// Thread-safe. Tile() reads the environment as op_host does: HCCL_BUFFSIZE, ASCEND_MOE_TIMEOUT_S.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "register/op_def_registry.h"

namespace standin {

// Element types have aclDataType's numbers.
struct Tensor {
    bool given = false;  // an optional one may be absent
    int32_t type = ge::DT_UNDEFINED;
    std::vector<int64_t> dims;
};

struct Attribute {
    Attribute(int64_t value) : number(value) {}                         // NOLINT: written in lists
    Attribute(int value) : number(value) {}                             // NOLINT
    Attribute(const char* value) : isText(true), text(value) {}         // NOLINT
    Attribute(const std::string& value) : isText(true), text(value) {}  // NOLINT
    bool isText = false;
    int64_t number = 0;
    std::string text;
};

// Everything in the order of the definition.
struct Call {
    std::string opType;  // "AscendMoeDistributeDispatch"
    std::vector<Tensor> inputs;
    std::vector<Attribute> attributes;
    std::string soc = "Ascend910_9391";
    uint32_t vectorCores = 48;
};

struct Tiling {
    bool ok = false;
    std::string error;  // one line, where not ok
    std::vector<uint8_t> bytes;
    uint64_t tilingKey = 0;
    uint32_t blockDim = 0;
    uint32_t scheduleMode = 0;
    std::vector<size_t> workspaces;
};

struct Shapes {
    bool ok = false;
    std::string error;
    std::vector<Tensor> outputs;
};

Tiling Tile(const Call& call);
Shapes InferShapes(const Call& call);
// Null for an op type that op_host does not define. Names, types and defaults are its public members.
const ops::OpDef* Definition(const std::string& opType);
// What CANN adds to a workspace before the op's own part.
constexpr uint64_t kSystemWorkspaceBytes = 16 * 1024 * 1024;

}  // namespace standin
