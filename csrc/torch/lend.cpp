#include "lend.h"

#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <atomic>

#include "cache.h"
#include "key.h"
#include "kernels.h"

namespace ascend_moe_torch {

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 62;

std::atomic<bool> ended{false};

// Bytes of such a tensor; 0: Python shall say what is wrong with it, or make an empty one.
uint64_t BytesOf(at::IntArrayRef sizes, at::ScalarType type) {
    if (type != at::kBFloat16 && type != at::kHalf && type != at::kFloat) return 0;
    int64_t bytes = static_cast<int64_t>(c10::elementSize(type));
    for (const int64_t size : sizes) {
        if (size <= 0 || bytes > kMostBytes / size) return 0;
        bytes *= size;
    }
    return static_cast<uint64_t>(bytes);
}

void GiveBack(const Lent& lent, uint32_t generation) {
    if (getpid() != lent.process) return;
    if (lent.release(lent.area, generation) != 0 && !ended.load()) lent.unused();
}

}  // namespace

void EndLending() { ended.store(true); }

std::optional<at::Tensor> Lend(at::IntArrayRef sizes, at::ScalarType type, std::string_view group_ep,
                               int64_t world, int64_t rank) {
    const uint64_t bytes = BytesOf(sizes, type);
    if (bytes == 0 || Paused()) return std::nullopt;
    const std::shared_ptr<const Lender> lender = FindLender(group_ep, world, rank);
    // A turn that another thread has is not waited for here: Python's way does not need it.
    if (lender == nullptr || !lender->group.lives() || !lender->gate->AcquireFor(0)) return std::nullopt;
    uint64_t out[4];
    const bool taken =
        lender->gate->communicator() != nullptr && lender->lent.take(lender->lent.area, bytes, out) == 0;
    lender->gate->Release();
    if (!taken) return std::nullopt;
    const uint32_t generation = static_cast<uint32_t>(out[1]);
    return at::from_blob(
        reinterpret_cast<void*>(out[0]), sizes,
        [lent = lender->lent, generation](void*) { GiveBack(lent, generation); },
        at::TensorOptions().dtype(type));
}

}  // namespace ascend_moe_torch
