"""Broken kernels, each a patch of text that a test, a schedule or a user's run must find.

An edit's old text is in its file exactly once. `mutants/builds.py` builds a library with a mutant's edits,
`mutants/finders.py` runs who finds it. All of them: `make mutants`. That every old text is there is part of
every run of the suite.
"""

from __future__ import annotations

from dataclasses import dataclass

# Finding classes, as the checked engine and explore mode name them.
SYNC = "missing pipe synchronisation"
HAZARD = "same-pipe hazard"
UNINITIALISED = "uninitialised UB read"
STALE = "stale scalar read"
UNFLUSHED = "unflushed scalar write"
SHARED_LINE = "cache line shared by two writers"
WRONG_HALF = "wrong part of a window"
CORES = "race between cores"
RANKS = "race between ranks"
HANG = "hang"
BOUNDS = "out of bounds"
RESULT = "wrong result"  # outputs differ from the reference
# Errors that no op should have raised: explore mode gives their names.
CORRUPT = "CorruptStatus"
MISMATCH = "RoutingMismatch"

# Who finds a mutant. On the fast engine: a part of the suite, the tests of zero copy, `ascend-moe run`. On
# the checked engine: explore mode with cases of the algorithm "window" or "direct", of ranks on several
# "servers", of "lent" rows, of "roles" (direct, some cores make lists), of "long lists", of "shared rows"
# (direct, owners read a row once for all their experts), or with a "killed" rank.
SUITE, ZERO_COPY, RUN = "suite", "zero copy", "run"
WINDOW, SERVERS, DIRECT, LENT, ROLES = "window", "servers", "direct", "lent", "roles"
LONG_LISTS, SHARED_ROWS, KILLED = "long lists", "shared rows", "killed"


@dataclass(frozen=True)
class Edit:
    """``old`` in ``file``, which is there exactly once, becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes:
        name: unique.
        bug: what is wrong, in a line.
        edits: the patch.
        finders: who must find it.
        finds: finding classes of the checked engine that are right; the first is the one to expect.
        passes_fast_suite: whether all tests of kernels on the fast engine pass; None: not asked.
        model: whether the protocol model has a mutant of this name.
    """

    name: str
    bug: str
    edits: tuple[Edit, ...]
    finders: tuple[str, ...]
    finds: tuple[str, ...] = ()
    passes_fast_suite: bool | None = None
    model: bool = False


def _in(header: str, old: str, new: str) -> Edit:
    return Edit(f"op_kernel/{header}.h", old, new)


def _without(header: str, line: str, after: str = "", before: str = "") -> Edit:
    """Takes a line out; ``after`` and ``before`` are text around it that tells it from others alike."""
    return _in(header, after + line + before, after + before)


def _pipe(name: str, bug: str, *edits: Edit, finder: str = WINDOW, more: tuple[str, ...] = ()) -> Mutant:
    """A pipe that does not wait for another."""
    return Mutant(name, bug, edits, (finder,), (SYNC, *more), passes_fast_suite=True)


def _suite(name: str, header: str, old: str, new: str) -> Mutant:
    return Mutant(name, name, (_in(header, old, new),), (SUITE,))


PIPES = [
    _pipe(
        "run_sent_before_written",
        "no S_MTE3 before a status message leaves",
        _without(
            "common/exchange",
            "            SyncFunc<HardEvent::S_MTE3>();\n",
            before="            sender_.PutStatus(",
        ),
    ),
    _pipe(
        "run_rewritten_before_sent",
        "no MTE3_S before the message is filled for the next peer",
        _without("common/exchange", "if (sent >= ring || ring == 1) SyncFunc<HardEvent::MTE3_S>();"),
    ),
    _pipe(
        "status_read_before_loaded",
        "no MTE2_S before the status words are judged",
        _without("common/status", "        SyncFunc<HardEvent::MTE2_V>();\n"),
        _without(
            "common/wait",
            "        SyncFunc<HardEvent::MTE2_S>();\n",
            before="    }\n    __aicore__ inline void LoadNear",
        ),
        more=(UNINITIALISED,),
    ),
    _pipe(
        "row_sent_before_loaded",
        "no EnQue/DeQue between load and store of a token's row",
        _in(
            "common/quantize",
            "            copyQueue_.EnQue(row);\n            row_ = copyQueue_.template DeQue<int8_t>();",
            "            row_ = row;",
        ),
        more=(UNINITIALISED,),
    ),
    _pipe(
        "scale_sent_before_written",
        "no S_MTE3 between a row's scale and its store",
        _without(
            "common/quantize",
            "            SyncFunc<HardEvent::S_MTE3>();\n",
            after="            row_ = outQueue_.template DeQue<int8_t>();\n",
        ),
    ),
    _pipe(
        "scale_read_before_reduced",
        "no V_S before the maximum is read",
        _without(
            "common/quantize", "        SyncFunc<HardEvent::V_S>();\n", before="        const float largest"
        ),
        more=(UNINITIALISED,),
    ),
    _pipe(
        "sum_stored_before_added",
        "no EnQue/DeQue between the sum and its store",
        _without(
            "common/weighted_sum",
            "        outQueue_.EnQue(out_);\n        out_ = outQueue_.template DeQue<XType>();\n",
        ),
        more=(UNINITIALISED,),
    ),
    _pipe(
        "counts_added_before_loaded",
        "no MTE2_V before histograms are added",
        _without(
            "common/routing",
            "            SyncFunc<HardEvent::MTE2_V>();\n",
            before="            for (uint32_t i = 0; i < count; ++i) {\n                AscendC::PipeBarrier",
        ),
        _without("direct/lists", "            SyncFunc<HardEvent::MTE2_V>();\n"),
        more=(UNINITIALISED,),
    ),
    _pipe(
        "placed_before_added",
        "no V_S before the totals are read",
        _without(
            "common/routing",
            "        SyncFunc<HardEvent::V_S>();\n",
            before="    }\n\n    // What a core needs to know where it only looks",
        ),
        _without(
            "direct/lists",
            "        SyncFunc<HardEvent::V_S>();\n",
            before="    }\n    // Where the total of",
        ),
        more=(UNINITIALISED,),
    ),
    _pipe(
        "segments_before_loaded",
        "no MTE2_S before kept counts become segments",
        _without(
            "window/dispatch",
            "        SyncFunc<HardEvent::MTE2_S>();\n",
            before="        segments.FromCounts(counts);",
        ),
        more=(UNINITIALISED,),
    ),
    _pipe(
        "counts_rewritten_before_kept",
        "no MTE3_S before the counts of the next source",
        _without(
            "window/dispatch",
            "        SyncFunc<HardEvent::MTE3_S>();\n",
            before="        for (uint32_t l = 0; l < lanes_; ++l) {",
        ),
    ),
    Mutant(
        "added_before_weighted",
        "no PIPE_V between weighting a row and adding it",
        (
            _without(
                "common/weighted_sum",
                "        AscendC::PipeBarrier<PIPE_V>();\n",
                before="        AscendC::Add(sum_",
            ),
        ),
        (WINDOW,),
        (HAZARD,),
        True,
    ),
    Mutant(
        "reduced_before_magnitude",
        "no PIPE_V between the absolute values and their maximum",
        (
            _without(
                "common/quantize",
                "        AscendC::PipeBarrier<PIPE_V>();\n",
                before="        AscendC::ReduceMax(reduced, magnitude",
            ),
        ),
        (WINDOW,),
        (HAZARD,),
        True,
    ),
]

CACHE_AND_CORES = [
    Mutant(
        "epoch_read_from_cache",
        "the epoch's line is not invalidated before the read",
        (_without("common/contexts", "        Invalidate();\n", before="        return control_"),),
        (WINDOW,),
        (STALE, HANG),
        True,
    ),
    Mutant(
        "epoch_left_in_cache",
        "the epoch's line is not cleaned",
        (
            _without(
                "common/contexts",
                "        Invalidate();\n",
                after="        control_.SetValue(kControlEpochWord, epoch);\n",
            ),
        ),
        (WINDOW,),
        (UNFLUSHED,),
        True,
    ),
    Mutant(
        "totals_left_in_cache",
        "totals by SetValue, their line not cleaned",
        (
            _in(
                "common/routing",
                "        SyncFunc<HardEvent::V_MTE3>();\n"
                "        AscendC::DataCopy(totals_, totalBuf_.Get<int32_t>(), lanes_);",
                "        for (uint32_t e = 0; e < lanes_; ++e)\n"
                "            totals_.SetValue(e, totalBuf_.Get<int32_t>().GetValue(e));",
            ),
        ),
        (WINDOW,),
        (UNFLUSHED,),
        True,
    ),
    Mutant(
        "every_core_publishes",
        "all cores write the epoch",
        (_in("common/exchange", "if (core_ == 0) word_.Publish(epoch_);", "word_.Publish(epoch_);"),),
        (WINDOW,),
        (SHARED_LINE, CORES, UNFLUSHED),
        True,
    ),
    Mutant(
        "no_sync_before_flags",
        "cores do not meet before the flags, the last one sends them all",
        (
            _in("common/exchange", "verdict_ = board_.Meet(1, all);", "verdict_ = all;"),
            _in(
                "common/exchange",
                "uint32_t i = FirstPeer(), sent = 0; i < info_->world; i += Senders(), ++sent",
                "uint32_t i = core_ + 1 == info_->cores ? 0 : info_->world, sent = 0; i < info_->world; "
                "++i, ++sent",
            ),
        ),
        (WINDOW,),
        (CORES, RANKS),
        True,
        model=True,
    ),
    Mutant(
        "no_drain_before_flags",
        "cores meet by a flag of the scalar unit, which waits for no store",
        (
            _without(
                "common/exchange", "        sender_.Flush();\n", before="        Verdict all = verdict_;"
            ),
            _without(
                "common/verdict",
                "        SyncFunc<HardEvent::MTE3_S>();\n",
                before="        NothingMore then;",
            ),
            _in(
                "common/verdict",
                "        AscendC::PipeBarrier<PIPE_ALL>();\n        AscendC::SyncAll<true>();",
                "        AscendC::CrossCoreSetFlag<0, PIPE_S>(0);\n"
                "        AscendC::CrossCoreWaitFlag<0, PIPE_S>(0);",
            ),
        ),
        (WINDOW,),
        (CORES, RANKS, SYNC),
        True,
        model=True,
    ),
    Mutant(
        "no_sync_after_wait",
        "combine: cores do not meet after the wait",
        (
            _in(
                "common/exchange",
                "verdict_ = board_.Meet(2, mine);",
                "verdict_ = config_.op == kOpCombine ? mine : board_.Meet(2, mine);",
            ),
        ),
        (WINDOW,),
        (RANKS, CORES, RESULT),
        False,
        model=True,
    ),
    Mutant(
        "wait_for_own_share_only",
        "dispatch: a core goes on when its own share of the sources is there",
        (
            _in(
                "common/exchange",
                "verdict_ = board_.Meet(2, mine);",
                "verdict_ = config_.op == kOpDispatch ? mine : board_.Meet(2, mine);",
            ),
        ),
        (WINDOW,),
        (CORES, RANKS, RESULT),
        False,
        model=True,
    ),
    Mutant(
        "publish_epoch_too_early",
        "the last core publishes the epoch while others have yet to read it",
        (
            _in(
                "common/exchange",
                "        epoch_ = NextEpoch(word_.Read());\n",
                "        epoch_ = NextEpoch(word_.Read());\n"
                "        if (core_ + 1 == info.cores) word_.Publish(epoch_);\n",
            ),
            _without("common/exchange", "if (core_ == 0) word_.Publish(epoch_);"),
        ),
        (WINDOW,),
        (HANG, CORRUPT, WRONG_HALF, STALE, CORES),
        True,
        model=True,
    ),
    Mutant(
        "slot_stride",
        "rounds of the verdict board are one block too close",
        (
            _in(
                "common/verdict",
                "static_cast<uint64_t>(round) * cores_",
                "static_cast<uint64_t>(round) * (cores_ - 1)",
            ),
        ),
        (WINDOW,),
        (CORES,),
        False,
    ),
    Mutant(
        "every_core_stores_totals",
        "all cores write the totals to the same place",
        (
            _without(
                "common/routing",
                "        if (core_ != 0) return;\n",
                before="        SyncFunc<HardEvent::V_MTE3>();\n        AscendC::DataCopy(totals_",
            ),
        ),
        (WINDOW,),
        (CORES,),
        True,
    ),
]

RANKS_OF_WINDOW = [
    Mutant(
        "single_half",
        "rows of all epochs go to half 0",
        (
            _in(
                "common/send",
                "Region(parity_, context_->rank()) + offset, rows",
                "Region(0, context_->rank()) + offset, rows",
            ),
            _in(
                "common/send",
                "HalfOffset(context_->data_bytes(), parity_)",
                "HalfOffset(context_->data_bytes(), 0)",
            ),
            _in("common/exchange", "info_->world, Parity(epoch_), source)", "info_->world, 0, source)"),
            _in(
                "common/exchange",
                "HalfOffset(context_.data_bytes(), Parity(epoch_))",
                "HalfOffset(context_.data_bytes(), 0)",
            ),
        ),
        (WINDOW,),
        (RANKS, WRONG_HALF, RESULT),
        False,
        model=True,
    ),
    Mutant(
        "single_status_half",
        "status messages of all epochs go to half 0",
        (
            _in(
                "common/send",
                "StatusOffset(context_->world(), parity_,",
                "StatusOffset(context_->world(), 0,",
            ),
            _in(
                "common/wait", "StatusOffset(info.world, Parity(epoch), 0)", "StatusOffset(info.world, 0, 0)"
            ),
        ),
        (WINDOW,),
        (CORRUPT, WRONG_HALF, RANKS, HANG),
        False,
        model=True,
    ),
    Mutant(
        "no_epoch",
        "any status message is taken for this epoch's",
        (
            _in(
                "common/status",
                "            if (seen == 0 || IsStale(seen ^ kStatusMagic, epoch_)) return kPending;",
                "            if (seen != 0) return JudgeCounts(message, source, verdict);\n"
                "            return kPending;",
            ),
            _without(
                "common/status",
                "            if (message.GetValue(at + kCbEpoch) != epoch_) return kPending;\n",
            ),
        ),
        (WINDOW,),
        (RESULT, CORRUPT, MISMATCH, RANKS),
        False,
        model=True,
    ),
    Mutant(
        "torn_run",
        "a reader looks at header 0 and not at the blocks behind it",
        (
            _in(
                "common/status",
                "        if (message.GetValue(kBlockWords + kH1Epoch) != epoch_) return false;",
                "        return true;",
            ),
            _without(
                "common/status",
                "            if (message.GetValue(at + kCbEpoch) != epoch_) return kPending;\n",
            ),
        ),
        (WINDOW,),
        (CORRUPT, RESULT, RANKS),
        False,
        model=True,
    ),
    Mutant(
        "skip_flag_when_zero_rows",
        "no status message to a peer that gets no rows",
        (
            _in(
                "common/exchange",
                "            SyncFunc<HardEvent::S_MTE3>();\n            sender_.PutStatus(",
                "            if (!Failed() && counts.Rows(peer, 0) == 0) continue;\n"
                "            SyncFunc<HardEvent::S_MTE3>();\n            sender_.PutStatus(",
            ),
        ),
        (WINDOW,),
        (HANG,),
        False,
        model=True,
    ),
    Mutant(
        "skip_wait_when_zero_rows",
        "combine does not wait for ranks that return no rows",
        (
            _in(
                "common/exchange",
                "        const uint32_t count = PartBegin(info_->world, core_ + 1, info_->cores) - first;\n"
                "        StatusWaiter waiter;",
                "        uint32_t count = PartBegin(info_->world, core_ + 1, info_->cores) - first;\n"
                "        while (count > 0 && !arrived.Awaits(first + count - 1)) --count;\n"
                "        StatusWaiter waiter;",
            ),
            _in(
                "window/dispatch",
                "    __aicore__ inline Verdict Arrived(",
                "    __aicore__ inline bool Awaits(uint32_t) const { return true; }\n"
                "    __aicore__ inline Verdict Arrived(",
            ),
            _in(
                "window/combine",
                "    __aicore__ inline Verdict Arrived(",
                "    __aicore__ inline bool Awaits(uint32_t source) {\n"
                "        uint32_t rows = 0;\n"
                "        for (uint32_t l = 0; l < info_->localExperts; ++l)\n"
                "            rows += routing_.Total(source * info_->localExperts + l);\n"
                "        return rows > 0;\n"
                "    }\n"
                "    __aicore__ inline Verdict Arrived(",
            ),
        ),
        (WINDOW,),
        (RANKS, CORRUPT, WRONG_HALF, RESULT, HANG),
        False,
    ),
    Mutant(
        "wrong_half_for_combine",
        "combine's rows use the half of the op before",
        (
            _in(
                "window/combine",
                "    __aicore__ inline Verdict LoadAllSegments() {",
                "    __aicore__ inline uint64_t HalfShift() const {\n"
                "        const uint64_t half = HalfBytes(exchange_.context().data_bytes());\n"
                "        return Parity(exchange_.epoch()) == 0 ? half : 0 - half;\n"
                "    }\n"
                "    __aicore__ inline Verdict LoadAllSegments() {",
            ),
            _in(
                "window/combine",
                "base = kRdma ? exchange_.sender().rows_at() : 0;",
                "base = HalfShift() + (kRdma ? exchange_.sender().rows_at() : 0);",
            ),
            _in("window/combine", "slot * rowBytes_,", "slot * rowBytes_ + HalfShift(),"),
            _in("window/combine", "exchange_.Half() +", "exchange_.Half() + HalfShift() +"),
        ),
        (WINDOW,),
        (RANKS, WRONG_HALF, RESULT),
        False,
        model=True,
    ),
    Mutant(
        "expand_idx_prefix",
        "positions are one too high on every core but the first",
        (
            _in(
                "common/routing",
                "        return static_cast<uint32_t>(position);",
                "        return static_cast<uint32_t>(position + (core_ > 0));",
            ),
        ),
        (WINDOW,),
        (RESULT, CORES, MISMATCH),
        False,
    ),
    Mutant(
        "flag_before_data",
        "combine: status messages leave before the rows",
        (
            _in(
                "window/combine",
                "        const bool rdma =",
                "        exchange_.SetStatus(*this, rowBytes_);\n        const bool rdma =",
            ),
            _without(
                "window/combine",
                "        exchange_.SetStatus(*this, rowBytes_);\n",
                before="        if (!exchange_.WaitStatus(*this)) {",
            ),
        ),
        (WINDOW,),
        (RANKS, CORES, RESULT),
        False,
        model=True,
    ),
    Mutant(
        "canary",
        "combine leaves out the row of k = 0: wrong data in every run",
        (
            _in(
                "window/sum",
                "if (!routing.pairs().Routed(id)) continue;",
                "if (k == 0 || !routing.pairs().Routed(id)) continue;",
            ),
            _in(
                "direct/sum",
                "if (!routing.pairs().Routed(id)) continue;",
                "if (k == 0 || !routing.pairs().Routed(id)) continue;",
            ),
        ),
        (WINDOW,),
        (RESULT,),
        False,
    ),
]

# On one server, as in the fast suite's own tests, none of these shows.
TRANSPORT = [
    Mutant(
        "posted_before_staged",
        "items leave before the cores have met over what they staged",
        (_without("common/exchange", "            AscendC::SyncAll<true>();"),),
        (SERVERS,),
        (RESULT, HANG),
        True,
    ),
    Mutant(
        "status_item_first",
        "two items a peer: the status message, then the rows",
        (
            _in(
                "common/send",
                "        WindowSender::SetItem(words, sender_->ItemOf(peer, rowBytes, messageBytes));",
                "        for (uint32_t part = 0; part < 2; ++part) {\n"
                "        BatchItem item = sender_->ItemOf(peer, rowBytes, messageBytes);\n"
                "        item.local += part == 0 ? rowBytes : 0;\n"
                "        item.remote += part == 0 ? rowBytes : 0;\n"
                "        item.bytes = part == 0 ? messageBytes : rowBytes;\n"
                "        SyncFunc<HardEvent::MTE3_S>();\n"
                "        WindowSender::SetItem(words, item);",
            ),
            _in(
                "common/send",
                "at = sender_->servers().FarIndex(peer);",
                "at = sender_->servers().FarIndex(peer) + part * sender_->servers().FarCount();",
            ),
            _in(
                "common/send",
                "(list[static_cast<uint64_t>(at) * kItemWords], words, kItemWords);",
                "(list[static_cast<uint64_t>(at) * kItemWords], words, kItemWords);\n        }",
            ),
            _in(
                "common/send",
                "static_cast<uint64_t>(world_) * kItemWords",
                "2 * static_cast<uint64_t>(world_) * kItemWords",
            ),
            _in(
                "common/exchange",
                "link_.Post(items_.address(), sender_.servers().FarCount())",
                "link_.Post(items_.address(), 2 * sender_.servers().FarCount())",
            ),
        ),
        (SERVERS,),
        (RESULT,),
        True,
    ),
    Mutant(
        "rows_taken_from_start",
        "dispatch takes rows from the start of a region, not towards its end",
        (
            _without(
                "window/dispatch", "        if (info_->transport == kTransportRdma) segments.AlignEnd();\n"
            ),
        ),
        (SERVERS,),
        (RESULT,),
        True,
    ),
]

# What the fast suite sees of these is what the tests of direct see.
OF_DIRECT = [
    Mutant(
        "lists_still_leaving",
        "dispatch: no second meeting, messages leave while other cores store their lists",
        (_without("direct/dispatch", "        exchange_.MeetAfterSend(Verdict());\n"),),
        (DIRECT,),
        (CORES, RANKS, RESULT),
        False,
        model=True,
    ),
    Mutant(
        "other_half_filled",
        "rows and lists go to the other half",
        (
            _in(
                "common/exchange",
                "Half() const { return HalfOf(info_->rank); }",
                "Half() const {\n"
                "        return context_.data(info_->rank) +\n"
                "               HalfOffset(context_.data_bytes(), Parity(epoch_) ^ 1u);\n    }",
            ),
        ),
        (DIRECT,),
        (WRONG_HALF,),
        False,
    ),
    Mutant(
        "fail_block_ignored",
        "cores other than 0 do not look at the fail block",
        (_without("common/wait", "            if (given.code != kOk) return given;\n"),),
        (KILLED,),
        (HANG,),
        False,
    ),
    Mutant(
        "no_first_meeting",
        "the cores do not meet over their histograms",
        (
            _in("common/exchange", "verdict_ = board_.Meet(0, mine);", "verdict_ = mine;"),
            _in(
                "common/exchange",
                "verdict_ = board_.MeetThen(0, mine, then);",
                "verdict_ = mine;\n        then.Met();",
            ),
        ),
        (DIRECT,),
        (CORES, RANKS, RESULT, UNINITIALISED),
        False,
        model=True,
    ),
    Mutant(
        "rows_after_runs",
        "combine: rows are copied into the half after the meeting",
        (
            _without("direct/publish", " else {\n            StoreRows();\n        }"),
            _in(
                "direct/combine",
                "        exchange_.SetStatus(return_, rowBytes_);\n",
                "        exchange_.SetStatus(return_, rowBytes_);\n        return_.StoreRows();\n",
            ),
        ),
        (DIRECT,),
        (RANKS, CORES, RESULT),
        False,
        model=True,
    ),
    Mutant(
        "list_off_by_owner",
        "a list goes to the place of the next owner",
        (
            _in(
                "direct/lists",
                "        GlobalTensor<int32_t> target;",
                "        owner = (owner + 1) % info_->world;\n        GlobalTensor<int32_t> target;",
            ),
            _in(
                "direct/dispatch",
                "            GlobalTensor<int32_t> list;",
                "            owner = (owner + 1) % info_->world;\n            GlobalTensor<int32_t> list;",
            ),
        ),
        (DIRECT,),
        (BOUNDS, RESULT, RANKS),
        False,
    ),
    Mutant(
        "lent_as_published",
        "readers look in the half for rows that lie in a lent area",
        (_in("direct/rows", "PhaseOf(message.GetValue(kH0OpPhase)) == kPhaseLent", "false"),),
        (LENT, ZERO_COPY),
        (RESULT,),
        False,
    ),
    Mutant(
        "follower_does_not_wait",
        "cores other than 0 do not wait: they use the messages of their first look",
        (
            _in(
                "common/wait",
                "            if (next == count_) break;\n            Verdict given;",
                "            break;\n            Verdict given;",
            ),
        ),
        (DIRECT,),
        (RANKS, RESULT, CORES),
        False,
        model=True,
    ),
    _pipe(
        "list_read_before_loaded",
        "no MTE2_S before list entries are read",
        _without("direct/gather", "        SyncFunc<HardEvent::MTE2_S>();\n"),
        _without("direct/shared_rows", "        SyncFunc<HardEvent::MTE2_V>();\n"),
        finder=DIRECT,
        more=(UNINITIALISED,),
    ),
    _pipe(
        "entry_sent_before_written",
        "no S_MTE3 before list entries leave",
        _without("direct/dispatch", "        SyncFunc<HardEvent::S_MTE3>();\n"),
        finder=DIRECT,
    ),
    _pipe(
        "list_sent_before_selected",
        "no V_MTE3 before a list leaves",
        _without(
            "direct/lists",
            "        SyncFunc<HardEvent::V_MTE3>();\n",
            after="        uint32_t at = 0, rows = before_;\n",
        ),
        finder=ROLES,
    ),
    _pipe(
        "position_sent_before_written",
        "no V_MTE3 before positions leave",
        _without(
            "direct/lists",
            "        SyncFunc<HardEvent::V_MTE3>();\n",
            before="    }\n    // For pairs",
        ),
        finder=ROLES,
    ),
    _pipe(
        "positions_turned_before_sent",
        "no MTE3_V before the table becomes that of the next positions",
        _without("direct/lists", "        SyncFunc<HardEvent::MTE3_V>();\n"),
        finder=LONG_LISTS,
        more=(HAZARD,),
    ),
    _pipe(
        "triples_sent_before_written",
        "rows read once: no S_MTE3 before triples leave",
        _without(
            "direct/shared_rows",
            "        SyncFunc<HardEvent::S_MTE3>();\n",
            before="        for (uint32_t i = 0; i < end_ - begin_; ++i) {\n            const uint32_t place",
        ),
        finder=SHARED_ROWS,
    ),
]

OF_THE_SUITE = [
    # routing
    _suite(
        "prefix off by one",
        "common/routing",
        "prefix.SetValue(expert, static_cast<int32_t>(rows))",
        "prefix.SetValue(expert, static_cast<int32_t>(rows + (l == 1)))",
    ),
    _suite(
        "a core counts its own pairs as earlier ones",
        "common/routing",
        "if (core + i < core_)",
        "if (core + i <= core_)",
    ),
    _suite(
        "capacity one too large",
        "common/routing",
        "if (rows > info_->capacity &&",
        "if (rows > info_->capacity + 1 &&",
    ),
    _suite(
        "mask of the chunk's first tokens",
        "common/routing",
        "info_->maskRank == 1 ? token - firstToken_ : i",
        "info_->maskRank == 1 ? i : i",
    ),
    _suite("masked pairs are routed", "common/routing", "== 0) return kInactive;", "== 2) return kInactive;"),
    _suite(
        "last expert is invalid",
        "common/routing",
        "id < static_cast<int32_t>(info_->experts)",
        "id + 1 < static_cast<int32_t>(info_->experts)",
    ),
    # dispatch
    _suite(
        "expand_idx kept where nothing is routed",
        "window/dispatch",
        "index.SetValue(i, static_cast<int32_t>(position));",
        "if (routing_.pairs().Routed(id)) index.SetValue(i, static_cast<int32_t>(position));",
    ),
    _suite(
        "triple without k",
        "window/dispatch",
        "triple.SetValue(2, static_cast<int32_t>(k))",
        "triple.SetValue(2, static_cast<int32_t>(k == 1 ? 0 : k))",
    ),
    _suite(
        "chunks run over the end of a segment",
        "window/dispatch",
        "Min(end, segments.End(slot)) - row);",
        "end - row);",
    ),
    _suite(
        "expert_token_nums types swapped",
        "common/outputs",
        "tiling_->tokenNumsType == 0 ? end",
        "tiling_->tokenNumsType != 0 ? end",
    ),
    _suite(
        "tp_recv_counts left out",
        "common/outputs",
        "if (tiling_->tpWorldSize == 1)",
        "if (tiling_->tpWorldSize == 2)",
    ),
    # segments
    _suite(
        "rows of a source start at the segment before",
        "common/segments",
        "SetValue(slot, before);",
        "SetValue(slot, before - (before > 1));",
    ),
    _suite("falling counts are accepted", "common/segments", "if (end < before ||", "if (end < 0 ||"),
    # quantisation
    _suite("scale is m / 127", "common/quantize", "scale = 1.0f / inverse;", "scale = largest / 127.0f;"),
    _suite("scale of zero rows is 0", "common/quantize", "float scale = 1.0f;", "float scale = largest;"),
    _suite(
        "smoothed row is used for another expert",
        "common/quantize",
        "(!kSmooth || expert == expert_)",
        "(!kSmooth || true)",
    ),
    _suite(
        "codes are truncated",
        "common/quantize",
        "AscendC::RoundMode::CAST_RINT, hidden_",
        "AscendC::RoundMode::CAST_TRUNC, hidden_",
    ),
    # status and waiting
    _suite(
        "no status to who gets no rows",
        "common/exchange",
        "sender_.PutStatus(peer, MessageAt(at), bytes);",
        "if (Failed() || counts.Rows(peer, 0) != 0) sender_.PutStatus(peer, MessageAt(at), bytes);",
    ),
    _suite(
        "status without counts",
        "common/exchange",
        "writers_[at].SetCount(i, count);",
        "writers_[at].SetCount(i, 0);",
    ),
    _suite(
        "status leaves before the rows of other cores",
        "common/exchange",
        "verdict_ = board_.Meet(1, all);",
        "verdict_ = all;",
    ),
    _suite(
        "the higher rank's error is reported",
        "common/verdict",
        "other.source < verdict.source",
        "other.source > verdict.source",
    ),
    # the window
    _suite(
        "one half for all epochs",
        "protocol/window",
        "return parity * HalfBytes(dataBytes);",
        "return (parity - parity) * HalfBytes(dataBytes);",
    ),
    _suite(
        "status slots are not doubled",
        "protocol/window",
        "(static_cast<uint64_t>(parity) * world + source) *",
        "(parity * 0ull + source) *",
    ),
    _suite(
        "parity breaks at the wrap",
        "protocol/window",
        "epoch == 0xFFFFFFFFu ? 2u : epoch + 1",
        "epoch == 0xFFFFFFFFu ? 1u : epoch + 1",
    ),
    _suite(
        "stale status unknown across the wrap",
        "protocol/window",
        "(epoch == 3 && seen == 0xFFFFFFFFu)",
        "(epoch == 3 && seen == 0xFFFFFFFDu)",
    ),
    _suite(
        "a block too much a row",
        "protocol/window",
        "(quantised ? kBlock : 0)",
        "(quantised ? 2 * kBlock : 0)",
    ),
    # combine
    _suite(
        "k descending",
        "window/sum",
        "for (uint32_t k = 0; k < info_->topK; ++k) {",
        "for (uint32_t k = info_->topK; k-- > 0;) {",
    ),
    _suite(
        "expert scale left out",
        "common/weighted_sum",
        "if (weighted) AscendC::Muls(term, term, weight, elements_);",
        "(void)weight;",
    ),
    _suite(
        "position in the expert left out",
        "window/sum",
        "routing.Prefix(id) + indexBuf_.Get<int32_t>().GetValue(i);",
        "routing.Prefix(id) + 0 * indexBuf_.Get<int32_t>().GetValue(i);",
    ),
    _suite(
        "shared expert for inactive tokens",
        "window/sum",
        "if (active && tiling_->hasSharedExpertX != 0)",
        "if (tiling_->hasSharedExpertX != 0)",
    ),
    _suite(
        "sum is truncated",
        "common/weighted_sum",
        "AscendC::Cast(out_, sum_, AscendC::RoundMode::CAST_RINT",
        "AscendC::Cast(out_, sum_, AscendC::RoundMode::CAST_TRUNC",
    ),
    _suite("wrong returns are accepted", "common/inputs", "if (ours != theirs)", "if (ours < theirs)"),
    _suite(
        "expand_idx is not looked at",
        "common/inputs",
        "if (position >= total)",
        "if (position > total + 4096)",
    ),
    _suite(
        "k of a triple is not looked at",
        "common/inputs",
        "info.world, info.maxBatch, info.topK}",
        "info_->world, info_->maxBatch, 4096}",
    ),
]

# Each of these breaks `ascend-moe run`, whose checks name the op.
OF_RUNS = [
    Mutant(
        "row of another token",
        "dispatch sends the row of another token",
        (
            _in(
                "common/quantize",
                "x_[static_cast<uint64_t>(token) * rowBytes_]",
                "x_[static_cast<uint64_t>(token / 2) * rowBytes_]",
            ),
        ),
        (RUN,),
        ("dispatch",),
    ),
    Mutant(
        "weight of the first row",
        "combine weighs all K rows of a token with the weight of its first",
        (
            _in(
                "window/sum",
                "scaleBuf_.Get<float>().GetValue(i)",
                "scaleBuf_.Get<float>().GetValue(inChunk * info_->topK)",
            ),
        ),
        (RUN,),
        ("combine",),
    ),
    Mutant(
        "half the rows counted",
        "dispatch tells every expert half its rows",
        (
            _in(
                "common/outputs",
                "tokenNumsType == 0 ? end : end - before",
                "tokenNumsType == 0 ? end : (end - before) / 2",
            ),
        ),
        (RUN,),
        ("dispatch",),
    ),
]

MUTANTS = [
    *PIPES,
    *CACHE_AND_CORES,
    *RANKS_OF_WINDOW,
    *TRANSPORT,
    *OF_DIRECT,
    *OF_THE_SUITE,
    *OF_RUNS,
]

# Bugs that a protocol like CANN's can have, and what stands for them in this one.
CLASSIC = {
    "drop SyncAll before dispatch flags": "no_sync_before_flags",
    "drop SyncAll after combine wait": "no_sync_after_wait",
    "drop MTE3 drain before flags": "no_drain_before_flags",  # SyncAll drains: both go
    "single half": "single_half",
    "flags only, no parity or epoch": "no_epoch",
    "off-by-one slot stride": "slot_stride",  # window slots never touch: a region is more than its capacity
    "expandIdx prefix off by one": "expand_idx_prefix",
    "read counts before wait": "status_read_before_loaded",  # counts are in the run that is waited for
    "missing cache clean": "epoch_left_in_cache",
    "flag before counts (torn slot)": "torn_run",  # the writer's order is free: each block has its epoch
    "skip flags when count == 0": "skip_flag_when_zero_rows",
    "wrong half for combine": "wrong_half_for_combine",
    "reuse UB tensor before MTE3 done": "run_rewritten_before_sent",
    "wait on W instead of W*L slots": "wait_for_own_share_only",  # one run a source: its share is per core
}
