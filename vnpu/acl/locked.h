// State of the whole process, for one thread at a time.
#pragma once

#include <mutex>

namespace vnpu {

// What this process has one of, used by one thread at a time: locked while this lives. Never destroyed:
// threads may outlive main().
template <typename T>
class Locked {
public:
    T& operator*() const { return the().value; }
    T* operator->() const { return &the().value; }

private:
    struct Guarded {
        std::mutex mutex;
        T value = {};
    };
    static Guarded& the() {
        static auto* guarded = new Guarded;
        return *guarded;
    }
    std::lock_guard<std::mutex> lock_{the().mutex};
};

}  // namespace vnpu
