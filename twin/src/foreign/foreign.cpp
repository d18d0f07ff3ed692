#include "foreign.h"

#include "world.h"

uint32_t twin_abi() { return 1; }

const char* twin_engine() {
#ifdef TWIN_CHECKED
    return "checked";
#else
    return "fast";
#endif
}

const char* twin_policies() { return "late,random,lazy,pct,replay,exhaustive"; }

void* twin_world_create(uint32_t world) {
    try {
        return new twin::foreign::World(world);
    } catch (...) {
        return nullptr;
    }
}
void twin_world_destroy(void* world) { delete static_cast<twin::foreign::World*>(world); }

int twin_world_run(void* world, const TwinLaunch* launches, const TwinOptions* options,
                   TwinOutcome* outcome) {
    *outcome = TwinOutcome();
    return static_cast<twin::foreign::World*>(world)->Run(launches, *options, outcome) ? 0 : 1;
}

int twin_world_run_rank(void* world, uint32_t rank, const TwinLaunch* launch, TwinOutcome* outcome) {
    *outcome = TwinOutcome();
    return static_cast<twin::foreign::World*>(world)->RunRank(rank, *launch, outcome) ? 0 : 1;
}
