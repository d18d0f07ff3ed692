// What meeting costs: fibers left and entered again, SyncAll, an empty launch. No test runs it:
//   g++ -std=c++17 -O3 -Iinclude tests/switch_bench.cpp src/*.cpp src/*.S -o switch_bench
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "kernel_operator.h"
#include "twin/engine/launch.h"

namespace {

constexpr int kRounds = 30, kCalls = 2000, kLaunches = 100;

// The best of some rounds, in nanoseconds a call.
double Best(int calls, const std::function<void()>& run) {
    double best = 1e18;
    for (int round = 0; round < kRounds; ++round) {
        const auto begin = std::chrono::steady_clock::now();
        run();
        const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
        best = std::min(best, taken.count() / calls);
    }
    return best;
}

}  // namespace

int main() {
    twin::Device device(0);
    for (uint32_t cores : {1u, 2u, 8u, 48u}) {
        twin::LaunchSpec spec;
        spec.block_dim = cores;
        const double meet = Best(kCalls, [&] {
            device.Launch(spec, [] {
                for (int i = 0; i < kCalls; ++i) AscendC::SyncAll();
            });
        });
        const double leave = Best(kCalls, [&] {
            device.Launch(spec, [] {
                for (int i = 0; i < kCalls; ++i) twin::GiveWay(twin::Loc::Here());
            });
        });
        const double launch = Best(kLaunches, [&] {
            for (int i = 0; i < kLaunches; ++i) device.Launch(spec, [] {});
        });
        printf("%2u cores: SyncAll %.0f ns, a fiber left and entered again %.0f ns, empty launch %.0f ns\n",
               cores, meet, leave / cores, launch);
    }
}
