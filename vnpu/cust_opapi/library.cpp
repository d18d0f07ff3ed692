#include "cust_opapi.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

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

}  // namespace vnpu_moe
