// Deliberate bugs of protocol and synchronisation, for tests of the checked twin only: a kernel compiled with
// -DASCEND_MOE_MUTANT=<number> has the one of that number. Without the macro every question here is answered
// at compile time, and nothing of it is left in the kernel.
#ifndef ASCEND_MOE_DISTRIBUTE_MUTANT_H
#define ASCEND_MOE_DISTRIBUTE_MUTANT_H

#include "../protocol/window.h"

#ifndef ASCEND_MOE_MUTANT
#define ASCEND_MOE_MUTANT 0
#endif

namespace moe {

// Numbers are for good: tests and records name mutants by them.
enum class Mutant : uint32_t {
    kNone = 0,
    // one core: a pipe does not wait for another
    kRunSentBeforeWritten = 1,        // S_MTE3 before the status run leaves
    kRunRewrittenBeforeSent = 2,      // MTE3_S before the run is filled for the next peer
    kStatusReadBeforeLoaded = 3,      // MTE2_S before the scalar unit judges the status words
    kRowSentBeforeLoaded = 4,         // the queue between the load of a token's row and its store
    kScaleSentBeforeWritten = 5,      // S_MTE3 between a row's quantisation scale and its store
    kScaleReadBeforeReduced = 6,      // V_S between the reduction and its result
    kSumStoredBeforeAdded = 7,        // the queue between the last addition and the store of x
    kCountsAddedBeforeLoaded = 8,     // MTE2_V before the histograms are added
    kPlacedBeforeAdded = 9,           // V_S before the totals are read
    kSegmentsBeforeLoaded = 10,       // MTE2_S before the kept counts become segments
    kCountsRewrittenBeforeKept = 11,  // MTE3_S before the counts of the next source
    // one pipe: a vector instruction does not wait for the one before it
    kAddedBeforeWeighted = 12,     // PIPE_V between weighting a row and adding it
    kReducedBeforeMagnitude = 13,  // PIPE_V between the absolute values and their maximum
    // the data cache of the scalar unit
    kEpochReadFromCache = 14,  // the epoch's cache line is not invalidated before it is read
    kEpochLeftInCache = 15,    // it is not cleaned after it is written
    kTotalsLeftInCache = 16,   // totals are written by scalar stores, and the line is not cleaned
    kEveryCorePublishes = 17,  // all cores write the epoch, each in its own copy of the line
    // the cores of a rank
    kNoSyncBeforeFlags = 18,      // the cores do not meet, and the last one sends all status runs
    kNoDrainBeforeFlags = 19,     // the cores meet by a flag of the scalar unit: stores are still under way
    kNoSyncAfterWait = 20,        // window combine: each core sums when its own share of the sources is there
    kWaitForOwnShareOnly = 21,    // dispatch: each core gathers when its own share of the sources is there
    kPublishEpochTooEarly = 22,   // the last core publishes the epoch while others have yet to read it
    kSlotStride = 23,             // the rounds of the verdict board are one block too close
    kEveryCoreStoresTotals = 24,  // all cores write the rank's totals to the same place
    // the ranks
    kSingleHalf = 25,            // rows of all epochs go to half 0
    kSingleStatusHalf = 26,      // status runs of all epochs go to half 0
    kNoEpoch = 27,               // any status run is taken for this epoch's
    kTornRun = 28,               // header 0 vouches for the other blocks
    kSkipFlagWhenZeroRows = 29,  // no status run to a peer that gets no rows
    kSkipWaitWhenZeroRows = 30,  // combine does not wait for ranks that return no rows
    kWrongHalfForCombine = 31,   // combine's rows use the half of the dispatch before
    kExpandIdxPrefix = 32,       // positions in an expert are one too high on every core but the first
    kFlagBeforeData = 33,        // combine: status runs leave before the rows
    // a control: wrong data in every run
    kCanary = 34,  // the row of k = 0 is left out of the sum
    // the transport to other servers; the memory transport has none of these
    kPostedBeforeStaged = 35,  // the items leave before the cores have met over what they staged
    kStatusItemFirst = 36,     // two items a peer: the status run, then the rows
    kRowsTakenFromStart = 37,  // dispatch takes rows from the start of a region, not towards its end
    // algorithm "direct"
    kListsStillLeaving = 38,       // dispatch: no second meeting, runs leave while others store their lists
    kOtherHalfFilled = 39,         // rows and lists go to the half of the other parity
    kFailBlockIgnored = 40,        // cores other than 0 do not look at the fail block
    kNoFirstMeeting = 41,          // the cores do not meet over their histograms
    kRowsAfterRuns = 42,           // combine: rows are copied into the half after the meeting
    kListOffByOwner = 43,          // a list goes to the place of the next owner
    kLentAsPublished = 44,         // rows in a lent area are looked for in the half
    kFollowerDoesNotWait = 45,     // another core than 0 takes the runs as it finds them at its first look
    kListReadBeforeLoaded = 46,    // MTE2_S between the load of a list and its entries
    kEntrySentBeforeWritten = 47,  // S_MTE3 before list entries leave
    // the same with roles: some cores make lists, the others publish rows
    kListSentBeforeSelected = 48,     // V_MTE3 before a list leaves
    kPositionSentBeforeWritten = 49,  // V_MTE3 before positions leave, from the table of them
    kPositionsTurnedBeforeSent = 50,  // MTE3_V before the table becomes that of the positions that follow
    // the same where rows are read once
    kTriplesSentBeforeWritten = 51,  // S_MTE3 before triples leave
    kCount
};

static_assert(ASCEND_MOE_MUTANT >= 0 && ASCEND_MOE_MUTANT < static_cast<int>(Mutant::kCount),
              "ASCEND_MOE_MUTANT: no mutant has this number");

MOE_FN bool IsMutant(Mutant mutant) { return static_cast<uint32_t>(mutant) == ASCEND_MOE_MUTANT; }

// The half of this parity, where the rows and the status runs of an epoch go; but for two mutants.
MOE_FN uint32_t RowHalf(uint32_t parity) {
    if constexpr (IsMutant(Mutant::kSingleHalf)) parity = 0;
    return parity;
}
MOE_FN uint32_t StatusHalf(uint32_t parity) {
    if constexpr (IsMutant(Mutant::kSingleStatusHalf)) parity = 0;
    return parity;
}

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_MUTANT_H
