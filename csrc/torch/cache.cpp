#include "call.h"

#include <pthread.h>
#include <unistd.h>

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

std::vector<std::string>& Variables() {
    static auto* names = new std::vector<std::string>;  // never destroyed: threads may outlive main()
    return *names;
}

// The words of the watched variables. They are looked up again only when the environment's entries are
// others: where the environment is large, a look through all of its texts takes longer than the rest of a
// key. setenv, which os.environ calls, never writes into an entry but makes a new one.
struct Environment {
    std::vector<const char*> entries;
    std::vector<uint64_t> words;
    bool fits = false;

    bool Same() const {
        size_t i = 0;
        while (i < entries.size() && environ != nullptr && environ[i] == entries[i] && entries[i] != nullptr) ++i;
        return i + 1 == entries.size() && environ != nullptr && environ[i] == nullptr;
    }
    void Store() {
        entries.clear();
        for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) entries.push_back(*entry);
        entries.push_back(nullptr);
    }
};
thread_local Environment environment;
thread_local uint64_t place_here = 0;

constexpr uint64_t Head(Tag tag, uint64_t rest = 0) { return static_cast<uint64_t>(tag) << kTagShift | rest; }

}  // namespace

void Watch(const char* names) {
    std::istringstream words(names);
    Variables().assign(std::istream_iterator<std::string>(words), {});
}

void SetPlace(uint64_t place) { place_here = place; }

Key::Key(const Op& op, const Arguments& arguments, const Device& device, uint32_t part) {
    const uint64_t place =
        static_cast<uint64_t>(static_cast<uint32_t>(device.type)) << kTypeShift | static_cast<uint32_t>(device.index);
    valid_ = Add(static_cast<uint64_t>(part) << kTypeShift | op.number) && Add(place_here) && Add(place) &&
             AddVariables() && AddText(arguments.group_ep()) && AddText(arguments.group_tp()) &&
             AddText(arguments.comm_alg());
    for (const Parameter& parameter : op.parameters) {
        if (parameter.kind == Parameter::kInt) {
            valid_ = valid_ && Add(static_cast<uint64_t>(arguments.attributes()[parameter.index]));
        } else if (parameter.kind == Parameter::kTensor) {
            valid_ = valid_ && AddTensor(arguments.tensor(parameter.index));
        }
    }
}

bool Key::AddText(std::string_view text) {
    const size_t count = (text.size() + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    if (text.size() > kMaxText || !Add(Head(kText, text.size())) || size_ + count > words_.size()) return false;
    if (count == 0) return true;
    words_[size_ + count - 1] = 0;
    memcpy(&words_[size_], text.data(), text.size());
    size_ += count;
    return true;
}

bool Key::AddVariables() {
    std::vector<uint64_t>& known = environment.words;
    if (environment.Same()) {
        if (!environment.fits || size_ + known.size() > words_.size()) return false;
        memcpy(&words_[size_], known.data(), known.size() * sizeof(uint64_t));
        size_ += known.size();
        return true;
    }
    environment.Store();  // before the look: a variable that another thread sets meanwhile shows at the next call
    const size_t before = size_;
    bool fits = true;
    for (const std::string& name : Variables()) {
        const char* text = getenv(name.c_str());
        fits = fits && (text == nullptr ? Add(Head(kAbsentVariable)) : AddText(text));
    }
    environment.fits = fits;
    known.assign(words_.begin() + before, words_.begin() + size_);
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

// The keys lie in what they lead to.
using ByKey = std::unordered_map<std::string_view, std::shared_ptr<const Prepared>>;

struct Calls {
    std::mutex mutex;
    uint64_t generation = 0;
    ByKey by_key;
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
    const std::lock_guard<std::mutex> lock(calls->mutex);
    const auto call = calls->by_key.find(key.bytes());
    return call == calls->by_key.end() ? nullptr : call->second;
}

void Remember(uint64_t generation, std::shared_ptr<const Prepared> made) {
    ByKey dropped;  // their plans and ends go after the lock
    ByKey::node_type replaced;
    const std::lock_guard<std::mutex> lock(calls->mutex);
    if (calls->generation != generation) return;
    if (calls->by_key.size() >= kMostCalls) dropped.swap(calls->by_key);
    replaced = calls->by_key.extract(made->key);
    calls->by_key.emplace(made->key, std::move(made));
}

void Forget() {
    ByKey dropped;
    const std::lock_guard<std::mutex> lock(calls->mutex);
    ++calls->generation;
    dropped.swap(calls->by_key);
}

}  // namespace ascend_moe_torch
