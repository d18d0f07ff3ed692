// $ASCEND_MOE_VNPU_REPORT names a file to which every process adds a line of JSON when it exits.
#include "cust_opapi.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace vnpu_moe {

namespace {

struct Counts {
    std::mutex mutex;
    std::map<std::string, uint64_t> launches, skips;
    int32_t server_type = -1;  // of HCCL, as the operators have set it; -1: never
    ~Counts() { Write(); }

    static std::string Object(const std::map<std::string, uint64_t>& counts) {
        std::string text = "{";
        for (const auto& [name, count] : counts)
            text += (text.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(count);
        return text + "}";
    }
    void Write() {
        const char* path = getenv("ASCEND_MOE_VNPU_REPORT");
        if (path == nullptr || *path == '\0') return;
        const char* rank = getenv("RANK");
        const std::string line =
            "{\"pid\": " + std::to_string(getpid()) + ", \"rank\": \"" + (rank != nullptr ? rank : "") +
            "\", \"soc\": \"" + vnpu_soc() + "\", \"server_type\": " + std::to_string(server_type) +
            ", \"launches\": " + Object(launches) + ", \"skips\": " + Object(skips) + "}\n";
        const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (file < 0) return;
        if (write(file, line.data(), line.size()) < 0) perror(path);
        close(file);
    }
};

Counts counts;  // its destructor writes, at the end of the process

}  // namespace

void CountLaunch(const char* op_type) {
    const std::lock_guard<std::mutex> lock(counts.mutex);
    ++counts.launches[op_type];
}
void CountSkip(const char* op_type) {
    const std::lock_guard<std::mutex> lock(counts.mutex);
    ++counts.skips[op_type];
}
void SetServerType(int32_t type) {
    const std::lock_guard<std::mutex> lock(counts.mutex);
    counts.server_type = type;
}

}  // namespace vnpu_moe

uint64_t vnpu_launches(const char* op_type) {
    using vnpu_moe::counts;
    const std::lock_guard<std::mutex> lock(counts.mutex);
    const auto entry = counts.launches.find(op_type);
    return entry == counts.launches.end() ? 0 : entry->second;
}
