// The twin that the operators run on, and the report of what was launched.
#include "cust_opapi.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "rules/args.h"

namespace vnpu_moe {

namespace {

std::string FileOfEngine() {
    const char* engine = getenv("ASCEND_MOE_ENGINE");
    return engine != nullptr && strcmp(engine, "checked") == 0 ? "libascend_moe_checked.so"
                                                               : "libascend_moe.so";
}

// $ASCEND_MOE_LIBRARY, else in the nearest folder above this library that has it: lib/ of the package.
std::string PathOfLibrary() {
    const char* given = getenv("ASCEND_MOE_LIBRARY");
    if (given != nullptr && *given != '\0') return given;
    Dl_info here;
    if (dladdr(reinterpret_cast<void*>(&TheLibrary), &here) == 0 || here.dli_fname == nullptr)
        return FileOfEngine();
    std::string folder = here.dli_fname;
    for (size_t end = folder.rfind('/'); end != std::string::npos; end = folder.rfind('/')) {
        folder.resize(end);
        const std::string path = folder + "/" + FileOfEngine();
        if (access(path.c_str(), R_OK) == 0) return path;
    }
    return FileOfEngine();
}

Library Open() {
    Library library;
    library.path = PathOfLibrary();
    void* handle = dlopen(library.path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        library.error = std::string("the twin cannot be opened: ") + dlerror();
        return library;
    }
#define VNPU_MOE_FUNCTION(name)                                                    \
    library.name = reinterpret_cast<decltype(library.name)>(dlsym(handle, #name)); \
    if (library.name == nullptr) library.error = library.path + " has no " #name ": build it again";
    VNPU_MOE_FUNCTIONS(VNPU_MOE_FUNCTION)
#undef VNPU_MOE_FUNCTION
    if (library.error.empty() && library.am_spec_bytes() != sizeof(moe::CallSpec))
        library.error = library.path + " describes calls differently: build it again";
    return library;
}

}  // namespace

const Library& TheLibrary() {
    static const Library* library = new Library(Open());
    return *library;
}

// ---- $ASCEND_MOE_VNPU_REPORT names a file to which every process adds a line of JSON when it exits ----

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
