#include "cache.h"

#include <pthread.h>

#include <mutex>
#include <unordered_map>
#include <vector>

#include "lend.h"

namespace ascend_moe_torch {

namespace {

constexpr size_t kMostCalls = 1024, kMostLenders = 64;

using Lenders = std::vector<std::shared_ptr<const Lender>>;
using ByHash = std::unordered_multimap<uint64_t, std::shared_ptr<const Entry>>;

struct Calls {
    std::mutex mutex;
    uint64_t generation = 0;
    ByHash by_hash;
    Lenders lenders;
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

std::shared_ptr<const Entry> Find(const Key& key) {
    const uint64_t hash = key.hash();
    const std::lock_guard<std::mutex> lock(calls->mutex);
    const auto [first, last] = calls->by_hash.equal_range(hash);
    for (auto found = first; found != last; ++found) {
        if (key == found->second->key) return found->second;
    }
    return nullptr;
}

void Remember(uint64_t generation, std::shared_ptr<const Entry> entry, const Key& key) {
    const uint64_t hash = key.hash();
    ByHash dropped;  // their plans and groups end after the lock
    const std::lock_guard<std::mutex> lock(calls->mutex);
    if (calls->generation != generation) return;
    const auto [first, last] = calls->by_hash.equal_range(hash);
    for (auto found = first; found != last; ++found) {
        if (key == found->second->key) {
            found->second.swap(entry);
            return;
        }
    }
    if (calls->by_hash.size() >= kMostCalls) dropped.swap(calls->by_hash);
    calls->by_hash.emplace(hash, std::move(entry));
}

std::shared_ptr<const Lender> FindLender(std::string_view group_ep, int64_t world, int64_t rank) {
    const uint64_t place = Place();
    const std::lock_guard<std::mutex> lock(calls->mutex);
    for (const auto& lender : calls->lenders) {
        if (lender->rank == rank && lender->world == world && lender->place == place &&
            lender->group_ep == group_ep)
            return lender;
    }
    return nullptr;
}

void RememberLender(uint64_t generation, std::shared_ptr<const Lender> lender) {
    Lenders dropped;
    const std::lock_guard<std::mutex> lock(calls->mutex);
    if (calls->generation != generation) return;
    if (calls->lenders.size() >= kMostLenders) dropped.swap(calls->lenders);
    calls->lenders.push_back(std::move(lender));
}

void Forget() {
    ByHash dropped;
    Lenders lenders;
    const std::lock_guard<std::mutex> lock(calls->mutex);
    ++calls->generation;
    dropped.swap(calls->by_hash);
    lenders.swap(calls->lenders);
}

}  // namespace ascend_moe_torch
