// For test_op_api.py: what lies below the hand-written aclnn entry points, recording what reaches it.
// Without OP_API_OLD_BASE there is also an op base that knows HCCL server types.
#include <cstdint>
#include <cstring>

extern "C" {

// Every argument as a number, in order; the text of strings beside it.
int64_t probe_arguments[64];
char probe_texts[64][32];
int probe_count = 0;
int probe_launches = 0;
int probe_server_type = -1;
int probe_server_type_at_launch = -1;
const char* probe_soc = nullptr;

struct aclTensor;
struct aclOpExecutor;

}  // extern "C"

static void Record(const void* pointer) {
    probe_arguments[probe_count++] = reinterpret_cast<intptr_t>(pointer);
}
static void Record(int64_t number) { probe_arguments[probe_count++] = number; }
static void Record(const char* text) {
    strncpy(probe_texts[probe_count], text == nullptr ? "(null)" : text, sizeof(probe_texts[0]) - 1);
    ++probe_count;
}

template <typename... Arguments>
static int32_t RecordAll(Arguments... arguments) {
    probe_count = 0;
    memset(probe_texts, 0, sizeof(probe_texts));
    (Record(arguments), ...);
    return 4321;
}

using Tensor = const aclTensor*;
using Text = const char*;
using Int = int64_t;

extern "C" int32_t aclnnInnerAscendMoeDistributeDispatchGetWorkspaceSize(
    Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Text f, Int g, Int h, Int i, Text j, Int k, Int l,
    Int m, Int n, Int o, Int p, Int q, Int r, Text s, Int t, Int u, Int v, Int w, Int x, Int y, Tensor z,
    Tensor aa, Tensor ab, Tensor ac, Tensor ad, Tensor ae, Tensor af, Tensor ag, uint64_t* ah,
    aclOpExecutor** ai) {
    return RecordAll(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z, aa, ab, ac,
                     ad, ae, af, ag, static_cast<const void*>(ah), static_cast<const void*>(ai));
}

extern "C" int32_t aclnnInnerAscendMoeDistributeCombineGetWorkspaceSize(
    Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h, Tensor i, Text j, Int k,
    Int l, Int m, Text n, Int o, Int p, Int q, Int r, Int s, Int t, Int u, Int v, Int w, Text x, Int y, Int z,
    Int aa, Int ab, Int ac, Int ad, Tensor ae, Tensor af, uint64_t* ag, aclOpExecutor** ah) {
    return RecordAll(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z, aa, ab, ac,
                     ad, ae, af, static_cast<const void*>(ag), static_cast<const void*>(ah));
}

extern "C" int32_t aclnnInnerAscendMoeProbeGetWorkspaceSize(Text a, Int b, Int c, Int d, Int e, Int f, Int g,
                                                            Int h, Int i, Tensor j, uint64_t* k,
                                                            aclOpExecutor** l) {
    return RecordAll(a, b, c, d, e, f, g, h, i, j, static_cast<const void*>(k), static_cast<const void*>(l));
}

static int32_t Launch(void* workspace, uint64_t bytes, aclOpExecutor* executor, void* stream) {
    ++probe_launches;
    probe_server_type_at_launch = probe_server_type;
    return RecordAll(static_cast<const void*>(workspace), static_cast<int64_t>(bytes),
                     static_cast<const void*>(executor), static_cast<const void*>(stream));
}
extern "C" int32_t aclnnInnerAscendMoeDistributeDispatch(void* a, uint64_t b, aclOpExecutor* c, void* d) {
    return Launch(a, b, c, d);
}
extern "C" int32_t aclnnInnerAscendMoeDistributeCombine(void* a, uint64_t b, aclOpExecutor* c, void* d) {
    return Launch(a, b, c, d);
}
extern "C" int32_t aclnnInnerAscendMoeProbe(void* a, uint64_t b, aclOpExecutor* c, void* d) {
    return Launch(a, b, c, d);
}

#ifndef OP_API_OLD_BASE
extern "C" void NnopbaseSetHcclServerType(void*, int type) { probe_server_type = type; }
extern "C" const char* aclrtGetSocName() { return probe_soc; }
#endif
