#include "key.h"

#include <ATen/core/Tensor.h>

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>

namespace ascend_moe_torch {

namespace {

// First byte of an argument's words: what follows.
enum Tag : uint64_t { kNone = 1, kTensor, kInt, kText, kAbsentVariable };

constexpr int kTagShift = 56, kTypeShift = 32;
constexpr uint64_t kMaxDims = 8;
constexpr size_t kMaxText = 512;
constexpr uint64_t kMix = 0x9E3779B97F4A7C15u;

std::vector<std::string>& Variables() {
    static auto* names = new std::vector<std::string>;  // never destroyed: threads may outlive main()
    return *names;
}

// The watched variables' words. They are looked up again when the environment's entries are others: from cold
// caches a look through all of their texts takes longer than the rest of a key. Entries are never written
// to in place (setenv, which os.environ calls, makes new ones).
struct Environment {
    std::vector<const char*> entries;
    std::vector<uint64_t> words;
    bool fits = false;

    bool Same() const {
        size_t i = 0;
        while (i < entries.size() && environ != nullptr && environ[i] == entries[i] && entries[i] != nullptr)
            ++i;
        return i + 1 == entries.size() && environ != nullptr && environ[i] == nullptr;
    }
    void Note() {
        entries.clear();
        for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry)
            entries.push_back(*entry);
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

uint64_t Place() { return place_here; }

bool Key::Make(uint64_t op, const Argument* arguments, size_t count) {
    size_ = 0;
    bool fits = Add(op) && Add(place_here);
    fits = fits && AddVariables();
    for (size_t i = 0; fits && i < count; ++i) fits = AddArgument(arguments[i]);
    return fits;
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
    if (!environment.Same()) {
        const size_t before = size_;
        environment.Note();
        environment.fits = true;
        for (const std::string& name : Variables()) environment.fits = environment.fits && AddVariable(name);
        environment.words.assign(words_.begin() + before, words_.begin() + size_);
        return environment.fits;
    }
    const std::vector<uint64_t>& known = environment.words;
    if (!environment.fits || size_ + known.size() > words_.size()) return false;
    memcpy(&words_[size_], known.data(), known.size() * sizeof(uint64_t));
    size_ += known.size();
    return true;
}

bool Key::AddVariable(const std::string& name) {
    const char* text = getenv(name.c_str());
    return text == nullptr ? Add(Head(kAbsentVariable)) : AddText(text);
}

bool Key::AddTensor(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided) return false;
    if (!tensor.is_contiguous()) return false;
    const at::IntArrayRef sizes = tensor.sizes();
    if (sizes.size() > kMaxDims) return false;
    bool fits = Add(Head(kTensor, static_cast<uint64_t>(tensor.scalar_type()) << kTypeShift | sizes.size()));
    for (const int64_t size : sizes) fits = fits && Add(static_cast<uint64_t>(size));
    return fits;
}

bool Key::AddArgument(const Argument& argument) {
    switch (argument.kind) {
        case Argument::kNone: return Add(Head(kNone));
        case Argument::kTensor: return AddTensor(*argument.tensor);
        case Argument::kInt: return Add(Head(kInt)) && Add(static_cast<uint64_t>(argument.number));
        case Argument::kText: return AddText(argument.text);
        case Argument::kOther: break;
    }
    return false;
}

}  // namespace ascend_moe_torch
