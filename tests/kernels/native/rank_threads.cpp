// Ranks as threads over the C ABI, with nothing but the windows between them: no interpreter lock orders what
// they do. Made for the sanitizers, which see every access of every rank; a program of its own.
//
//   rank_threads ops N [SEED]    N ops in each sequence, then the failures; exit status 0, or 1 and the
//   reasons rank_threads canary          wrong rows on purpose: exit status 1
#include <cstdlib>

#include "rank_calls.h"

namespace {

using namespace ranks;

constexpr uint32_t kFirstEpoch = 0xFFFFFFF8u;  // sequences run across the wrap
constexpr int64_t kPatientMicros = 60 * 1000 * 1000;
constexpr int64_t kShortMicros = 100 * 1000;

void Expect(int code, moe::ErrorCode want, const char* what) {
    Check(code == static_cast<int>(want),
          std::string(what) + " returned " + std::to_string(code) + ", not " + std::to_string(want));
}

// ---- the checks ----

// Any order of the two ops, nothing between them.
void Sequence(const Shape& shape, uint32_t seed, int ops) {
    Cluster cluster(shape, kFirstEpoch);
    cluster.Run([&](int, Rank& rank) {
        std::mt19937 random(seed);  // the same choices on all ranks
        for (int op = 0; op < ops; ++op) {
            const bool dispatch = op == 0 || random() % 2 == 0;
            const int code = dispatch ? rank.Dispatch(seed + static_cast<uint32_t>(op)) : rank.Combine();
            Expect(code, moe::kOk, dispatch ? "dispatch" : "combine");
            if (code != static_cast<int>(moe::kOk)) return;
        }
    });
}

// Rank 0 sends other rows than all expect: what is compared must notice.
void WrongRows(const Shape& shape, uint32_t seed) {
    Cluster cluster(shape, 0);
    cluster.Run([&](int number, Rank& rank) {
        const size_t elements = static_cast<size_t>(shape.max_batch) * static_cast<size_t>(shape.hidden);
        const std::vector<uint8_t> other = Packed(shape.type, std::vector<float>(elements, 9));
        const auto spoil = [&](Call& call, Tokens& tokens) {
            call.Input(moe::kTensor_x, shape.type, other.data(), {tokens.batch, shape.hidden});
        };
        for (uint32_t turn = 0; turn < 4; ++turn) rank.Dispatch(seed + turn, number == 0 ? spoil : Spoil());
    });
}

// One rank names an expert that does not exist: all return that, and go on.
void BadId(const Shape& shape, uint32_t seed) {
    Cluster cluster(shape, 0);
    cluster.Run([&](int number, Rank& rank) {
        for (uint32_t turn = 0; turn < 4; ++turn) {
            const auto spoil = [&](Call&, Tokens& tokens) {
                if (tokens.batch == 0) return;
                tokens.ids[0] = shape.experts() + 5;
                tokens.active[0] = 1;
            };
            const int batch = MakeTokens(shape, seed + turn, 0).batch;
            const int code = rank.Dispatch(seed + turn, number == 0 ? spoil : Spoil());
            Expect(code, batch > 0 ? moe::kInvalidExpertId : moe::kOk, "dispatch with a bad id");
            Expect(rank.Dispatch(seed), moe::kOk, "dispatch after a bad id");
            Expect(rank.Combine(), moe::kOk, "combine after a bad id");
        }
    });
}

// The last rank does not come to the third op: the others time out, and it hears of it when it comes late.
// Whom they miss is not compared: on a busy machine another rank may be late as well.
void NeverCalls(const Shape& shape, uint32_t seed) {
    Cluster cluster(shape, 0);
    const int absent = shape.world - 1;
    const auto body = [&](int number, Rank& rank, bool late) {
        if ((number == absent) != late) return;
        rank.WaitAtMost(kShortMicros);
        Expect(rank.Dispatch(seed), moe::kCommTimeout, "dispatch without a rank");
        Expect(rank.Dispatch(seed), moe::kCommTimeout, "dispatch after a timeout");
    };
    cluster.Run([&](int number, Rank& rank) {
        Expect(rank.Dispatch(seed), moe::kOk, "dispatch");
        Expect(rank.Combine(), moe::kOk, "combine");
        body(number, rank, false);
    });
    cluster.Run([&](int number, Rank& rank) { body(number, rank, true); });
}

// Rank 0 goes while the others are on their way.
void Leaves(const Shape& shape, uint32_t seed) {
    Cluster cluster(shape, 0);
    cluster.Run([&](int number, Rank& rank) {
        for (uint32_t turn = 0;; ++turn) {
            if (number == 0 && turn == seed % 4) return cluster.MarkLost(0);
            const int code = rank.Dispatch(seed + turn);
            if (code == static_cast<int>(moe::kOk)) continue;
            Expect(code, moe::kPeerLost, "dispatch after a rank went");
            // One op early where a third rank's rows are still awaited when a faster one says so.
            Check(rank.culprit() == 0 && (turn == seed % 4 || turn + 1 == seed % 4),
                  "the rank that went is not named");
            return;
        }
    });
}

// The kernel of one rank breaks a rule: its own error has the words, the others name the rank.
void KernelFault(const Shape& shape, uint32_t seed) {
    Cluster cluster(shape, 0);
    while (MakeTokens(shape, seed, 1).batch == 0) ++seed;
    cluster.Run([&](int number, Rank& rank) {
        // The fault of the next op may be heard of already here, while a third rank's rows are awaited.
        const int first = rank.Dispatch(seed + 1);
        if (number == 1 || first != static_cast<int>(moe::kKernelFault)) Expect(first, moe::kOk, "dispatch");
        const auto spoil = [&](Call& call, Tokens& tokens) {
            call.Input(moe::kTensor_x, shape.type, nullptr, {tokens.batch, shape.hidden});
            tokens.ids[0] = 0;
            tokens.active[0] = 1;
        };
        if (number == 1) {
            Expect(rank.Dispatch(seed, spoil), moe::kKernelFault, "dispatch of a wrong address");
            Check(rank.fault().find("GM address") != std::string::npos, "no such fault: " + rank.fault());
        } else {
            Expect(rank.Dispatch(seed), moe::kKernelFault, "dispatch beside a faulty rank");
            Check(rank.culprit() == 1, "the faulty rank is not named");
        }
    });
}

std::vector<Shape> Shapes() {
    std::vector<Shape> shapes;
    for (int world = 2; world <= 4; ++world) {
        for (int contract : {1, 2}) {
            for (bool quantised : {false, true}) {
                const uint32_t type = (world + contract) % 2 == 0 ? moe::kTypeFp32 : moe::kTypeBf16;
                shapes.push_back({world, 1 + world % 3, 2 + contract % 2, 32 * (5 - world), 5,
                                  world == 3 ? 5 : world, kPatientMicros, type, contract, quantised});
            }
        }
    }
    return shapes;
}

void Everything(int ops, uint32_t seed) {
    const std::vector<Shape> shapes = Shapes();
    for (const Shape& shape : shapes) {
        Sequence(shape, ++seed, ops);
        BadId(shape, ++seed);
        NeverCalls(shape, ++seed);
        Leaves(shape, ++seed);
        KernelFault(shape, ++seed);
    }
    printf("rank_threads: %zu shapes, each %d ops and 4 failures: %d wrong\n", shapes.size(), ops,
           g_failures.load());
}

}  // namespace

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    const int number = argc > 2 ? atoi(argv[2]) : 0;
    const uint32_t seed = argc > 3 ? static_cast<uint32_t>(atoi(argv[3])) : 1;
    if (what == "ops" && number > 0) {
        Everything(number, seed);
    } else if (what == "canary") {
        for (const Shape& shape : Shapes()) WrongRows(shape, seed);
    } else {
        fprintf(stderr, "usage: rank_threads ops N [SEED] | canary\n");
        return 2;
    }
    return g_failures == 0 ? 0 : 1;
}
