"""Broken kernels, each a patch of text that a test, a schedule or a user's run must find.

`mutants/builds.py` builds a library with a mutant's edits, `mutants/detectors.py` runs who finds it. All of
them: `make mutants`. That every old text is in its file exactly once is part of every run of the suite.
"""

from __future__ import annotations

from dataclasses import dataclass

# Who finds a mutant. On the fast engine: a part of the suite, the tests of zero copy, of "many ranks", those at the
# "borders" of what the kernels check, those of what comes of "failures", those of the "times" in performance_info,
# those of the "two levels" of hierarchy, also "explored" (these on both engines). On the
# checked engine: explore mode with cases of the algorithm "window" or "direct", of ranks on several "servers", also
# with "flags" in blocks that come in any order, of registered rows ("registered"), of "roles" (direct, some cores make
# lists), of all ranks in one launch ("one card"), of "long lists", of "shared rows" (direct, owners read a row once for
# all their experts), of "large" shares, with "faults" (ranks that die or call no more, wrong inputs, corrupted blocks),
# or with "forged" counts in a status message, also where combine keeps its "sums" then, or of ops in "two launches"; or
# what `ascend-moe explore -n 2000` has "drawn"; or a case of so many ranks that their messages are matched in "parts".
SUITE, ZERO_COPY, BORDERS, FAILURES = "suite", "zero copy", "borders", "failures"
WINDOW, SERVERS, DIRECT, REGISTERED, ROLES = "window", "servers", "direct", "registered", "roles"
LONG_LISTS, SHARED_ROWS, FAULTS = "long lists", "shared rows", "faults"
LARGE, FORGED, SUMS, TWO_LAUNCHES, DRAWN = "large", "forged", "sums", "two launches", "drawn"
FLAGS, ONE_CARD = "flags", "one card"
MANY_RANKS, IN_PARTS = "many ranks", "parts"
TIMES = "times"
LEVELS, LEVELS_EXPLORED = "two levels", "two levels explored"


@dataclass(frozen=True)
class Edit:
    """``old`` in ``file``, which is there exactly once, becomes ``new``. Spaces and line ends count alike."""

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
        detectors: which must find it.
        finds: finding classes of the checked engine that are right; the first is the one to expect.
        passes_fast_suite: whether all tests of kernels on the fast engine pass; None: not asked.
        model: whether the protocol model has a mutant of this name.
    """

    name: str
    bug: str
    edits: tuple[Edit, ...]
    detectors: tuple[str, ...]
    finds: tuple[str, ...] = ()
    passes_fast_suite: bool | None = None
    model: bool = False


# A mutant is "= name: bug", then its hunks. "@ header" names the file of the hunks that follow, also for the
# next mutants; "@" begins another hunk in the same file. "! detectors | findings | seen or unseen by the fast
# suite, model" says of one mutant what "%" says of all that follow.
PATCHES = r"""
# Messages that are waited for in parts.
@ common/status_wait
= parts_not_awaited: a core goes on when the messages of the first part have come
! many ranks
- if (next == stop_) EndPart();
+ if (next == stop_) { EndPart(); next = count_; }
@
- if (seen == MessageMatch::kExpected) next = stop_;
+ if (seen == MessageMatch::kExpected) { EndPart(); return worst; }
= missing_rank_named_within_its_part: a timeout names the rank's place in its part
! many ranks
- abort.source = CulpritOf(first_ + next);
+ abort.source = CulpritOf(first_ + next - part_);
= part_loaded_over_part: no V_MTE2 between what is kept of a part and the load of the next
! parts | missing pipe synchronisation, wrong result, race between cores
- SyncFunc<HardEvent::V_MTE2>();
  BeginPart(stop_);
= hashes_of_the_last_part_only: core 0 checks the hashes of the messages that it has in UB
! many ranks
- if (InParts()) nextToHash_ = 0;

# What performance_info counts.
= times_replaced: the sum of earlier calls is lost
! times
- const uint32_t sum = low + (seen
+ const uint32_t sum = (seen
= times_without_carry: a carry into the upper half is lost
! times
- if (sum < low) sums.SetValue(
+ if (false) sums.SetValue(
= times_at_the_wrong_place: each core adds to the elements of the first sources
! times
- (times + static_cast<uint64_t>(first) * 2 * sizeof(uint32_t)), count * 2);
+ (times), count * 2);
= times_added_before_they_are_loaded: no MTE2_S between the load of performance_info and the sums
! drawn
  CopyIn(sums, times_, 2 * count_);
- SyncFunc<HardEvent::MTE2_S>();

# Rows in flagged blocks, of more of them than are looked at together.
@ common/send
= flags_of_the_first_load_alone: the blocks behind the first load count as there
! drawn
- seen_ += count;
+ seen_ = blocks;

# Two levels: what hierarchy sends, forwards and sums.
@ window/combine
= sums_of_the_first_chunk: every chunk of tokens has the ids and weights of the first
! drawn
- addends_.Load(routing, token, tokens);
+ addends_.Load(routing, 0, tokens);
% two levels
= own_terms_before_servers: special experts and the shared expert's row are added before the servers' sums
- for (uint32_t i = 0; i < sums; ++i)
-     AddPart(inQueue_, parts_, sum_, {rows_->Sum(i), 1.0f, false, true, AddendKind::kWhole, 0.0f}, part);
  addends_.Begin(token);
  for (Addend addend; addends_.Next(routing, addend);) AddPart(inQueue_, parts_, sum_, addend, part);
+ for (uint32_t i = 0; i < sums; ++i)
+     AddPart(inQueue_, parts_, sum_, {rows_->Sum(i), 1.0f, false, true, AddendKind::kWhole, 0.0f}, part);
@ hierarchy/combine
= an_error_travels_on_in_the_next_pass: messages of a later pass carry errors that earlier ones have brought
- received = exchange_.ReplaceStatus(sent);
+ received = exchange_.status();
@ hierarchy/relay
= servers_by_first_pair: the source adds the sums of servers in the order of its pairs
- for (; at > 0 && servers_[at - 1] > server; --at) {
+ for (; at > kMaxTopK; --at) {
@ hierarchy/dispatch
= row_0_of_a_record_is_taken: the first number that no row of a source has passes for one
- if (row >= 0 || row < -static_cast<int32_t>(info_->capacity)) {
+ if (row > 0 || row < -static_cast<int32_t>(info_->capacity)) {
= a_collective_error_stops_messages: a rank that has an error does not pass messages on
- relay.PassMessagesOn();
+ if (!exchange_.Failed()) relay.PassMessagesOn();
= forwarder_takes_rows_from_the_start: rows of a server are taken from where they would begin if there were most
- relay.Arrived(server) - static_cast<uint64_t>(rows - number) * bytes),
+ relay.Arrived(server) - static_cast<uint64_t>(info_->maxBatch - number) * bytes),
@ hierarchy/combine
= rows_of_records_unchecked: a row number that dispatch cannot have kept is taken
- if (row >= 0 || row < -came)
+ if (row >= 0 && row < -came)
= sums_of_servers_not_counted: a source takes another number of sums than it waits for
- if (rows != totals_.Total(server) && mine.code == kOk)
+ if (rows > info_->maxBatch && mine.code == kOk)

# Its failures: who is named, in which level, and what ranks that run other algorithms report.
@ common/status_wait
= no_level_is_reported: a failure does not say in which wait it was found
- if (status.code >= kFirstFatal && status.reporter == info_->rank)
+ if (false)
  status.detail0 =
@ common/status
= older_epochs_are_damage: what an older op of hierarchy has left is taken for damage
- if (IsStale(seen, epoch_)) return true;
+ return IsStale(seen, epoch_);
@ common/aborts
= notes_before_their_time: a hint of an older op counts
- if (!whole || epoch != epoch_ || algorithm == algorithm_ || hint.code != kOk) return;
+ if (!whole || algorithm == algorithm_ || hint.code != kOk) return;
= core_0_waits_for_its_own_share: core 0 writes no hints while it waits for other cores
- if (hints_ != nullptr) hints_->Look();
  if (called_
= failed_in_the_next_op_is_untold: an abort block of the next op is not counted as a hint
-  if (hinted_ == source) ++hinted_;
  continue;
= fewer_turns_are_kept: a rank that is asked while it asks does not hurry whom it asks
- turns = watch.turns();
-  hints.Accuse(missed.source, turns);
-  end =
+ turns = watch.turns();
+ end =
% two levels explored
@ hierarchy/dispatch
= messages_pass_on_before_rows: a forwarder's cores do not synchronize between rows and messages
- exchange_.BarrierAt(0, ForwardRows(relay));
+ exchange_.Fail(ForwardRows(relay));
@ hierarchy/combine
= own_rows_not_awaited: a rank sums its own tokens without a wait for its server's rows
- exchange_.WaitStatus(*this, 0, Awaited::kReturned, pass);
+ if (!pass.Own()) exchange_.WaitStatus(*this, 0, Awaited::kReturned, pass);
= own_message_overtakes_rows: messages leave while rows of the pass are in flight
- exchange_.BarrierAfterSend(OpStatus());
@ hierarchy/relay
= a_relayed_message_before_it_is_loaded: no EnQue and DeQue between load and store of a message
- messageQueue_.EnQue(message);
- message = messageQueue_.template DeQue<uint32_t>();
@ common/exchange
= meetings_of_both_levels_alike: the second level's core barriers have the first one's tag
- { barrierTag_ = WaitTag(waits); }
+ { barrierTag_ = 0; }
= nobody_is_asked: a rank names the one that it misses, which may wait itself
- if (SendsHints() && status_.code == kCommTimeout && status_.reporter == info_->rank)
+ if (false)
@ common/aborts
= nobody_answers: a rank that is asked goes on waiting
! two levels
- if (hint.code == kOk && turns_ < kMostTurns && AscendC::GetSystemCycle() >= answerFrom_) hint.code = kAccused;

# Pipes that do not wait for another.
% window | missing pipe synchronisation, uninitialised UB read | unseen
@ common/exchange
= run_sent_before_written: no S_MTE3 before a status message leaves
! window | missing pipe synchronisation | unseen
- SyncFunc<HardEvent::S_MTE3>();
  sender_.PutStatus(
@ common/weighted_sum
= sum_stored_before_added: no EnQue/DeQue between the sum and its store
- outQueue_.EnQue(out_);
- out_ = outQueue_.template DeQue<XType>();

# The data cache, and cores that do not synchronize.
% window | missing pipe synchronisation | unseen
@ common/contexts
= one_peer_too_few: the last rank's address is not loaded
! window | uninitialised UB read, out of bounds, wrong result
- const uint32_t words = (kind_ == kContextA3 ? 2 : 1) * world_ * (kWordPairBytes / kIntBytes);
+ const uint32_t words = (world_ - 1) * (kWordPairBytes / kIntBytes);
@ common/exchange
= peers_of_the_plan_before: addresses are looked up where a plan of UB that has ended had them
! servers | use after free
- pipe_->Reset();
- context_.ForgetPeers();
+ pipe_->Reset();
@ direct/dispatch
% window | unflushed scalar write | unseen
@ common/routing
= totals_left_in_cache: totals by SetValue, their line not cleaned
- SyncFunc<HardEvent::V_MTE3>();
- AscendC::DataCopy(totals_, totalBuf_.Get<int32_t>(), lanes_);
+ for (uint32_t e = 0; e < lanes_; ++e)
+ totals_.SetValue(e, totalBuf_.Get<int32_t>().GetValue(e));
@ common/exchange
= every_core_publishes: all cores write the epoch
! window | race between cores | unseen
- if (core_ == 0) word_.Publish(epoch_);
+ word_.Publish(epoch_);
= no_sync_before_flags: cores do not synchronize before the flags, the last one sends them all
! window | race between cores, race between ranks | seen, model
- status_ = barrier_.ArriveAndWait(round, all);
+ status_ = all;
@
- uint32_t i = FirstPeer(), sent = 0; i < info_->world; i += Senders()
+ uint32_t i = core_ + 1 == info_->cores ? 0 : info_->world, sent = 0; i < info_->world; ++i
= no_drain_before_flags: a core comes to a core barrier while its stores are in flight
! window | race between cores, race between ranks, missing pipe synchronisation | unseen, model
- sender_.Flush();
  OpStatus all = status_;
@ common/core_barrier
- AscendC::PipeBarrier<PIPE_ALL>();
  if (cores_ == 1) return mine;
@ common/exchange
= wait_for_own_share_only: dispatch: a core goes on when its own share of the sources is there
! window | out of bounds, race between cores, race between ranks, wrong result | seen, model
- status_ = barrier_.ArriveAndWait(round, mine);
+ status_ = config_.op == kOpDispatch ? mine : barrier_.ArriveAndWait(2, mine);
= publish_epoch_too_early: the last core publishes the epoch while others have yet to read it
! window | hang, CorruptStatus, wrong part of a window, stale scalar read, race between cores | unseen, model
  if (info.part != kPartFinish) epoch_ = NextEpoch(epoch_);
+ if (core_ + 1 == info.cores) word_.Publish(epoch_);
@
- if (core_ == 0) word_.Publish(epoch_);
@ common/core_barrier
= slot_stride: blocks of core barriers are one block too close
! window | race between cores, out of bounds | seen
- blocks_ + round * kMaxCores * kBlock
+ blocks_ + round * (cores_ - 1) * kBlock
@ common/routing

# Ranks, with the algorithm window.
% window | race between ranks, wrong part of a window, wrong result | seen, model
@ common/send
= single_half: rows of all epochs go to half 0
- context_->data(peer) + Region(parity_, context_->rank())
+ context_->data(peer) + Region(0, context_->rank())
@
- PingPongOffset(context_->data_bytes(), parity_)
+ PingPongOffset(context_->data_bytes(), 0)
@ common/exchange
- info_->regions, Parity(epoch_), source)
+ info_->regions, 0, source)
@
- PingPongOffset(context_.data_bytes(), Parity(epoch_))
+ PingPongOffset(context_.data_bytes(), 0)
@ common/status
= no_epoch: any status message is taken for this epoch's
! window | wrong result, CorruptStatus, RoutingMismatch, race between ranks, hang | seen, model
- firstHere = first == (epoch_ ^ key), lastHere = last == epoch_;
+ firstHere = first != 0, lastHere = last != 0;
= torn_run: a reader looks at header 0 and not at the blocks behind it
! window | CorruptStatus, wrong result, ConfigMismatch, race between ranks, RoutingMismatch | seen, model
- complete = complete && firstHere && lastHere;
+ complete = complete && (b > 0 || (firstHere && lastHere));
= half_a_count_block: a reader compares the first half of a block of counts
! direct | CorruptStatus, wrong result, race between ranks, RoutingMismatch | seen
- 1u << kCbOpPhase | 1u << kCbTag;
+ 1u << kCbOpPhase;
@ common/exchange
= skip_flag_when_zero_rows: no status message to a peer that gets no rows
! window | hang | seen, model
+ if (!Failed() && counts.Rows(peer, 0) == 0) continue;
  SyncFunc<HardEvent::S_MTE3>();
  sender_.PutStatus(
@ window/combine
= flag_before_data: combine: status messages leave before the rows
! window | race between ranks, race between cores, wrong result | seen, model
+ if (sends) exchange_.SetStatus(segments_, rowBytes_);
  if (sends) {
  exchange_.BarrierAfterSend(
@
- exchange_.SetStatus(segments_, rowBytes_);
  } else {
@ common/weighted_sum
= canary: combine leaves out the row of k = 0: wrong data in every run
! window | wrong result | seen
- if (!addend.travelled && !routing.pairs().Special(id)) continue;
+ if (k == 0 || (!addend.travelled && !routing.pairs().Special(id))) continue;

# A failure that core 0 finds late, or one core alone, leaves zeros in all of x.
@ common/exchange
= sums_not_heard: combine keeps its sums of an op in which another core has failed
! sums | wrong result | model
- Fail(barrier_.Wait(2));
@ direct/combine
= late_failure_not_reported: core 0 of direct combine tells the others that all is well before it has judged
! sums | wrong result
+ if (exchange_.core() == 0) exchange_.ArriveBeforeSums(OpStatus());
  const bool good = exchange_.core() != 0 || Judge();
- exchange_.ArriveBeforeSums(OpStatus());
+ if (exchange_.core() != 0) exchange_.ArriveBeforeSums(OpStatus());
@ window/combine
= missing_row_not_reported: a core of window combine whose row has not come tells the others that all is well
! borders | RoutingMismatch
- if (item + 1 == end) owner.ArriveBeforeSums(rows_->missing());
+ if (item + 1 == end) owner.ArriveBeforeSums(OpStatus());

# Ops in two launches.
@ window/combine_indexed
= finish_does_not_count: window combine's finish takes the histograms of another launch
! two launches | RoutingMismatch
- return exchange_.Agree(routing_.Count());
+ return exchange_.Agree(OpStatus());
@ protocol/window
= finish_meets_in_the_past: the cores of a finish find the core barriers of the send
! two launches | race between cores, wrong result, RoutingMismatch, hang
- kCoreBarrierMagic ^ epoch ^ (finish ? 1u << 31 : 0u)
+ kCoreBarrierMagic ^ epoch

# The transport between servers: on one server none of these shows.
% servers | wrong result | seen
@ common/exchange
= posted_before_staged: items leave before the cores have met over what they staged
! servers | illegal argument, wrong result, hang, out of bounds | seen
- sync_.Wait();
# All ranks in one launch: groups of cores, which copy the items between servers.
@ common/core_group
= group_not_awaited: a core goes on before the others of its group have arrived
! one card | race between cores, wrong result, hang, misaligned address
- while (!AllArrived(row)) MOE_POLL_HINT();
+ AllArrived(row);
= group_lacks_a_core: the last core of a group is not waited for
! one card | race between cores, wrong result, hang, misaligned address
- core < cores_; ++core) arrived
+ core + 1 < cores_; ++core) arrived
= message_beside_rows: the message of an item leaves together with its rows
! one card | out of bounds, race between cores, wrong result
- return Min(kFlaggedBlock - static_cast<uint32_t>(remote % kFlaggedBlock), static_cast<uint32_t>(left));
+ return Min(kCardPieceBytes, static_cast<uint32_t>(left));
@ common/status_wait
= flags_unchecked: a message alone says that its rows have come
! flags | wrong result
- if (rowBytes_ != 0 && status.code == kOk && !BlocksCome(next)) break;
@ common/send
= first_block_unchecked: the flag of the first block of an item is not looked at
! flags | wrong result
- if (!Look(end, seen_, count)) return false;
+ if (count > 1 && !Look(end, seen_, count - 1)) return false;
@ protocol/window
= flags_of_any_epoch: a flag does not say of which epoch its block is
! flags | wrong result
- return kFlagMagic ^ epoch;
+ return kFlagMagic;
@ common/outputs
= rows_taken_from_start: dispatch takes rows from the start of a region, not towards its end
- if (rdma) segments.AlignEnd();

# Direct: what the fast suite sees of these is what the tests of direct see.
% roles | missing pipe synchronisation | unseen
@ direct/dispatch
= lists_still_leaving: dispatch: no second core barrier, messages leave while other cores store their lists
! direct | race between cores, race between ranks, wrong result | seen, model
- exchange_.BarrierAfterSend(OpStatus());
@ common/status_wait
= local_abort_flag_ignored: cores other than 0 do not look at the local abort flag
! faults | hang | seen
- if (given.code != kOk) return given;
@ common/exchange
= no_first_barrier: the cores do not synchronize over their histograms
! direct | race between cores, race between ranks, wrong result, uninitialised UB read | seen, model
- status_ = barrier_.ArriveAndWait(0, mine);
+ status_ = mine;
@ direct/lists
= list_off_by_owner: a list goes to the place of the next owner
! direct | out of bounds, wrong result, race between ranks | seen
+ owner = (owner + 1) % info_->world;
  GlobalTensor<int32_t> target;
@ direct/dispatch
- owner = Owner(*info_, static_cast<uint32_t>(id));
+ owner = (Owner(*info_, static_cast<uint32_t>(id)) + 1) % info_->world;
@ direct/sum
= registered_as_published: readers look in the ping-pong buffer for rows that lie in a registered area
! registered, zero copy | wrong result | seen
- PhaseOf(header1.GetValue(kH1OpPhase)) == kPhaseRegistered
+ false
@ common/status_wait
= follower_does_not_wait: cores other than 0 do not wait: they use the messages of their first look
! direct | race between ranks, wrong result, race between cores | seen, model
  continue;
  }
+ break;
  OpStatus given;
@ direct/gather
= list_read_before_loaded: no MTE2_S before list entries are read
! direct | missing pipe synchronisation, uninitialised UB read | unseen
  owesSourceIndices_ = info_->sourceIndices != 0;
- SyncFunc<HardEvent::MTE2_S>();
@ direct/shared_rows
- SyncFunc<HardEvent::MTE2_V>();
@ direct/lists
= list_sent_before_selected: no V_MTE3 before a list leaves
  uint32_t at = 0, rows = before_;
- SyncFunc<HardEvent::V_MTE3>();
= positions_turned_before_sent: no MTE3_V before the table becomes that of the next positions
! long lists | missing pipe synchronisation, same-pipe hazard | unseen
- SyncFunc<HardEvent::MTE3_V>();
@ direct/shared_rows
= triples_sent_before_written: rows read once: no S_MTE3 before source indices leave
! shared rows | missing pipe synchronisation | unseen
- SyncFunc<HardEvent::S_MTE3>();
  for (uint32_t i = 0; i < end_ - begin_; ++i) {
  const uint32_t place

# Shares of several chunks or batches: what is used again while a pipe still works on it.
% large | missing pipe synchronisation, same-pipe hazard
@ window/dispatch
= places_rewritten: window dispatch: no MTE3_S before the trailers of the next chunk are written
- SyncFunc<HardEvent::MTE3_S>();
  uint32_t token = at / info_->topK
@ protocol/tiling
= room_of_equal_shares: rows read once: room for shares as if core 0 took as much as the others
! large | wrong result
- CeilDiv(2 * lanes, 2 * cores - 1)
+ CeilDiv(lanes, cores)

# Counts that core 0 has not checked yet: places read from a peer's memory are kept inside.
% forged
@ direct/gather
= any pair of a list: the row of a pair that a list names is not kept among its source's rows
- Min(pair / pairsOfRow_, publishedRows_ - 1)
+ (pair / pairsOfRow_)
@ direct/shared_rows
= shared rows, triple beyond expand_idx
- if (place >= info_->expandRows) continue;
@ direct/sum
= registered rows beyond the registered area
- if (registered + rowBytes_ <= context.registered_bytes()) {
+ {

# Checks that are off by one.
% borders
@ common/segments
= V1, the last row of expand_x
- end > static_cast<int32_t>(limit)
+ end >= static_cast<int32_t>(limit)
= V2, a row more than expand_x when searched
- end > static_cast<int32_t>(info_->expandRows)
+ end > static_cast<int32_t>(info_->expandRows) + 1
@ common/inputs
= window, the position behind the last
! faults | success
- if (position >= total)
+ if (position > total)
@ common/segments
= a row more than fits, found by vectors
- result.GetValue(0) <= static_cast<float>(info_->capacity)
+ result.GetValue(0) <= static_cast<float>(info_->capacity) + 1
@ common/inputs
= the first triple that there is not
! suite
- if (value[w] >= limits[w])
+ if (value[w] > limits[w])
@ common/report
= a fatal failure does not replace a collective one
- >= static_cast<int32_t>(kFirstFatal) || status.code < kFirstFatal
+ >= 0
@ common/status_wait
= no_last_look: after the deadline a wait does not look again
- if (lastLook) {
+ if (lastLook || expired) {

# What a part of the suite sees.
% suite
@ common/segments
= a core counts its own pairs as earlier ones
- core_ > core ? Min(count, core_ - core)
+ core_ >= core ? Min(count, core_ + 1 - core)
@ common/routing
= masked pairs are routed
- == 0) return kInactive;
+ == 2) return kInactive;
@ window/dispatch
= triple without k
- trailer.SetValue(2, static_cast<int32_t>(k))
+ trailer.SetValue(2, static_cast<int32_t>(k == 1 ? 0 : k))
@ common/outputs
= expert_token_nums types swapped
- tiling_->tokenNumsType == 0 ? end
+ tiling_->tokenNumsType != 0 ? end
@ common/segments
= falling counts are accepted
- if (end < before || end > static_cast<int32_t>(limit))
+ if (end < 0 || end > static_cast<int32_t>(limit))
@ common/quantize
= smoothed row is used for another expert
- (!smooth_ || expert == expert_)
+ (!smooth_ || true)
@ common/exchange
= no status to who gets no rows
- sender_.PutStatus(peer, MessageAt(at), bytes);
+ if (Failed() || counts.Rows(peer, 0) != 0) sender_.PutStatus(peer, MessageAt(at), bytes);
@ common/core_barrier
= the higher rank's error is reported
! faults | wrong failure
- one.source < other.source
+ one.source > other.source
= of batches that differ the lowest rank's is named, not the largest
- severity == kBatchesDiffer &&
+ false &&
@ protocol/window
= parity breaks at the wrap
- epoch == 0xFFFFFFFFu ? 2u : epoch + 1
+ epoch == 0xFFFFFFFFu ? 1u : epoch + 1
= stale status unknown across the wrap
- (epoch == 3 && seen == 0xFFFFFFFFu)
+ (epoch == 3 && seen == 0xFFFFFFFDu)
@ common/weighted_sum
= products of const experts leave out the last elements
- for (uint32_t at = 0; at < info_->hidden; at += kDotLanes) {
+ for (uint32_t at = 0; at + kDotLanes <= info_->hidden || at == 0; at += kDotLanes) {
@ window/dispatch
= weight of another pair
- weightBuf_.Get<int32_t>().GetValue(i));
+ weightBuf_.Get<int32_t>().GetValue(0));
@ window/combine_indexed
= a row that has not come is taken from an earlier op
! borders
- GetValue(i * (kBlock / sizeof(uint64_t))) != tag_) {
+ GetValue(i * (kBlock / sizeof(uint64_t))) == tag_ + 1) {
@ common/weighted_sum
= shared expert for inactive tokens
- !active_ || sharedX_ == nullptr
+ sharedX_ == nullptr

# Rows that begin at multiples of 512 bytes.
% suite
@ common/send
= rows_stored_without_gaps: a chunk of rows is stored as if there were no gaps in the window
- const DataCopyExtParams params{Pieces(count), bytes, 0, step - bytes, 0};
+ const DataCopyExtParams params{Pieces(count), bytes, 0, 0, 0};
@ common/status
= other_alignment_unseen: a rank whose rows begin elsewhere is taken for one that has sent garbage
- Differs(kFieldRowUnit, TypesRowUnit(config_.types), TypesRowUnit(types), source, v);
+ Differs(kFieldRowUnit, kBlock, kBlock, source, v);

# Rows that come back as int8.
% suite
@ direct/sum
= direct, rows that stay are read as they were
- info_->expandRows != 0 && CommQuantMode(*info_) == 0) {
+ info_->expandRows != 0) {
@ common/quantize
= no PIPE_V between the maxima of blocks and their scales
! drawn
- AscendC::PipeBarrier<PIPE_V>();
  AscendC::Muls(scale, scale,

# What only programs of many kinds reach: chunks, batches, parts and loads after the first, and bugs of transport.
% drawn
@ common/routing
= duplicates are looked for in one chunk
- if (end_ - begin_ > chunk) pairs_.Load(at, count);
@ window/combine
= the shared expert's row in the first part only
- for (Addend addend; addends_.Next(routing, addend);)
+ for (Addend addend; addends_.Next(routing, addend) && (addend.travelled || part == 0);)
@ common/exchange
= the item of an inter-node peer lacks a row
- items_.Put(peer, static_cast<uint64_t>(rows) * rowBytes, bytes);
+ items_.Put(peer, static_cast<uint64_t>(rows > 2 ? rows - 1 : rows) * rowBytes, bytes);
@ window/combine_indexed
= rows of a token are in eight slots
- static_cast<uint64_t>(assist_.Word(row, 1)) * info_->topK + assist_.Word(row, 2);
+ static_cast<uint64_t>(assist_.Word(row, 1)) * info_->topK + Min(assist_.Word(row, 2), 7);
@ direct/combine
= duplicates are not counted exactly
! faults | success
- exchange_.Fail(routing_.Place());

# Where an op fails: what ranks receive, what they report, and what is left behind.
% drawn
@ common/aborts
= half an abort block is an abort
! failures
- if (magic != kAbortMagic || words.GetValue(at + kAbTag) != kAbortMagic) continue;
+ if (magic != kAbortMagic) continue;
= an abort of the next op ends this one
! failures
- if (words.GetValue(at + kAbEpoch) == NextEpoch(epoch_)) {
+ if (words.GetValue(at + kAbEpoch) == 0) {
@ common/report
= a failed rank posts its abort again with a later epoch
! faults | wrong failure
- return block.GetValue(kAbMagic) == kAbortMagic ? block.GetValue(kAbEpoch) : epoch_;
+ return epoch_;
@ common/aborts
= an abort is passed on as one's own
- status.reporter = words.GetValue(at + kAbReporter);
+ status.reporter = rank_;
= core 0 looks at no abort while it waits for the other cores
! failures
- if (called_ || ++looks_ % LooksAnAbort() != 0) return;
+ return;
@ common/status_wait
= a core that is called reads no reason
! failures
- const bool last = expired || lastLook;
+ const bool last = expired;
@ common/exchange
= core 0 does not leave that an op of its rank has failed
! failures
- localAbort.Post(status_.code);
  AscendC::PipeBarrier<PIPE_ALL>();
+ AscendC::PipeBarrier<PIPE_ALL>();
= hashes are left out where counts are unknown
! failures
- Worsen(status_, waiter.JudgeHashes(rowsKnown));
+ Worsen(status_, waiter.JudgeHashes(true));
@ common/core_barrier
= a mismatch of expand_idx goes before one of counts
- (status.detail0 & kMismatchIndex) != 0 ? 65 : 64;
+ (status.detail0 & kMismatchIndex) != 0 ? 63 : 64;
= fatal errors are reported by rank alone
! failures
- if (status.code >= kFirstFatal) return status.code - kFirstFatal;
+ if (status.code >= kFirstFatal) return 0;
@ common/report
= no abort to ranks that come later
! failures
- if (rank != info_->rank && !Arrived(headers, rank) && !sender.servers().InterNode(rank))
+ if (false)
= ranks that are awaited are not listed
! failures
- if (Arrived(headers, info_->rank)) ListAwaited(headers, words, status);
+ (void)0;
@ common/exchange
= a failed send does not take its epoch
- if (core_ == 0) word_.Publish(epoch_);
+ if (core_ == 0 && status_.code < kFirstFatal) word_.Publish(epoch_);
= what core 0 has given up the others wait for
! faults | wrong result, out of bounds, race between ranks, race between cores, wrong failure, hang
- Worsen(status_, waiter.Follow(localAbort));
+ waiter.Follow(localAbort);
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def read(patches: str) -> list[Mutant]:
    """The mutants of a text as PATCHES is one."""
    mutants: list[Mutant] = []
    header, usual = "", ""
    for block in ("\n" + patches).split("\n= "):
        name, *lines = block.splitlines()
        about = usual
        hunks: list[tuple[str, list[str], list[str]]] = [(header, [], [])]
        for line in lines:
            tag, text = line[:1], line[2:]
            if tag == "%":
                usual = text
            elif tag == "!":
                about = text
            elif tag == "@":
                header = text or header
                hunks.append((header, [], []))
            elif tag in ("-", " "):
                hunks[-1][1].append(text)
            if tag in ("+", " "):
                hunks[-1][2].append(text)
        if not name:
            continue
        detectors, finds, flags = (_words(part) for part in f"{about} | | ".split("|")[:3])
        seen = None if not {"seen", "unseen"} & {*flags} else "seen" not in flags
        edits = (Edit(f"op_kernel/{at}.h", "\n".join(old), "\n".join(new)) for at, old, new in hunks if old)
        name, _, bug = name.partition(": ")
        mutants.append(Mutant(name, bug or name, tuple(edits), detectors, finds, seen, "model" in flags))
    return mutants


MUTANTS = read(PATCHES)
