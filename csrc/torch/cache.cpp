#include "cache.h"

#include <pthread.h>

#include <mutex>
#include <unordered_map>

namespace ascend_moe_torch {

namespace {

constexpr size_t kMostCalls = 1024;

using ByHash = std::unordered_multimap<uint64_t, std::shared_ptr<const Prepared>>;

struct Calls {
    std::mutex mutex;
    uint64_t generation = 0;
    ByHash by_hash;
};

// Never destroyed: threads may outlive main().
Calls* calls = new Calls;

// A forked child has none of its parent's communicators, and maybe a mutex that was held.
void AfterFork() { calls = new Calls; }
const int registered = pthread_atfork(nullptr, nullptr, &AfterFork);

}  // namespace

uint64_t Generation() {
    const std::lock_guard<std::mutex> lock(calls->mutex);
    return calls->generation;
}

std::shared_ptr<const Prepared> Find(const Key& key) {
    const uint64_t hash = key.hash();
    const std::lock_guard<std::mutex> lock(calls->mutex);
    const auto [first, last] = calls->by_hash.equal_range(hash);
    for (auto call = first; call != last; ++call) {
        if (key == call->second->key) return call->second;
    }
    return nullptr;
}

void Remember(uint64_t generation, std::shared_ptr<const Prepared> made, const Key& key) {
    const uint64_t hash = key.hash();
    ByHash dropped;  // their plans and ends go after the lock
    const std::lock_guard<std::mutex> lock(calls->mutex);
    if (calls->generation != generation) return;
    const auto [first, last] = calls->by_hash.equal_range(hash);
    for (auto call = first; call != last; ++call) {
        if (key == call->second->key) {
            call->second.swap(made);
            return;
        }
    }
    if (calls->by_hash.size() >= kMostCalls) dropped.swap(calls->by_hash);
    calls->by_hash.emplace(hash, std::move(made));
}

void Forget() {
    ByHash dropped;
    const std::lock_guard<std::mutex> lock(calls->mutex);
    ++calls->generation;
    dropped.swap(calls->by_hash);
}

}  // namespace ascend_moe_torch
