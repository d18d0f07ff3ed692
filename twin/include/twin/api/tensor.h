// GlobalTensor and LocalTensor: typed views of GM and UB.
#pragma once

#include <type_traits>

#include "twin/api/qualifiers.h"
#include "twin/api/refused.h"
#include "twin/engine/engine.h"
#include "twin/math/numeric.h"

namespace AscendC {

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, LCM, SPM, TSCM, MAX };
using QuePosition = TPosition;
enum class Hardware : uint8_t { GM, UB, L1, L0A, L0B, L0C, BIAS, FIXBUF, MAX };
enum class CacheMode : uint8_t { CACHE_MODE_DISABLE, CACHE_MODE_NORMAL, CACHE_MODE_LAST, CACHE_MODE_PERSISTENT };

struct int4b_t;

// A tensor's element as tensor(i) gives it: reads are GetValue, stores are SetValue, with their checks.
template <class Tensor>
class ElementOf {
public:
    using T = typename Tensor::PrimType;
    TWIN_HOT ElementOf(const Tensor& tensor, uint64_t index, const twin::Loc& loc)
        : tensor_(tensor), index_(index), loc_(loc) {}
    ElementOf(const ElementOf&) = default;
    TWIN_HOT operator T() const { return tensor_.GetValue(Index(), loc_); }
    template <class U, class = std::enable_if_t<std::is_arithmetic_v<U> && !std::is_arithmetic_v<T>>>
    TWIN_HOT explicit operator U() const {
        return static_cast<U>(static_cast<T>(*this));
    }
    TWIN_HOT const ElementOf& operator=(T value) const {
        tensor_.SetValue(Index(), value, loc_);
        return *this;
    }
    TWIN_HOT const ElementOf& operator=(const ElementOf& other) const { return *this = static_cast<T>(other); }
#define TWIN_ASSIGN(op)                                                \
    template <class U>                                                 \
    TWIN_HOT const ElementOf& operator op## = (const U& value) const { \
        return *this = static_cast<T>(static_cast<T>(*this) op value); \
    }
    TWIN_ASSIGN(+)
    TWIN_ASSIGN(-)
    TWIN_ASSIGN(*)
    TWIN_ASSIGN(/)
    TWIN_ASSIGN(%)
    TWIN_ASSIGN(&)
    TWIN_ASSIGN(|)
    TWIN_ASSIGN(^)
    TWIN_ASSIGN(<<)
    TWIN_ASSIGN(>>)
#undef TWIN_ASSIGN
    TWIN_HOT const ElementOf& operator++() const { return *this += T(1); }
    TWIN_HOT const ElementOf& operator--() const { return *this -= T(1); }
    TWIN_HOT T operator++(int) const {
        const T before = *this;
        *this = static_cast<T>(before + T(1));
        return before;
    }
    TWIN_HOT T operator--(int) const {
        const T before = *this;
        *this = static_cast<T>(before - T(1));
        return before;
    }

private:
    TWIN_HOT auto Index() const { return static_cast<typename Tensor::IndexType>(index_); }
    Tensor tensor_;
    uint64_t index_;
    twin::Loc loc_;
};

// The address of a LocalTensor as kernels read and set it. A kernel that sets bufferAddr lays the tensor over UB
// itself: no buffer of a TPipe bounds it.
struct TBuffAddr {
    struct UbAddress {
        uint8_t* host = nullptr;
        operator uint32_t() const {
            twin::UbExposed();
            return static_cast<uint32_t>(host - twin::current_core().ub);
        }
        // Bytes from the beginning of UB, or an address that GetPhyAddr or get_imm gave. The length is what is left of
        // UB; a kernel that wants less sets dataLen afterwards.
        UbAddress& operator=(twin::Placed<uint64_t> address) {
            twin::UbExposed();
            uint8_t* const ub = twin::current_core().ub;
            const uint64_t at = address.value;
            const uint64_t offset = at < twin::kUbBytes ? at : at - reinterpret_cast<uintptr_t>(ub);
            TWIN_RAISE_IF(offset >= twin::kUbBytes, kOutOfBounds, address.loc,
                          "address %#llx is outside the %u bytes of UB", static_cast<unsigned long long>(at),
                          static_cast<unsigned>(twin::kUbBytes));
            host = ub + offset;
            // The first member of a TBuffAddr has its address.
            reinterpret_cast<TBuffAddr*>(this)->dataLen = static_cast<uint32_t>(twin::kUbBytes - offset);
            return *this;
        }
    };
    // The buffer that bounds the tensor, and the buffer's generation when the tensor was made.
    struct Position {
        uint32_t buffer = twin::kMaxUbBuffers;
        uint32_t generation = 0;
        operator uint8_t() const {
            if (buffer >= twin::kMaxUbBuffers) return static_cast<uint8_t>(buffer - twin::kMaxUbBuffers);
            return twin::current_core().buffers[buffer].position;
        }
        explicit operator TPosition() const { return static_cast<TPosition>(uint8_t{*this}); }
        Position& operator=(uint8_t position) {
            static_assert(static_cast<uint32_t>(TPosition::MAX) < twin::kRawUbBuffers,
                          "a raw buffer for each position");
            buffer = twin::kMaxUbBuffers + (position < twin::kRawUbBuffers ? position : 0);
            generation = 0;
            return *this;
        }
    };
    UbAddress bufferAddr;  // bytes from the beginning of UB
    uint32_t dataLen = 0;  // bytes
    Position logicPos;     // TPosition of its buffer
};

template <class T>
class LocalTensor {
    static_assert(!std::is_same_v<T, int4b_t>, "int4b_t: the emulator does not model it");

public:
    using PrimType = T;
    using IndexType = uint32_t;
    LocalTensor() = default;
    LocalTensor(uint8_t* data, uint32_t bytes, uint32_t buffer, uint32_t generation)
        : address_{{data}, bytes, {buffer, generation}} {}
    // Elements over UB by address, without a TPipe.
    LocalTensor(TPosition position, uint32_t address, uint32_t elements, TWIN_CALLER) {
        address_.logicPos = static_cast<uint8_t>(position);
        address_.bufferAddr = twin::Placed<uint64_t>(address, loc);
        SetSize(elements, loc);
    }

    // In the real API the length is 32-bit as well.
    uint32_t GetSize() const { return address_.dataLen / static_cast<uint32_t>(sizeof(T)); }
    uint32_t GetLength() const { return address_.dataLen; }

    // In the fast engine one test and one call aside: loops over elements are most of what a small op executes.
    TWIN_HOT T GetValue(uint32_t index, TWIN_CALLER) const {
        if (Plain(index)) return *Element(index);
        return GetChecked(*this, index, loc.file, loc.line);
    }
    TWIN_HOT void SetValue(uint32_t index, T value, TWIN_CALLER) const {
        if (Plain(index)) {
            *Element(index) = value;
        } else {
            SetChecked(*this, index, value, loc.file, loc.line);
        }
    }
    TWIN_HOT ElementOf<LocalTensor> operator()(uint32_t index, TWIN_CALLER) const { return {*this, index, loc}; }

    TWIN_HOT LocalTensor operator[](twin::Placed<uint32_t> offset) const {
        const uint64_t begin = static_cast<uint64_t>(offset.value) * sizeof(T);
        uint8_t* const first = address_.bufferAddr.host + begin;
        if (__builtin_expect(begin > address_.dataLen, 0)) {
            RaisePast(*this, offset.value, offset.loc.file, offset.loc.line);
            return LocalTensor(first, 0, address_.logicPos.buffer, address_.logicPos.generation);
        }
        return LocalTensor(first, address_.dataLen - static_cast<uint32_t>(begin), address_.logicPos.buffer,
                           address_.logicPos.generation);
    }

    template <class U>
    LocalTensor<U> ReinterpretCast() const {
        return LocalTensor<U>(address_.bufferAddr.host, address_.dataLen, address_.logicPos.buffer,
                              address_.logicPos.generation);
    }
    uint64_t GetPhyAddr(uint32_t offset = 0) const {
        twin::UbExposed();
        return reinterpret_cast<uintptr_t>(address_.bufferAddr.host) + offset * sizeof(T);
    }
    void SetAddr(const TBuffAddr& address) { address_ = address; }
    void SetSize(uint32_t elements, TWIN_CALLER) {
        const uint64_t bytes = uint64_t{elements} * sizeof(T);
        TWIN_RAISE_IF(data() != nullptr && bytes > Room(), kOutOfBounds, loc,
                      "a LocalTensor of %llu bytes with %llu bytes of UB behind its begin",
                      static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(Room()));
        address_.dataLen = static_cast<uint32_t>(bytes);
    }

    TPosition GetPosition() const { return static_cast<TPosition>(address_.logicPos); }
    void SetBufferLen(uint32_t bytes, TWIN_CALLER) { SetSize(bytes / static_cast<uint32_t>(sizeof(T)), loc); }
    template <class U>
    void SetAddrWithOffset(LocalTensor<U>& src, uint32_t offset) {
        address_ = src[offset].address_;
    }
    TBuffAddr address_;

    // For the API headers only.
    uint8_t* data() const { return address_.bufferAddr.host; }
    uint32_t buffer() const { return address_.logicPos.buffer; }
    uint32_t generation() const { return address_.logicPos.generation; }

    // The first `count` elements, checked: alive, in bounds, 32-byte aligned (alignment 0: not checked).
    TWIN_HOT T* Span(uint64_t count, const twin::Loc& loc, const char* what,
                     uint32_t alignment = twin::kBlockBytes) const {
        const bool misaligned =
            alignment != 0 && reinterpret_cast<uintptr_t>(address_.bufferAddr.host) % alignment != 0;
        if (__builtin_expect(!Alive() || count * sizeof(T) > address_.dataLen || misaligned, 0))
            RaiseSpan(*this, count, loc.file, loc.line, what, alignment);
        return reinterpret_cast<T*>(address_.bufferAddr.host);
    }

    TWIN_HOT twin::Access Part(uint64_t count, const twin::Loc& loc, const char* what,
                               uint32_t alignment = twin::kBlockBytes) const {
        return {Address(Span(count, loc, what, alignment)), count * sizeof(T)};
    }

    TWIN_HOT void CheckAlive(const twin::Loc& loc) const {
        if (__builtin_expect(!Alive(), 0)) RaiseDead(*this, loc.file, loc.line);
    }
    TWIN_REFUSE_MEMBERS(LocalTensor);

private:
    static uintptr_t Address(const T* p) { return reinterpret_cast<uintptr_t>(p); }
    TWIN_HOT bool Alive() const {
        return address_.bufferAddr.host != nullptr &&
               twin::current_core().buffers[address_.logicPos.buffer].generation == address_.logicPos.generation;
    }
    T* Element(uint32_t index) const { return reinterpret_cast<T*>(address_.bufferAddr.host) + index; }
#ifdef TWIN_FORWARDS
#define TWIN_ASIDE TWIN_COLD
#else
#define TWIN_ASIDE TWIN_HOT
#endif
    // Whether an access is nothing but a load or a store: nothing is wrong with the element, no deferred copy lies
    // there, and the engine does not want to know.
    TWIN_HOT bool Plain([[maybe_unused]] uint32_t index) const {
#ifdef TWIN_FORWARDS
        if constexpr (!twin::kChecked) {
            const uintptr_t at = Address(Element(index));
            const bool overlaps = twin::current_core().forward.MayOverlap(at, at + sizeof(T));
            return __builtin_expect(Alive() && index < GetSize() && !overlaps, 1);
        }
#endif
        return false;
    }
    TWIN_ASIDE static T GetChecked(LocalTensor view, uint32_t index, const char* file, int line) {
        const twin::Loc loc{file, line};
        T* element = view.At(index, loc);
        T value{};
        twin::IssueExact({"GetValue", twin::Pipe::kS, loc, {}, {{Address(element), sizeof(T)}}},
                         [&] { value = *element; });
        return value;
    }
    TWIN_ASIDE static void SetChecked(LocalTensor view, uint32_t index, T value, const char* file, int line) {
        const twin::Loc loc{file, line};
        T* element = view.At(index, loc);
        twin::IssueExact({"SetValue", twin::Pipe::kS, loc, {Address(element), sizeof(T)}, {}},
                         [=] { *element = value; });
    }
#undef TWIN_ASIDE
    TWIN_HOT T* At(uint32_t index, const twin::Loc& loc) const {
        if (__builtin_expect(!Alive() || index >= GetSize(), 0)) RaiseAt(*this, index, loc.file, loc.line);
        return Element(index);
    }
    // Everything by value: as long as no address of the view is taken, it stays in registers.
    [[noreturn]] TWIN_COLD static void RaiseDead(LocalTensor view, const char* file, int line) {
        const twin::Loc loc{file, line};
        twin::Raise(twin::Finding::kUseAfterFree, loc,
                    view.address_.bufferAddr.host == nullptr
                        ? "LocalTensor was never allocated"
                        : "LocalTensor is used after FreeTensor, or after its TPipe was reset");
    }
    // Bytes from the view's begin to the end of UB.
    uint64_t Room() const { return twin::kUbBytes - static_cast<uint64_t>(data() - twin::current_core().ub); }
    // These three return where the launch lists what passes its buffer and stays in UB.
    TWIN_COLD static void RaiseAt(LocalTensor view, uint32_t index, const char* file, int line) {
        const twin::Loc loc{file, line};
        view.CheckAlive(loc);
        const char* const past = "element %u of a LocalTensor of %u";
        TWIN_RAISE_IF((uint64_t{index} + 1) * sizeof(T) > view.Room(), kOutOfBounds, loc, past, index, view.GetSize());
        TWIN_RULE_IF(true, kTensorEnd, kOutOfBounds, loc, past, index, view.GetSize());
        twin::UbExposed();
    }
    TWIN_COLD static void RaisePast(LocalTensor view, uint32_t offset, const char* file, int line) {
        const twin::Loc loc{file, line};
        const char* const past = "LocalTensor[%u] starts past its %u elements";
        const bool nowhere = view.data() == nullptr || uint64_t{offset} * sizeof(T) > view.Room();
        TWIN_RAISE_IF(nowhere, kOutOfBounds, loc, past, offset, view.GetSize());
        TWIN_RULE_IF(true, kTensorEnd, kOutOfBounds, loc, past, offset, view.GetSize());
        twin::UbExposed();
    }
    TWIN_COLD static void RaiseSpan(LocalTensor view, uint64_t count, const char* file, int line, const char* what,
                                    uint32_t alignment) {
        const twin::Loc loc{file, line};
        view.CheckAlive(loc);
        const uint64_t bytes = count * sizeof(T);
        const char* const past = "%s needs %llu bytes, the UB view holds %u";
        TWIN_RAISE_IF(bytes > view.Room(), kOutOfBounds, loc, past, what, static_cast<unsigned long long>(bytes),
                      view.GetLength());
        TWIN_RULE_IF(bytes > view.GetLength(), kTensorEnd, kOutOfBounds, loc, past, what,
                     static_cast<unsigned long long>(bytes), view.GetLength());
        if (bytes > view.GetLength()) twin::UbExposed();
        const uint32_t beyond = alignment == 0 ? 0 : reinterpret_cast<uintptr_t>(view.data()) % alignment;
        TWIN_RAISE_IF(beyond != 0, kMisaligned, loc, "%s: UB address is %u bytes past a %u-byte boundary", what, beyond,
                      alignment);
    }
};

// Hands out UB from its beginning, without a TPipe and without giving back.
template <Hardware hard = Hardware::UB>
class LocalMemAllocator {
    static_assert(hard == Hardware::UB, "the twin has vector cores only: Hardware::UB");

public:
    uint32_t GetCurAddr() const { return head_; }
    template <TPosition position, class T>
    LocalTensor<T> Alloc(uint32_t elements) {
        const LocalTensor<T> tensor(position, head_, elements);
        head_ += elements * static_cast<uint32_t>(sizeof(T));
        return tensor;
    }
    template <TPosition position, class T, uint32_t elements>
    LocalTensor<T> Alloc() {
        return Alloc<position, T>(elements);
    }
    template <class T>
    LocalTensor<T> Alloc(uint32_t elements) {
        return Alloc<TPosition::VECCALC, T>(elements);
    }
    template <class T, uint32_t elements>
    LocalTensor<T> Alloc() {
        return Alloc<TPosition::VECCALC, T>(elements);
    }

private:
    uint32_t head_ = 0;
};

template <class T>
class GlobalTensor {
    static_assert(!std::is_same_v<T, int4b_t>, "int4b_t: the emulator does not model it");

public:
    using PrimType = T;
    using IndexType = uint64_t;
    void SetGlobalBuffer(__gm__ T* address) {
        address_ = address;
        count_ = 0;
    }
    void SetGlobalBuffer(__gm__ T* address, uint64_t count) {
        address_ = address;
        count_ = count;
    }
    const __gm__ T* GetPhyAddr() const { return address_; }
    __gm__ T* GetPhyAddr(uint64_t offset) const { return address_ + offset; }
    uint64_t GetSize() const { return count_; }

    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor view;
        view.address_ = address_ + offset;
        // A view at the very end is legal; a non-empty access through it raises its own error.
        view.count_ = count_ == 0 ? 0 : (offset < count_ ? count_ - offset : kNothing);
        return view;
    }
    template <class U>
    GlobalTensor<U> ReinterpretCast() const {
        GlobalTensor<U> view;
        const uint64_t count = count_ == kNothing ? count_ : count_ * sizeof(T) / sizeof(U);
        view.SetGlobalBuffer(reinterpret_cast<__gm__ U*>(address_), count);
        return view;
    }
    void SetL2CacheHint(CacheMode) {}

    T GetValue(uint64_t index, TWIN_CALLER) const {
        const Ranged element = (*this)[index].Span(sizeof(T), loc, "GetValue");
        twin::WatchRead(twin::current_core(), Address(element.first), loc);
        return twin::ScalarLoad(element.first, *element.range, loc);
    }
    void SetValue(uint64_t index, T value, TWIN_CALLER) const {
        const Ranged element = (*this)[index].Span(sizeof(T), loc, "SetValue");
        twin::ForgetReads(twin::current_core());
        twin::ScalarStore(element.first, value, *element.range, loc);
    }

    ElementOf<GlobalTensor> operator()(uint64_t index, TWIN_CALLER) const { return {*this, index, loc}; }

    struct Ranged {
        T* first;
        const twin::GmRange* range;
    };
    // The first `bytes` bytes, checked: inside the declared size, inside one registered range, aligned to T (alignment
    // 1: not).
    TWIN_HOT Ranged Span(uint64_t bytes, const twin::Loc& loc, const char* what, uint32_t alignment = sizeof(T)) const {
        T* first = twin::HostOf(address_);
        const bool outside = count_ != 0 && (count_ == kNothing || bytes > count_ * sizeof(T));
        const bool misaligned = reinterpret_cast<uintptr_t>(first) % alignment != 0;
        if (__builtin_expect(outside || misaligned, 0)) RaiseSpan(*this, bytes, loc.file, loc.line, what, misaligned);
        return {first, &twin::FindGm(twin::current_core(), reinterpret_cast<uintptr_t>(first), bytes, loc)};
    }
    TWIN_REFUSE_MEMBERS(GlobalTensor);

private:
    static constexpr uint64_t kNothing = ~0ull;
    static uintptr_t Address(const T* p) { return reinterpret_cast<uintptr_t>(p); }
    // Returns where the launch lists what passes the size that the kernel declared. The range of GM bounds it still.
    TWIN_COLD static void RaiseSpan(GlobalTensor view, uint64_t bytes, const char* file, int line, const char* what,
                                    bool misaligned) {
        const twin::Loc loc{file, line};
        const uint64_t count = view.count_;
        TWIN_RAISE_IF(misaligned, kMisaligned, loc, "%s: GM address is not aligned to %zu bytes", what, sizeof(T));
        TWIN_RULE_IF(true, kGlobalEnd, kOutOfBounds, loc, "%s of %llu bytes, the GlobalTensor of \"%s\" holds %llu",
                     what, static_cast<unsigned long long>(bytes),
                     twin::GmNameAt(twin::current_core(), Address(twin::HostOf(view.address_))),
                     static_cast<unsigned long long>(count == kNothing ? 0 : count * sizeof(T)));
    }
    __gm__ T* address_ = nullptr;
    uint64_t count_ = 0;  // elements; 0: not declared
};

}  // namespace AscendC
