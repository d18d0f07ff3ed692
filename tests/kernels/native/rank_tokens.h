// What all ranks know of a call: its shape, every rank's tokens, and where each row must arrive. Rows are
// small whole numbers and weights powers of two, so that every sum is exact and a quantised row comes back as
// it was.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "rules/args.h"

namespace ranks {

struct Shape {
    int world, local, topk, hidden, max_batch;
    int64_t cores, micros;
    uint32_t type;  // moe::kTypeFp32 or kTypeBf16
    int contract;
    bool quantised;
    int experts() const { return world * local; }
    std::string Text() const {
        return "W" + std::to_string(world) + " L" + std::to_string(local) + " cores " +
               std::to_string(cores) + " V" + std::to_string(contract) + (quantised ? " int8" : "") +
               (type == moe::kTypeBf16 ? " bf16" : " fp32");
    }
};

// One rank's tokens in one dispatch.
struct Tokens {
    int batch = 0;
    std::vector<float> rows;      // batch * hidden
    std::vector<int32_t> ids;     // batch * topk, -1: none
    std::vector<float> weights;   // batch * topk
    std::vector<uint8_t> active;  // batch
};

inline Tokens MakeTokens(const Shape& shape, uint32_t seed, int rank) {
    std::mt19937 random(seed * 64 + static_cast<uint32_t>(rank));
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
    Tokens tokens;
    tokens.batch = below(4) == 0 ? 0 : 1 + below(shape.max_batch);
    const int hot = below(shape.experts());
    for (int token = 0; token < tokens.batch; ++token) {
        tokens.active.push_back(below(6) != 0);
        const size_t first = tokens.ids.size();
        while (tokens.ids.size() < first + static_cast<size_t>(shape.topk)) {
            const int id = below(3) == 0 ? hot : below(shape.experts() + 1) - 1;
            // A token that names an expert twice may be one row too many for the window.
            if (id >= 0 && std::count(tokens.ids.begin() + static_cast<std::ptrdiff_t>(first),
                                      tokens.ids.end(), id) != 0)
                continue;
            tokens.ids.push_back(id);
            tokens.weights.push_back(std::ldexp(1.0f, below(3) - 1));
        }
        for (int i = 0; i < shape.hidden; ++i) tokens.rows.push_back(static_cast<float>(below(17) - 8));
    }
    return tokens;
}

struct Origin {
    int rank, token, k;
};

// Where the rows of a rank's expand_x come from, and the running counts of (expert, source).
struct Arrivals {
    std::vector<Origin> rows;
    std::vector<int32_t> counts;
};

inline Arrivals Expected(const Shape& shape, const std::vector<Tokens>& all, int rank) {
    Arrivals found;
    for (int expert = rank * shape.local; expert < (rank + 1) * shape.local; ++expert) {
        for (int source = 0; source < shape.world; ++source) {
            const Tokens& tokens = all[static_cast<size_t>(source)];
            for (size_t pair = 0; pair < tokens.ids.size(); ++pair) {
                const int token = static_cast<int>(pair) / shape.topk;
                if (tokens.ids[pair] == expert && tokens.active[static_cast<size_t>(token)] != 0)
                    found.rows.push_back({source, token, static_cast<int>(pair) % shape.topk});
            }
            found.counts.push_back(static_cast<int32_t>(found.rows.size()));
        }
    }
    return found;
}

// ---- element types ----

inline void Store(uint32_t type, float value, uint8_t* to) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if (type == moe::kTypeFp32) {
        memcpy(to, &bits, sizeof(bits));
    } else {
        const uint16_t upper = static_cast<uint16_t>(bits >> 16);  // exact: few significant bits
        memcpy(to, &upper, sizeof(upper));
    }
}

inline float Load(uint32_t type, const uint8_t* from) {
    uint32_t bits = 0;
    if (type == moe::kTypeFp32) {
        memcpy(&bits, from, sizeof(bits));
    } else {
        uint16_t upper;
        memcpy(&upper, from, sizeof(upper));
        bits = static_cast<uint32_t>(upper) << 16;
    }
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

inline std::vector<uint8_t> Packed(uint32_t type, const std::vector<float>& values) {
    const size_t size = moe::TypeSize(type);
    std::vector<uint8_t> bytes(values.size() * size);
    for (size_t i = 0; i < values.size(); ++i) Store(type, values[i], bytes.data() + i * size);
    return bytes;
}

}  // namespace ranks
