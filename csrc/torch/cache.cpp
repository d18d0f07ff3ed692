#include "call.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <sstream>
#include <unordered_map>

namespace ascend_moe_torch {

namespace {

// First byte of some words: what follows.
enum Tag : uint64_t { kNone = 1, kTensor, kText, kAbsentVariable };

constexpr int kTagShift = 56, kTypeShift = 32;
constexpr int64_t kMaxDims = 8;
constexpr size_t kMaxText = 512;
constexpr uint64_t kMix = 0x9E3779B97F4A7C15u;

std::vector<std::string>& Variables() {
    static auto* names = new std::vector<std::string>;  // never destroyed: threads may outlive main()
    return *names;
}

thread_local uint64_t place_here = 0;

constexpr uint64_t Head(Tag tag, uint64_t rest = 0) { return static_cast<uint64_t>(tag) << kTagShift | rest; }

}  // namespace

void Watch(const char* names) {
    std::istringstream words(names);
    Variables().assign(std::istream_iterator<std::string>(words), {});
}

void SetPlace(uint64_t place) { place_here = place; }

Key::Key(const Op& op, const Arguments& arguments, const Device& device) {
    const uint64_t place = static_cast<uint64_t>(static_cast<uint32_t>(device.type)) << kTypeShift |
                           static_cast<uint32_t>(device.index);
    valid_ = Add(op.number) && Add(place_here) && Add(place) && AddVariables() &&
             AddText(arguments.group_ep()) && AddText(arguments.group_tp()) && AddText(arguments.comm_alg());
    for (const Parameter& parameter : op.parameters) {
        if (parameter.kind == Parameter::kInt) {
            valid_ = valid_ && Add(static_cast<uint64_t>(arguments.attributes()[parameter.index]));
        } else if (parameter.kind == Parameter::kTensor) {
            valid_ = valid_ && AddTensor(arguments.tensor(parameter.index));
        }
    }
}

uint64_t Key::hash() const {
    uint64_t state = size_;
    for (size_t i = 0; i < size_; ++i) {
        state = (state ^ words_[i]) * kMix;
        state ^= state >> 29;
    }
    return state;
}

bool Key::operator==(const std::vector<uint64_t>& words) const {
    return words.size() == size_ && memcmp(words.data(), words_.data(), size_ * sizeof(uint64_t)) == 0;
}

bool Key::AddText(std::string_view text) {
    const size_t count = (text.size() + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    if (text.size() > kMaxText || !Add(Head(kText, text.size())) || size_ + count > words_.size())
        return false;
    if (count == 0) return true;
    words_[size_ + count - 1] = 0;
    memcpy(&words_[size_], text.data(), text.size());
    size_ += count;
    return true;
}

bool Key::AddVariables() {
    bool fits = true;
    for (const std::string& name : Variables()) {
        const char* text = getenv(name.c_str());
        fits = fits && (text == nullptr ? Add(Head(kAbsentVariable)) : AddText(text));
    }
    return fits;
}

bool Key::AddTensor(AtenTensorHandle tensor) {
    if (tensor == nullptr) return Add(Head(kNone));
    const int64_t rank = RankOf(tensor), *sizes = SizesOf(tensor);
    if (rank > kMaxDims) return false;
    const uint64_t dtype = static_cast<uint32_t>(DtypeOf(tensor));
    bool fits = Add(Head(kTensor, dtype << kTypeShift | static_cast<uint64_t>(rank)));
    for (int64_t i = 0; i < rank; ++i) fits = fits && Add(static_cast<uint64_t>(sizes[i]));
    return fits;
}

// ---- the calls by their keys ----

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
