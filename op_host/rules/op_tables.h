// The description of the operators, op.h, as tables.
#pragma once

#include <cstddef>
#include <cstring>

#include "probe/tiling.h"
#include "protocol/tiling.h"
#include "args.h"

namespace moe {

// Element types that differ between columns: rows of the caller, and as dispatch sends them.
constexpr uint32_t kRows = 100, kWireRows = 101;
constexpr bool kRequired = true, kOptional = false;

struct OpTensor {
    const char* name;
    uint32_t type;
    bool required;
    TensorIndex index, v2_index;  // in CallSpec; of outputs unused
};

// An integer, or a string if `text` is not null.
struct OpAttribute {
    const char* name;
    bool required;
    int64_t value;     // default
    const char* text;  // default
};

// Arguments that a function has and takes no value for.
struct OpRefused {
    const char* name;
    uint32_t index;  // TensorIndex or AttributeIndex in CallSpec
    const char* why;
};

template <typename T>
struct Span {
    const T* data;
    size_t size;
    const T* begin() const { return data; }
    const T* end() const { return data + size; }
    const T& operator[](size_t i) const { return data[i]; }
};
// Without the last element: each table below has one more, because none may be empty in C++.
template <typename T, size_t kSize>
constexpr Span<T> RowsOf(const T (&table)[kSize]) {
    return {table, kSize - 1};
}

struct OpInterface {
    const char* type;
    size_t columns;  // of its dtype lists
    Span<OpTensor> inputs;
    Span<OpTensor> outputs;
    Span<OpAttribute> attributes;
    Span<OpRefused> refused_inputs;
    Span<OpRefused> refused_attributes;
};

#define ASCEND_MOE_NOTHING(...)
#define ASCEND_MOE_INPUT(name, type, need, functions) {#name, type, need, kTensor_##name, kTensor_##name},
#define ASCEND_MOE_RENAMED_INPUT(name, v2_name, type, need, functions) \
    {#name, type, need, kTensor_##name, kTensor_##v2_name},
#define ASCEND_MOE_OUTPUT(name, type) {#name, type, kRequired, kTensorCount, kTensorCount},
#define ASCEND_MOE_RENAMED_OUTPUT(name, v2_name, type) ASCEND_MOE_OUTPUT(name, type)
#define ASCEND_MOE_INTEGER(name, need, value, functions) {#name, need, value, nullptr},
#define ASCEND_MOE_TEXT(name, need, text, functions) {#name, need, 0, text},
#define ASCEND_MOE_REFUSED_INPUT(name, functions, why) {#name, kTensor_##name, why},
#define ASCEND_MOE_REFUSED_ATTRIBUTE(name, functions, why) {#name, kAttribute_##name, why},

template <uint32_t kCode>
struct OpRows;
#define ASCEND_MOE_OP(code, op_type, rows, column_count)                                                             \
    template <>                                                                                                      \
    struct OpRows<code> {                                                                                            \
        static constexpr OpTensor inputs[] = {                                                                       \
            ASCEND_MOE_##rows##_INPUTS(ASCEND_MOE_INPUT, ASCEND_MOE_RENAMED_INPUT, ASCEND_MOE_NOTHING){}};           \
        static constexpr OpTensor outputs[] = {                                                                      \
            ASCEND_MOE_##rows##_OUTPUTS(ASCEND_MOE_OUTPUT, ASCEND_MOE_RENAMED_OUTPUT){}};                            \
        static constexpr OpAttribute attributes[] = {                                                                \
            ASCEND_MOE_##rows##_ATTRIBUTES(ASCEND_MOE_TEXT, ASCEND_MOE_INTEGER, ASCEND_MOE_NOTHING){}};              \
        static constexpr OpRefused refused_inputs[] = {                                                              \
            ASCEND_MOE_##rows##_INPUTS(ASCEND_MOE_NOTHING, ASCEND_MOE_NOTHING, ASCEND_MOE_REFUSED_INPUT){}};         \
        static constexpr OpRefused refused_attributes[] = {                                                          \
            ASCEND_MOE_##rows##_ATTRIBUTES(ASCEND_MOE_NOTHING, ASCEND_MOE_NOTHING, ASCEND_MOE_REFUSED_ATTRIBUTE){}}; \
        static constexpr OpInterface interface = {#op_type,                                                          \
                                                  column_count,                                                      \
                                                  RowsOf(inputs),                                                    \
                                                  RowsOf(outputs),                                                   \
                                                  RowsOf(attributes),                                                \
                                                  RowsOf(refused_inputs),                                            \
                                                  RowsOf(refused_attributes)};                                       \
    };
ASCEND_MOE_OPS(ASCEND_MOE_OP)
#undef ASCEND_MOE_OP

inline const OpInterface& InterfaceOf(uint32_t op) {
#define ASCEND_MOE_OP(code, ...) \
    if (op == code) return OpRows<code>::interface;
    ASCEND_MOE_OPS(ASCEND_MOE_OP)
#undef ASCEND_MOE_OP
    return OpRows<kOpCombine>::interface;
}

// clang-format off
// Places of the outputs, and of a kernel's arguments in its entry.
#define ASCEND_MOE_PLACE(name, ...) name,
#define ASCEND_MOE_PLACES(op, OP)                                                                        \
    struct op##Output {                                                                                  \
        enum Place : uint32_t { ASCEND_MOE_##OP##_OUTPUTS(ASCEND_MOE_PLACE, ASCEND_MOE_PLACE) kCount };  \
    };                                                                                                   \
    struct op##Argument {                                                                                \
        enum Place : uint32_t {                                                                          \
            ASCEND_MOE_##OP##_INPUTS(ASCEND_MOE_PLACE, ASCEND_MOE_PLACE, ASCEND_MOE_NOTHING)             \
            ASCEND_MOE_##OP##_OUTPUTS(ASCEND_MOE_PLACE, ASCEND_MOE_PLACE)                                \
            workspace, tiling, kCount                                                                    \
        };                                                                                               \
    };
ASCEND_MOE_PLACES(Dispatch, DISPATCH)
ASCEND_MOE_PLACES(Combine, COMBINE)
// clang-format on
#undef ASCEND_MOE_PLACES
#undef ASCEND_MOE_PLACE
#undef ASCEND_MOE_NOTHING
#undef ASCEND_MOE_INPUT
#undef ASCEND_MOE_RENAMED_INPUT
#undef ASCEND_MOE_OUTPUT
#undef ASCEND_MOE_RENAMED_OUTPUT
#undef ASCEND_MOE_INTEGER
#undef ASCEND_MOE_TEXT
#undef ASCEND_MOE_REFUSED_INPUT
#undef ASCEND_MOE_REFUSED_ATTRIBUTE

struct RowTypes {
    uint32_t rows;
    uint32_t wire;
};
#define ASCEND_MOE_COLUMN(rows, wire) {rows, wire},
constexpr RowTypes kRowTypes[] = {ASCEND_MOE_COLUMNS(ASCEND_MOE_COLUMN)};
#undef ASCEND_MOE_COLUMN

// Place of an input in CallSpec, by its name in the function of that contract.
inline TensorIndex IndexOf(const OpTensor& input, int32_t contract) {
    return contract == static_cast<int32_t>(kContractV2) ? input.v2_index : input.index;
}

// Names in CallSpec and their places; kTensorCount and kAttributeCount for unknown ones.
#define ASCEND_MOE_NAME(name) #name,
constexpr const char* kTensorNames[] = {ASCEND_MOE_TENSORS(ASCEND_MOE_NAME)};
constexpr const char* kAttributeNames[] = {ASCEND_MOE_ATTRIBUTES(ASCEND_MOE_NAME)};
#undef ASCEND_MOE_NAME
template <size_t kSize>
uint32_t PlaceOf(const char* name, const char* const (&names)[kSize]) {
    uint32_t place = 0;
    while (place < kSize && strcmp(names[place], name) != 0) ++place;
    return place;
}
inline uint32_t TensorIndexOf(const char* name) { return PlaceOf(name, kTensorNames); }
inline uint32_t AttributeIndexOf(const char* name) { return PlaceOf(name, kAttributeNames); }

}  // namespace moe
