// Control of address_space_check.py: MISTAKE 0 is right and must pass; every other number is a mistake that
// g++ cannot see, and the check must report it. LEXICAL_MISTAKE marks the one that clang accepts too.
#include "kernel_operator.h"

struct Table {
    uint32_t rank;
    uint64_t windows[4];
};
inline uint32_t ByReference(const uint32_t& value) { return value; }
inline void TakePlain(const float*) {}

extern "C" __global__ __aicore__ void control(GM_ADDR context, GM_ADDR x) {
    __gm__ Table* table = reinterpret_cast<__gm__ Table*>(context);
    AscendC::GlobalTensor<float> row;
    row.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x));
    const uint32_t rank = table->rank;
    GM_ADDR window = reinterpret_cast<GM_ADDR>(table->windows[rank]);
    (void)window;
    (void)ByReference(rank);
#if MISTAKE == 1  // a GM address in a plain pointer
    uint8_t* plain = x;
    (void)plain;
#elif MISTAKE == 2  // the qualifier dropped by a cast
    float* plain = reinterpret_cast<float*>(x);
    (void)plain;
#elif MISTAKE == 3  // a tensor's GM address given to a function that takes host memory
    TakePlain(row.GetPhyAddr());
#elif MISTAKE == 4  // a struct copied out of GM
    Table copy = *table;
    (void)copy;
#elif MISTAKE == 5  // a GM word bound to a plain reference
    (void)ByReference(table->rank);
#elif MISTAKE == 6  // a UB address used as a GM address
    __ubuf__ float* ub = nullptr;
    row.SetGlobalBuffer(ub);
#elif MISTAKE == 7  // LEXICAL_MISTAKE: a C-style cast drops the qualifier silently
    float* plain = (float*)x;
    (void)plain;
#endif
}
