#include "group.h"

#ifdef ASCEND_MOE_C10D
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#endif

namespace ascend_moe_torch {

#ifdef ASCEND_MOE_C10D

struct Group::Known {
    std::string name;
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
};

Group::Group(const std::string& name) {
    try {
        const auto group = c10d::resolve_process_group(name);
        known_ = std::make_shared<Known>(Known{name, c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)});
    } catch (const std::exception&) {
        known_ = std::make_shared<Known>(
            Known{"", c10::weak_intrusive_ptr<c10d::ProcessGroup>(c10::intrusive_ptr<c10d::ProcessGroup>())});
    }
}

// destroy_process_group takes the name away before Python's own objects go; the weak reference keeps the
// address from being another group's.
bool Group::lives() const {
    if (known_ == nullptr) return true;
    if (known_->name.empty()) return false;
    try {
        return c10d::resolve_process_group(known_->name).get() == known_->group._unsafe_get_target();
    } catch (const std::exception&) {
        return false;
    }
}

#else

struct Group::Known {};

Group::Group(const std::string&) : known_(std::make_shared<Known>()) {}
bool Group::lives() const { return known_ == nullptr; }

#endif

}  // namespace ascend_moe_torch
