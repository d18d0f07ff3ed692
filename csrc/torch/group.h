// A process group by the name that c10d knows it by, for as long as it is that group.
#pragma once

#include <memory>
#include <string>

namespace ascend_moe_torch {

class Group {
public:
    Group() = default;  // of no process group: always lives
    // The group of this name now. Where this torch has no process groups, or none of the name, it is dead.
    explicit Group(const std::string& name);

    bool lives() const;

private:
    struct Known;
    std::shared_ptr<const Known> known_;
};

}  // namespace ascend_moe_torch
