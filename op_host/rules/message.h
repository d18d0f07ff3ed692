// Texts and fields of error records, for the host code of every backend.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <string>

#include "args.h"

namespace moe {

// The Python class that carries an error code.
inline const char* ErrorName(uint32_t code) {
    switch (code) {
        case kInvalidExpertId: return "InvalidExpertId";
        case kRoutingOverflow: return "RoutingOverflow";
        case kInvalidCounts:
        case kInvalidSourceIndex: return "ArgumentError";
        case kConfigMismatch: return "ConfigMismatch";
        case kRoutingMismatch: return "RoutingMismatch";
        case kPeerLost: return "PeerLost";
        case kCommTimeout: return "CommTimeout";
        case kCorruptStatus: return "CorruptStatus";
        default: return "KernelFault";
    }
}

inline const char* OpName(int32_t op) {
    return op == static_cast<int32_t>(kOpDispatch)  ? "dispatch"
           : op == static_cast<int32_t>(kOpCombine) ? "combine"
                                                    : "no op";
}

inline const char* FieldName(int32_t field) {
    static const char* const kNames[kFieldCount] = {
        "op",        "HCCL_BUFFSIZE", "contract", "H",          "K",      "E",
        "global_bs", "maxBS",         "dtype",    "quant_mode", "scales", "expert_scales",
        "comm_alg",  "row alignment"};
    return field >= 0 && field < static_cast<int32_t>(kFieldCount) ? kNames[field] : "?";
}

inline const char* ContextFieldName(int32_t field) {
    static const char* const kNames[kContextFieldCount] = {"context",    "magic",       "ep_rank_id",  "ep_world_size",
                                                           "peer table", "data window", "state window"};
    return field >= 0 && field < static_cast<int32_t>(kContextFieldCount) ? kNames[field] : "?";
}

inline std::string FieldValue(int32_t field, int32_t value) {
    switch (field) {
        case kFieldOp: return OpName(value);
        case kFieldType: return TypeName(static_cast<uint32_t>(value));
        case kFieldContract: return value == static_cast<int32_t>(kContractV2) ? "v2" : "v1";
        case kFieldScales:
        case kFieldWeights: return value != 0 ? "given" : "None";
        case kFieldWindow: return std::to_string(value) + " MiB";
        case kFieldAlgorithm: return AlgorithmName(static_cast<uint32_t>(value));
        default: return std::to_string(value);
    }
}

// A record as one line: what, which rank, the rule with its numbers, the fix.
class RecordText {
public:
    explicit RecordText(const int32_t* record) : record_(record) {}

    std::string Message() const {
        switch (static_cast<uint32_t>(At(kRecCode))) {
            case kInvalidExpertId:
                return Format(
                    "%s: rank %d, token %d, k %d has expert id %d%s; an active id is -1 (not routed) or in "
                    "0..%lld",
                    Op(), At(kRecCulprit), At(kRecDetail0) >> 8, At(kRecDetail0) & 0xFF, At(kRecDetail1),
                    Saturated(At(kRecDetail1)), static_cast<long long>(At(kRecIds)) - 1);
            case kRoutingOverflow:
                return Format(
                    "%s: rank %d routes %d rows to rank %d, its capacity is maxBS*min(K, L) = %d rows: do "
                    "not repeat an expert in a token's ids",
                    Op(), At(kRecCulprit), At(kRecDetail1), At(kRecDetail0), At(kRecCapacity));
            case kInvalidCounts: return Counts();
            case kInvalidSourceIndex: return SourceIndex();
            case kConfigMismatch: return Config();
            case kRoutingMismatch: return Routing();
            case kPeerLost:
                return Format(
                    "%s: rank %d is lost (its process has died or closed its communicator), found by rank %d "
                    "at epoch %u%s; close the communicator on all ranks and start again",
                    Op(), At(kRecCulprit), Reporter(), Epoch(), Level());
            case kCommTimeout: return Timeout();
            case kCorruptStatus: return Corrupt();
            case kKernelFault:
                return Format("%s: rank %d has failed with a kernel fault; its own error says where", Op(),
                              At(kRecCulprit));
            default: return Context();
        }
    }

    // "name=value;..." for the attributes of the exception.
    std::string Fields() const {
        switch (static_cast<uint32_t>(At(kRecCode))) {
            case kInvalidExpertId:
                return Format("rank=%d;token=%d;k=%d;expert_id=%d", At(kRecCulprit), At(kRecDetail0) >> 8,
                              At(kRecDetail0) & 0xFF, At(kRecDetail1));
            case kRoutingOverflow:
                return Format("rank=%d;owner=%d;rows=%d;capacity=%d", At(kRecCulprit), At(kRecDetail0), At(kRecDetail1),
                              At(kRecCapacity));
            case kInvalidCounts: return Format("argument=ep_send_counts;rank=%d", At(kRecCulprit));
            case kInvalidSourceIndex: return Format("argument=assist_info_for_combine;rank=%d", At(kRecCulprit));
            case kConfigMismatch:
                return Format("field=%s;rank=%d;ours=%s;theirs=%s", Field(), At(kRecCulprit), Ours().c_str(),
                              Theirs().c_str());
            case kRoutingMismatch:
                if (static_cast<uint32_t>(At(kRecDetail0)) & kMismatchRow)
                    return Format("rank=%d;expert=%d;token=%d;k=%d", At(kRecCulprit), MismatchExpert(), At(kRecDetail1),
                                  At(kRecDetail2));
                return Format("rank=%d;expert=%d;ours=%d;theirs=%d", At(kRecCulprit), MismatchExpert(), At(kRecDetail1),
                              At(kRecDetail2));
            case kContextMismatch:
                return Format("rank=%d;field=%s;ours=%d;theirs=%d", At(kRecRank), ContextFieldName(At(kRecDetail0)),
                              At(kRecDetail1), At(kRecDetail2));
            default: return Fatal();
        }
    }

private:
    int32_t At(uint32_t word) const { return record_[word]; }
    // A caller's int64 id beyond int32 becomes the nearest int32.
    static const char* Saturated(int32_t id) {
        return id == INT32_MAX ? " or more" : id == INT32_MIN ? " or less" : "";
    }
    const char* Op() const { return OpName(At(kRecOp)); }
    uint32_t Epoch() const { return static_cast<uint32_t>(At(kRecEpoch)); }
    int32_t Reporter() const { return At(kRecReporter); }
    // For fatal errors detected by hierarchy's waits.
    uint32_t LevelNumber() const {
        const uint32_t code = static_cast<uint32_t>(At(kRecCode));
        const bool waited = code == kPeerLost || code == kCommTimeout || code == kCorruptStatus;
        return waited ? LevelOf(static_cast<uint32_t>(At(kRecDetail0))) : 0;
    }
    const char* Level() const {
        static const char* const kTexts[] = {"", ", in level 1 of hierarchy, where it awaits what it forwards",
                                             ", in level 2 of hierarchy, where it awaits what others forward to it"};
        return kTexts[std::min(LevelNumber(), 2u)];
    }
    std::string Fatal() const {
        const std::string text = Format("rank=%d;reporter=%d;phase=%s", At(kRecCulprit), Reporter(), Op());
        return LevelNumber() == 0 ? text : text + ";level=" + std::to_string(LevelNumber());
    }
    const char* Field() const {
        const bool back = At(kRecOp) == static_cast<int32_t>(kOpCombine) && At(kRecDetail0) == kFieldQuant;
        return back ? "comm_quant_mode" : FieldName(At(kRecDetail0));
    }
    std::string Ours() const { return FieldValue(At(kRecDetail0), At(kRecDetail1)); }
    std::string Theirs() const { return FieldValue(At(kRecDetail0), At(kRecDetail2)); }

    __attribute__((format(printf, 2, 3))) std::string Format(const char* format, ...) const {
        char text[512];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text, sizeof(text), format, arguments);
        va_end(arguments);
        return text;
    }
    std::string Counts() const {
        const uint32_t where = static_cast<uint32_t>(At(kRecDetail0));
        if (where & kCountsOfSource) {
            return Format(
                "combine: ep_send_counts of rank %d has %d rows of source rank %u, it may have at most "
                "maxBS*min(K, L) = %d; pass dispatch's ep_recv_counts",
                At(kRecCulprit), At(kRecDetail1), where & ~kCountsOfSource, At(kRecCapacity));
        }
        return Format(
            "combine: ep_send_counts of rank %d is %d at element %u: it must not fall, nor pass the rows of "
            "expand_x; pass dispatch's ep_recv_counts",
            At(kRecCulprit), At(kRecDetail1), where);
    }
    std::string SourceIndex() const {
        static const char* const kWords[] = {"source rank", "token", "k", "?"};
        if (At(kRecDetail0) == static_cast<int32_t>(kSourceIndexRecords)) {
            return Format(
                "combine: assist_info_for_combine of rank %d holds %d behind its source indices, which comm_alg "
                "\"hierarchy\" "
                "cannot have written: pass dispatch's own tensor, and the same comm_alg to both ops",
                At(kRecCulprit), At(kRecDetail1));
        }
        if ((At(kRecDetail0) & 3) == static_cast<int32_t>(kSourceIndexOrder)) {
            return Format(
                "combine: assist_info_for_combine of rank %d is not in dispatch's order at row %d (token %d, "
                "k %d): comm_alg \"direct\" takes rows and assist_info_for_combine as dispatch wrote them; "
                "rows that were moved need comm_alg \"window\"",
                At(kRecCulprit), At(kRecDetail0) >> 2, At(kRecDetail1) / std::max(1, At(kRecTopK)),
                At(kRecDetail1) % std::max(1, At(kRecTopK)));
        }
        return Format(
            "combine: assist_info_for_combine of rank %d names %s %d in row %d (W %d, maxBS %d, K %d): pass "
            "dispatch's own tensor",
            At(kRecCulprit), kWords[At(kRecDetail0) & 3], At(kRecDetail1), At(kRecDetail0) >> 2, At(kRecWorld),
            At(kRecMaxBatch), At(kRecTopK));
    }
    std::string Config() const {
        if (At(kRecDetail0) == static_cast<int32_t>(kFieldMaxBatch)) {
            return Format(
                "%s: maxBS is %d on rank %d and %d on rank %d; where ranks have different batches, every rank passes "
                "global_bs = ep_world_size * the largest batch, here %d, or max_tokens %d",
                Op(), At(kRecDetail1), At(kRecRank), At(kRecDetail2), At(kRecCulprit),
                At(kRecWorld) * std::max(At(kRecDetail1), At(kRecDetail2)), std::max(At(kRecDetail1), At(kRecDetail2)));
        }
        const char* const meaning = At(kRecDetail0) == kFieldGlobalBs ? " (ranks * max_tokens)" : "";
        return Format("%s: %s%s is %s on rank %d and %s on rank %d; it must be the same on all ranks", Op(), Field(),
                      meaning, Ours().c_str(), At(kRecRank), Theirs().c_str(), At(kRecCulprit));
    }
    int MismatchExpert() const {
        return static_cast<int>(static_cast<uint32_t>(At(kRecDetail0)) &
                                ~(kMismatchIndex | kMismatchRow | kMismatchSums));
    }
    std::string Routing() const {
        const uint32_t expert = static_cast<uint32_t>(At(kRecDetail0));
        if (expert & kMismatchRow) {
            return Format(
                "combine: the row of token %d, k %d of rank %d, which expert %d owns, has not come back: give combine "
                "dispatch's own assist_info_for_combine and the same expert_ids and x_active_mask",
                At(kRecDetail1), At(kRecDetail2), At(kRecCulprit), MismatchExpert());
        }
        if (expert & kMismatchSums) {
            return Format(
                "combine: server %u returns sums of %d tokens to rank %d, whose expert_ids and mask send %d to it; "
                "give "
                "combine the same expert_ids and x_active_mask as dispatch",
                expert & ~kMismatchSums, At(kRecDetail2), At(kRecCulprit), At(kRecDetail1));
        }
        if (expert & kMismatchIndex) {
            return Format(
                "combine: rank %d has expand_idx %d for expert %u, to which it routes %d rows; give combine "
                "dispatch's own expand_idx and the same expert_ids and x_active_mask",
                At(kRecCulprit), At(kRecDetail2), expert & ~kMismatchIndex, At(kRecDetail1));
        }
        return Format(
            "combine: expert %u returns %d rows to rank %d, whose expert_ids and mask route %d to it; give "
            "combine the same expert_ids and x_active_mask as dispatch",
            expert, At(kRecDetail2), At(kRecCulprit), At(kRecDetail1));
    }
    // No window was touched. The fix depends on the group's own size, which its windows were made with.
    std::string Context() const {
        const int32_t field = At(kRecDetail0);
        if (field == static_cast<int32_t>(kContextFieldAddress))
            return Format("%s: rank %d was launched without a communication context; is group_ep an HCCL group?", Op(),
                          At(kRecRank));
        if (field == static_cast<int32_t>(kContextFieldMagic))
            return Format(
                "%s: the communication context of rank %d begins with %#x, a window table with %#x; the "
                "kernel and the communicator are not of the same build",
                Op(), At(kRecRank), At(kRecDetail2), At(kRecDetail1));
        if (field == static_cast<int32_t>(kContextFieldPeers))
            return Format(
                "%s: the peer table of rank %d begins %d bytes into the communication context, where no table can be; "
                "HCCL's releases have it at 2984 or 3320: report this version of HCCL",
                Op(), At(kRecRank), At(kRecDetail2));
        const bool size = field >= static_cast<int32_t>(kContextFieldWindow);
        return Format("%s: %s is %d%s in this call of rank %d and %d%s in the communication context; %s", Op(),
                      ContextFieldName(field), At(kRecDetail1), size ? " KiB" : "", At(kRecRank), At(kRecDetail2),
                      size ? " KiB" : "",
                      size ? "export the same HCCL_BUFFSIZE on all ranks before the group is made, and keep it"
                           : "pass the group's own ep_world_size and ep_rank_id, or report this version of "
                             "HCCL: its context may have another layout");
    }
    std::string Corrupt() const {
        const uint32_t block = BlockOf(static_cast<uint32_t>(At(kRecDetail0)));
        if (block == kAbortBlockIndex) {
            return Format(
                "%s: the abort block of rank %d holds code %#x, which no rank can have written; is "
                "anything else writing into these windows?",
                Op(), At(kRecCulprit), At(kRecDetail1));
        }
        if (block == kRelayBlockIndex || block == kRecordIndex) {
            return Format(
                "%s: what rank %d has sent to this server holds %#x in %s, which no rank of epoch %u can have "
                "written, found by rank %d%s; is anything else writing into these windows?",
                Op(), At(kRecCulprit), At(kRecDetail1), block == kRecordIndex ? "a record" : "the number of its rows",
                Epoch(), Reporter(), Level());
        }
        return Format(
            "%s: the status run of rank %d holds %#x in block %u, which no rank of epoch %u can have "
            "written, found by rank %d%s; is anything else writing into these windows?",
            Op(), At(kRecCulprit), At(kRecDetail1), block, Epoch(), Reporter(), Level());
    }
    std::string Timeout() const {
        std::string text =
            Format("%s: rank %d did not arrive within %.1f s (ASCEND_MOE_TIMEOUT_S), found by rank %d at epoch %u%s",
                   Op(), At(kRecCulprit), At(kRecWaitedMillis) / 1e3, Reporter(), Epoch(), Level());
        const int32_t count = At(kRecAwaitedCount);
        for (int32_t i = 0; i < count && i < static_cast<int32_t>(kMaxAwaited); ++i) {
            const int32_t* entry = record_ + kRecAwaited + 3 * i;
            text += i == 0 ? "; missing: rank " : ", rank ";
            text += std::to_string(entry[0]);
            text += entry[1] == 0
                        ? " (never seen)"
                        : Format(" (last seen in %s, epoch %u)", OpName(entry[2]), static_cast<uint32_t>(entry[1]));
        }
        if (count > static_cast<int32_t>(kMaxAwaited))
            text += Format(" and %d more", count - static_cast<int32_t>(kMaxAwaited));
        return text + "; did every rank call the same ops in the same order?";
    }
    const int32_t* record_;
};

}  // namespace moe
