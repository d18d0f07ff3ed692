// What lies between a core and a rank's GM: own memory, the other die of the package, a link plane or a mesh
// of links, and the NIC between servers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "twin/engine/predict.h"

namespace twin::timed {

// A shared resource that carries so many bytes a nanosecond. Time is cut into buckets that fill up, so that
// reservations may come in another order than their times: an earlier start still gets the free capacity.
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

class Fabric {
public:
    enum class Link : uint8_t { kOwn, kPackage, kServer, kInterNode };

    Fabric(const Costs& costs, uint32_t ranks) : costs_(costs) {
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            memory_.emplace_back(costs.memory_gbps);
            for (int way = 0; way < 2; ++way) {
                package_.emplace_back(costs.package_gbps);
                plane_.emplace_back(costs.link_gbps);
                nic_.emplace_back(costs.nic_gbps);
            }
        }
    }

    Link LinkOf(uint32_t from, uint32_t to) const {
        if (from == to) return Link::kOwn;
        const auto share = [&](double size) {
            const uint32_t n = size < 1 ? 1 : static_cast<uint32_t>(size);
            return from / n == to / n;
        };
        if (share(costs_.ranks_per_package)) return Link::kPackage;
        return share(costs_.ranks_per_server) ? Link::kServer : Link::kInterNode;
    }
    // There and back, without the time that bytes take.
    double RoundTrip(uint32_t from, uint32_t to, bool store) const {
        switch (LinkOf(from, to)) {
            case Link::kOwn: return store ? costs_.write_latency_ns : costs_.read_latency_ns;
            case Link::kPackage: return costs_.package_latency_ns + costs_.read_latency_ns;
            case Link::kServer: return costs_.server_latency_ns + costs_.read_latency_ns;
            default: return costs_.far_latency_ns + costs_.read_latency_ns;
        }
    }
    // `bytes` leave `source` at `start` and get to `target`: when the last has arrived, without latency.
    double Carry(uint32_t source, uint32_t target, double start, double bytes, uint32_t memory_of) {
        double end = memory_[memory_of].Reserve(start, bytes);
        const Link link = LinkOf(source, target);
        if (link == Link::kOwn) return end;
        if (link != Link::kPackage && costs_.mesh != 0)
            return std::max(end, Mesh(source, target).Reserve(start, bytes));
        std::vector<Bandwidth>& links = link == Link::kPackage ? package_ : plane_;
        end = std::max(end, links[2 * source].Reserve(start, bytes));
        return std::max(end, links[2 * target + 1].Reserve(start, bytes));
    }
    // Of a BatchWrite item.
    double CarryByNic(uint32_t source, uint32_t target, double start, double bytes) {
        const double end = nic_[2 * source].Reserve(start, bytes);
        return std::max(end, nic_[2 * target + 1].Reserve(start, bytes));
    }

    std::vector<LinkUse> Use() const {
        std::vector<LinkUse> links;
        const auto add = [&](const char* name, size_t rank, const Bandwidth& link) {
            if (link.total() > 0) links.push_back({name, static_cast<int>(rank), link.total(), link.gbps()});
        };
        for (size_t rank = 0; rank < memory_.size(); ++rank) {
            add("memory", rank, memory_[rank]);
            static const char* const kNames[][2] = {
                {"package out", "package in"}, {"link out", "link in"}, {"nic out", "nic in"}};
            const std::vector<Bandwidth>* const kinds[] = {&package_, &plane_, &nic_};
            for (int kind = 0; kind < 3; ++kind) {
                for (int way = 0; way < 2; ++way) add(kNames[kind][way], rank, (*kinds[kind])[2 * rank + way]);
            }
        }
        for (const auto& entry : mesh_) add("mesh link", entry.first / memory_.size(), entry.second);
        return links;
    }

private:
    Bandwidth& Mesh(uint32_t from, uint32_t to) {
        const uint64_t key = from * memory_.size() + to;
        return mesh_.try_emplace(key, costs_.link_gbps).first->second;
    }
    const Costs& costs_;
    std::vector<Bandwidth> memory_;                 // by rank
    std::vector<Bandwidth> package_, plane_, nic_;  // by rank: out, in
    std::map<uint64_t, Bandwidth> mesh_;            // by ordered pair of ranks
};

}  // namespace twin::timed
