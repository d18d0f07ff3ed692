// Instructions that touch other bytes than they declare: what the audit must find; number 0 says which. And
// calls whose repeats are unevenly spaced, for the checked engine.
#include "api_harness.h"

namespace {

using namespace api;

void Wrong(const Args& g) {
    uint32_t* to = g.out.ReinterpretCast<uint32_t>().Span(64, twin::Loc::Here(), "canary");
    const uint32_t* from = g.a.ReinterpretCast<uint32_t>().Span(64, twin::Loc::Here(), "canary");
    const uint32_t written = g.p[0] == 1 ? 7 : g.p[0] == 2 ? 9 : 8;
    const uint32_t read = g.p[0] == 3 ? 7 : 8;
    twin::Issue({"Canary",
                 twin::Pipe::kV,
                 twin::Loc::Here(),
                 detail::UbAccess(to, written),
                 {detail::UbAccess(from, read)}},
                [=] {
                    for (uint32_t i = 0; i < 8; ++i) twin::StoreAt(to, i, twin::LoadAt(from, i) + 1);
                });
}

// An accumulator that stands still; sources unevenly spaced from repeat to repeat.
void Chain(const Args& g) {
    const LocalTensor<float> sum = g.As<float>(g.a);
    Add(sum, g.As<float>(g.b), sum, 64, 3, {1, 2, 1, 0, 17, 0});
    PipeBarrier<PIPE_V>();
    DataCopy(g.out, g.a, kBytes);
}
// Two such calls, the second on the result of the first, with a barrier between them if number 0 is 1.
void TwoChains(const Args& g) {
    const LocalTensor<float> sum = g.As<float>(g.a);
    Add(sum, g.As<float>(g.b), sum, 64, 3, {1, 2, 1, 0, 17, 0});
    if (g.p[0] == 1) PipeBarrier<PIPE_V>();
    Add(sum, g.As<float>(g.b), sum, 64, 3, {1, 2, 1, 0, 17, 0});
}

const Entry kEntries[] = {{"canary", Wrong}, {"chain", Chain}, {"two_chains", TwoChains}};

}  // namespace

API_MAIN(kEntries)
