// The audit behind twin/engine/fast.h of this folder. audit_report() gives what was found, one line each;
// audit_log() the declared accesses of every vector instruction, as "name w offset bytes count stride r ...".
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "twin/engine/engine.h"

namespace {

struct Held {
    twin::Instruction instruction;
    std::vector<std::max_align_t> effect;
    void (*run)(const void*);
};
std::vector<Held> g_held;
std::string g_report, g_log;

// What an effect changes besides UB.
struct Registers {
    uint64_t gather_count;
    uint64_t compare_mask[2];
    uint16_t merge_counts[4];
};
Registers Save(const twin::Core& core) {
    Registers all = {core.gather_count, {core.compare_mask[0], core.compare_mask[1]}, {}};
    memcpy(all.merge_counts, core.merge_counts, sizeof(all.merge_counts));
    return all;
}
void Restore(twin::Core& core, const Registers& all) {
    core.gather_count = all.gather_count;
    memcpy(core.compare_mask, all.compare_mask, sizeof(all.compare_mask));
    memcpy(core.merge_counts, all.merge_counts, sizeof(all.merge_counts));
}

using Bytes = std::vector<uint8_t>;

void Mark(Bytes& marks, uintptr_t ub, const twin::Access& access) {
    twin::ForEachPiece(access, [&](uintptr_t begin, uint64_t bytes) {
        for (uint64_t i = 0; i < bytes; ++i) marks.at(begin - ub + i) = 1;
    });
}

void Find(const twin::Instruction& instruction, const char* what, size_t byte) {
    char line[200];
    snprintf(line, sizeof(line), "%s at line %d: %s (UB byte %zu)\n", instruction.name, instruction.loc.line, what,
             byte);
    g_report += line;
}

void Log(const twin::Instruction& instruction, uintptr_t ub) {
    const auto add = [&](const char* kind, const twin::Access& access) {
        const auto log = [&](uintptr_t begin, uint64_t bytes, uint32_t count, uint64_t stride) {
            char text[120];
            snprintf(text, sizeof(text), " %s %zu %llu %u %llu", kind, static_cast<size_t>(begin - ub),
                     static_cast<unsigned long long>(bytes), count, static_cast<unsigned long long>(stride));
            g_log += text;
        };
        if (access.bytes == 0) return;
        if (access.width == 0) {
            log(access.begin, access.bytes, access.count, access.count == 1 ? 0 : access.stride);
        } else {
            twin::ForEachPiece(access, [&](uintptr_t begin, uint64_t bytes) { log(begin, bytes, 1, 0); });
        }
    };
    g_log += instruction.name;
    add("w", instruction.write);
    for (const twin::Access& read : instruction.reads) add("r", read);
    add("c", instruction.clobber);
    g_log += "\n";
}

void Check(const Held& held) {
    twin::Core& core = twin::current_core();
    const twin::Instruction& instruction = held.instruction;
    const uintptr_t ub = reinterpret_cast<uintptr_t>(core.ub);
    Log(instruction, ub);
    const Bytes before(core.ub, core.ub + twin::kUbBytes);
    const Registers registers = Save(core);
    held.run(held.effect.data());
    const Bytes after(core.ub, core.ub + twin::kUbBytes);
    const Registers results = Save(core);
    Bytes written(before.size()), read(before.size()), garbage(before.size());
    Mark(written, ub, instruction.write);
    Mark(garbage, ub, instruction.clobber);
    for (const twin::Access& access : instruction.reads) Mark(read, ub, access);
    // Again, with every byte that it does not read turned over.
    for (size_t i = 0; i < before.size(); ++i) core.ub[i] = read[i] ? before[i] : static_cast<uint8_t>(~before[i]);
    Restore(core, registers);
    held.run(held.effect.data());
    // How much these write depends on the data: they declare all that they may write.
    const bool depends = strcmp(instruction.name, "MrgSort") == 0 ||
                         (strcmp(instruction.name, "GatherMask") == 0 && instruction.reads[1].bytes != 0);
    for (size_t i = 0; i < before.size(); ++i) {
        if (!written[i] && !garbage[i] && before[i] != after[i])
            Find(instruction, "writes what it does not declare", i);
        if (written[i] && !depends && core.ub[i] != after[i]) {
            Find(instruction,
                 core.ub[i] == static_cast<uint8_t>(~before[i]) && after[i] == before[i]
                     ? "declares a write that it does not make"
                     : "depends on what it does not declare",
                 i);
        }
        if (g_report.size() > 2000) break;
    }
    memcpy(core.ub, after.data(), after.size());
    Restore(core, results);
}

}  // namespace

namespace twin::audit {

void Hold(const Instruction& instruction, const void* effect, size_t bytes, void (*run)(const void*)) {
    g_held.push_back({instruction, std::vector<std::max_align_t>(bytes / sizeof(std::max_align_t) + 1), run});
    memcpy(g_held.back().effect.data(), effect, bytes);
}
void Settle() {
    std::vector<Held> held;
    held.swap(g_held);
    for (const Held& instruction : held) Check(instruction);
}

}  // namespace twin::audit

extern "C" {
const char* audit_report() { return g_report.c_str(); }
const char* audit_log() { return g_log.c_str(); }
void audit_clear() {
    g_report.clear();
    g_log.clear();
    g_held.clear();
}
}
