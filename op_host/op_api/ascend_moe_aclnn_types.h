// The opaque types of aclnn entry points: CANN's where its headers are, else declarations of our own, so that
// the entry points also build for the virtual NPU.
#ifndef ASCEND_MOE_ACLNN_TYPES_H
#define ASCEND_MOE_ACLNN_TYPES_H

#include <cstdint>

#if defined(__has_include)
#if __has_include("aclnn/acl_meta.h")
#define ASCEND_MOE_HAS_ACLNN 1
#endif
#endif

#ifdef ASCEND_MOE_HAS_ACLNN
#include "aclnn/acl_meta.h"
#else
struct aclTensor;
struct aclOpExecutor;
typedef int32_t aclnnStatus;
typedef void* aclrtStream;
#endif

#define ASCEND_MOE_ACLNN_API extern "C" __attribute__((visibility("default")))

#endif  // ASCEND_MOE_ACLNN_TYPES_H
