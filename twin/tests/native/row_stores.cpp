// Rows stored past the caches or not, for test_row_stores.py.
#include <cstdint>

#include "twin/engine/host_cpu.h"

// Tells of stores of `bytes` that took nanos[i], and of a launch's end where nanos[i] is 0; `past[i]`: whether the next
// store goes past the caches.
extern "C" void run_stores(const uint64_t* nanos, uint32_t count, uint64_t bytes, uint8_t* past) {
    twin::RowStores stores;
    for (uint32_t i = 0; i < count; ++i) {
        if (nanos[i] == 0) {
            stores.LaunchEnds();
        } else if (!stores.past_caches()) {
            stores.Took(bytes, nanos[i]);
        }
        past[i] = stores.past_caches() ? 1 : 0;
    }
}

// Copies `rows` rows, from the half-th on past the caches.
extern "C" void copy_rows(uint8_t* to, const uint8_t* from, uint64_t bytes, uint32_t rows) {
    twin::RowStores stores;
    for (uint32_t row = 0; row < rows; ++row) {
        while (row >= rows / 2 && !stores.past_caches()) stores.Took(1, 1000);
        stores.Copy(to + row * bytes, from + row * bytes, bytes);
    }
    twin::StreamFence();
}
