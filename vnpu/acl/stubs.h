// Functions whose whole answer is a constant. The names are in the *_table.h files, two kinds:
//
//   VNPU_NOTHING(name)   there is nothing to do on host memory: it returns 0, of any width
//   VNPU_REFUSED(name)   it would have to do something: it says so on stderr, by name, and returns an error
//
// No arguments are looked at; on the ABIs served (x86-64, AArch64) a function may be called with more than it
// takes.
#pragma once

#include "state.h"

#define VNPU_NOTHING(name) \
    VNPU_EXPORT int64_t name() { return 0; }
#define VNPU_REFUSED(name) \
    VNPU_EXPORT int name() { return vnpu::Unsupported(#name); }
