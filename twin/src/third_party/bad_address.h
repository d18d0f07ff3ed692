// A kernel that reads or writes through a pointer of its own into no memory ends with a finding, not the process.
#pragma once

namespace twin::third_party {

// While one lives, SIGSEGV and SIGBUS of a kernel end its core with an out-of-bounds finding. Signals of anybody else
// go to the handlers from before.
class BadAddresses {
public:
    BadAddresses();
    ~BadAddresses();
    BadAddresses(const BadAddresses&) = delete;
    BadAddresses& operator=(const BadAddresses&) = delete;
};

}  // namespace twin::third_party
