// A shared resource that carries so many bytes a nanosecond. Time is cut into buckets that fill up, so that
// reservations may come in another order than their times: whoever starts earlier still finds the gap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace twin::timed {

class Bandwidth {
public:
    static constexpr double kBucketNs = 64;

    explicit Bandwidth(double gbps = 1) : gbps_(gbps), capacity_(gbps * kBucketNs) {}

    // When the last of `bytes` has passed that are there from `start` on.
    double Reserve(double start, double bytes) {
        total_ += bytes;
        uint64_t at = Free(static_cast<uint64_t>(start / kBucketNs));
        double end = start;
        while (bytes > 0) {
            const double begin = static_cast<double>(at) * kBucketNs;
            double room = capacity_ - used_[at];
            if (begin < start) room = std::min(room, (begin + kBucketNs - start) * gbps_);
            const double part = std::min(room, bytes);
            used_[at] += part;
            bytes -= part;
            end = std::max(std::max(begin, start) + part / gbps_, begin + used_[at] / gbps_);
            if (used_[at] >= capacity_ * (1 - 1e-9)) next_[at] = at + 1;
            if (bytes > 0) at = Free(at + 1);
        }
        return end;
    }
    double total() const { return total_; }
    double gbps() const { return gbps_; }

private:
    // The first bucket from `at` on that is not full.
    uint64_t Free(uint64_t at) {
        Grow(at + 1);
        uint64_t root = at;
        while (next_[root] != root) {
            Grow(next_[root] + 1);
            root = next_[root];
        }
        while (next_[at] != root && at != root) {
            const uint64_t after = next_[at];
            next_[at] = root;
            at = after;
        }
        return root;
    }
    void Grow(uint64_t count) {
        while (next_.size() < count) {
            next_.push_back(next_.size());
            used_.push_back(0);
        }
    }
    double gbps_, capacity_, total_ = 0;
    std::vector<double> used_;
    std::vector<uint64_t> next_;  // itself, or a bucket to look at instead
};

}  // namespace twin::timed
