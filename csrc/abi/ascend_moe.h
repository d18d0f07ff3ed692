// The plain C ABI of libascend_moe.so. No C++ types, no exceptions cross it.
#pragma once

#include <stdint.h>

#define AM_API extern "C" __attribute__((visibility("default")))

// Windows: one allocation per rank: a page of the emulator's, the state area, the data area, the registered area.
AM_API uint64_t am_window_total_bytes(uint64_t data_bytes, uint64_t registered_bytes);
AM_API void* am_window_alloc(uint64_t total_bytes);
AM_API void* am_window_map(int fd, uint64_t total_bytes);
// Maps a window, or a part of another file, for reading only.
AM_API const void* am_window_look(int fd, uint64_t offset, uint64_t total_bytes);
AM_API void am_window_unmap(void* base, uint64_t total_bytes);
// Words of a window by which a group agrees on its survivors, 0 in a new window: atomically replaces `expected` by
// `desired`. Returns the previous value; 0 beyond the last word.
AM_API uint32_t am_window_ballot(void* base, uint32_t word, uint32_t expected, uint32_t desired);

// One rank's communicator handle. `live_fds`, by rank, become readable when the peer has ended; null or -1: none.
AM_API void* am_comm_create(int rank, int world, void* const* bases, uint64_t data_bytes, uint64_t registered_bytes,
                            const int* live_fds);
AM_API void am_comm_destroy(void* comm);
AM_API void am_comm_mark_lost(void* comm, int peer);
// The communication context of the communicator's launches: 0 the window table (the default), 1 A3's HcclOpResParam, 2
// A2's HcclA2CombineOpParam, in which the state area comes last. On A2 also how many ranks share a server (0: all); the
// others are reached by BatchWrite from windowsOut. CallSpec must have the same values. Call before the first launch,
// with the same values on all ranks. Returns 0, or 1 if refused.
AM_API int am_comm_use_context(void* comm, int kind);
AM_API int am_comm_use_servers(void* comm, int ranks_per_server, int intra_node_stores);
// How HCCL links the ranks of a server on several servers: by memory (1), without queue pairs between them, or by RDMA
// (0), without mapped windows. Not called: both, the default on a CPU.
AM_API void am_comm_use_links(void* comm, int stores);
// Bytes of the last launch: read then written, by kind of GM (tensor, window data, window state, workspace, registered
// window).
AM_API void am_comm_traffic(void* comm, uint64_t* bytes);
// This rank's registered area, or null. The handle outlives the communicator, until a call returns 1.
AM_API void* am_comm_registered(void* comm);
// Registers a block. Returns 0 with its address and generation in `out`, or 1 if there is no room: out[2] is then the
// number of blocks held, out[3] the bytes that the area would need.
AM_API int am_registered_take(void* area, uint64_t bytes, uint64_t* out);
// release: the tensor in a block has been freed. close, after am_comm_destroy: no more blocks are registered. Both
// return 1 if the area is closed and holds no tensor: its window may be unmapped, and the handle is invalid.
AM_API int am_registered_release(void* area, uint32_t generation);
AM_API int am_registered_close(void* area);
// On an NPU: the registered area at `base`, which is device memory; null without memory for it.
AM_API void* am_registered_open(int rank, uint64_t base, uint64_t bytes);
// A plan, or a `part` of it, is about to be queued as the `number`-th, from 1 on; a direct combine that sends consumes
// the block of `expand_x`. Returns 0; or -1 with am_run's text, and nothing may be queued.
AM_API int am_registered_use(void* area, const void* plan, uint32_t part, const void* expand_x, uint32_t number,
                             int32_t* record, char* fault, uint64_t fault_bytes);
// Whether a rank, of this process or another, is in an op of this communicator: 1 or 0.
AM_API int am_comm_in_op(void* comm, int rank);
// The epoch of the last completed op of this rank; 0: none.
AM_API uint32_t am_comm_epoch(const void* comm);
// What every rank of a group does, a line each (GroupWindows::Text), from its windows as mapped here. It writes
// nothing. A window may instead be zeros and a copy of a state area; the line is empty if there is none. Returns the
// bytes that the text takes.
AM_API uint64_t am_group_text(void* const* bases, int world, char* text, uint64_t bytes);
// Of a window's first page: rank, world, process, bytes of the window; whether its rank has closed its communicator.
// Returns 0 if the first four are not there: the rank has no communicator yet.
AM_API int am_window_label(const void* base, uint64_t* out);
// Tests: makes the next op run as the epoch after this one.
AM_API void am_comm_set_epoch(void* comm, uint32_t epoch);
// Where a rank's areas lie in a window, for tests: data offset, state offset, state bytes.
AM_API void am_window_layout(int world, uint64_t* out);

// Names in the order of their index, separated by blanks.
AM_API const char* am_tensor_names(void);
AM_API const char* am_attribute_names(void);
AM_API int am_type_code(const char* name);
AM_API int am_comm_algorithm(const char* name);
AM_API uint64_t am_spec_bytes(void);
AM_API uint64_t am_check_bytes(void);
AM_API uint64_t am_error_record_words(void);

// A plan: a checked call with its tiling. Null: `check` contains the reason.
AM_API void* am_plan_create(const void* spec, void* check);
AM_API void am_plan_destroy(void* plan);
// Words of a plan: op, tiling key, block dim, x type code, workspace bytes, window bytes, tiling bytes, transport.
// Returns their number; writes at most `count`.
AM_API uint64_t am_plan_info(const void* plan, uint64_t* out, uint64_t count);
// The tiling data for the kernel, at most `bytes`; returns its size.
AM_API uint64_t am_plan_tiling(const void* plan, void* out, uint64_t bytes);
// dtype, rank, dim 0, dim 1 of output `index`, as allocated; false past the last.
AM_API int am_call_output(const void* spec, int index, int64_t* out);

// What calls need, as text. Each function returns the bytes that its text takes. limits, window and tiling:
// fields "name=value" (window: of a dispatch whose spec may break only the rule about the window; tiling: of
// a plan). ub: one line for each item, with step, name and bytes. cann: one line for each version of CANN's
// operators, with name, bytes, MiB, KiB that its state window has more since am_cann_state_since, and the rules that
// the call breaks; `call` holds W, E, maxBS, H, K, shared experts, fp32 rows, equal batches, special experts.
AM_API uint64_t am_need_limits(char* text, uint64_t bytes);
AM_API uint64_t am_need_window(const void* dispatch_spec, char* text, uint64_t bytes);
AM_API uint64_t am_need_tiling(const void* plan, char* text, uint64_t bytes);
AM_API uint64_t am_need_ub(const void* plan, char* text, uint64_t bytes);
AM_API uint64_t am_need_cann(const int64_t* call, char* text, uint64_t bytes);
AM_API const char* am_cann_state_since(void);
// Why ranks on several super-pods of A3 are refused, and what CANN's own operators have there.
AM_API const char* am_super_pod_rule(void);
// The most bytes of UB that any core used in the communicator's last launch.
AM_API uint64_t am_need_ub_taken(void* comm);

// Runs a plan. Inputs are ordered by tensor index, outputs by output index. Returns an error code, with details in the
// record or, for a kernel fault, in the text; the record is zeros or still contains an earlier launch's failure. -1:
// expand_x of a combine lies in registered memory that it may not publish; nothing has run, the text contains the
// reason, and the record begins with generation and epoch.
AM_API int am_run(void* comm, void* plan, const void* const* inputs, void* const* outputs, int32_t* record, char* fault,
                  uint64_t fault_bytes);
// Code of the algorithm of the last op (am_comm_algorithm); 0: none.
AM_API uint32_t am_comm_algorithm_run(void* comm);
// Timestamps of phases (settings: ASCEND_MOE_TIMESTAMPS) of an op (1 dispatch, 2 combine) in this rank's window:
// am_timestamp_words() for each of 64 cores; and the same as text, a line "core<tab>phase<tab>cycles" for each core
// that took part in core 0's op. Cycles count from the first core's launch.
AM_API uint64_t am_timestamp_words(void);
AM_API void am_comm_timestamps(void* comm, int op, uint32_t* words);
AM_API uint64_t am_timestamps_text(const uint32_t* words, char* text, uint64_t bytes);
// Runs the bring-up's probe kernel (op_kernel/ascend_moe_probe.cpp) with this tiling; `report` has a block per core.
// Returns 0, or a kernel fault as above.
AM_API int am_probe(void* comm, const void* tiling, uint64_t tiling_bytes, uint32_t* report, char* fault,
                    uint64_t fault_bytes);
// Several ranks in one launch, on this machine or one NPU (op_kernel/protocol/tiling.h). rank: writes the
// am_card_rank_words() words that the kernel reads of one rank, from the address of its context, those of the inputs of
// `plan` by tensor index and of its outputs by output index, then the record, workspace and tiling; returns the tiling
// key of the launch. context: of one rank, an A2 context if `staging` is not 0, else a window table; `window` is rank
// 0's, those of the others lie `stride` bytes further each, first data_bytes of data, then 1 MiB of state; `staging`
// likewise. Returns its bytes, which need not be copied anywhere (out null). launch: runs the kernel on world * cores
// cores; `ranks`: the words of all ranks; `barrier`: 64 blocks of 32 bytes, zeros; `ranges`: address and
// bytes of each memory that it may touch.
AM_API uint64_t am_card_rank(const void* plan, uint64_t context, const uint64_t* inputs, const uint64_t* outputs,
                             const uint64_t* others, uint64_t* words);
AM_API uint64_t am_card_rank_words(void);
AM_API uint64_t am_card_context(int rank, int world, uint64_t window, uint64_t staging, uint64_t stride,
                                uint64_t data_bytes, void* out);
AM_API uint32_t am_card_ub_bytes(void);
AM_API int am_card_launch(const uint64_t* ranks, uint32_t* barrier, uint32_t world, uint32_t cores, uint64_t tiling_key,
                          const uint64_t* ranges, uint64_t count, char* fault, uint64_t fault_bytes);
// This machine's best, for comparison in benchmarks: plain C++ without kernel and window. Copies row from[i] to `to` +
// i * row_bytes, for i < count. Method 0: memcpy; 1: stores that bypass the caches (rows of a multiple of 64 bytes,
// 16-byte aligned; otherwise memcpy), drained; 2: through 192 KiB of scratch, as a core moves GM to UB to GM. Returns
// 0, or 1: no such method.
AM_API int am_bench_copy_rows(void* to, const void* const* from, uint64_t count, uint64_t row_bytes, int method);
// out[t][h] = sum over ascending k of rows[t * top_k + k][h] * weights[t * top_k + k]: multiplied, then
// added, in fp32, rounded once to the rows' type (am_type_code of float32, float16 or bfloat16). A null row
// is left out. 0, or 1: hidden is no multiple of 16, or another type.
AM_API int am_bench_weighted_sum(void* out, const void* const* rows, const float* weights, uint64_t tokens,
                                 uint64_t top_k, uint64_t hidden, int type);
// One step of a bare exchange of `world` ranks that share memory: copies row from[i] to to[i], i < count (methods 0 and
// 1 of am_bench_copy_rows), raises a flag for each rank and waits for the flags of all. flags: world * world * 16
// words, 0 at first. Returns 0, or 1: no such method.
AM_API int am_bench_exchange(void* const* to, const void* const* from, uint64_t count, uint64_t row_bytes, int method,
                             uint64_t* flags, int rank, int world);
// Nanoseconds in which a flag reaches the other of two ranks that both call this, one with `first` 1; the mean of 128.
// flags: 32 words, 0 at first.
AM_API double am_bench_flag_latency(uint64_t* flags, int first);
// Timelines of am_run: from am_trace_start on its events (twin/engine/timeline.h) are recorded, at most `limit`. start
// returns 0; 1 if a recording is running; 2 if this engine records nothing. events copies at most `most` and returns
// their number; `dropped` is the number of events beyond the limit.
AM_API int am_trace_start(uint64_t limit);
AM_API void am_trace_stop(void);
AM_API uint64_t am_trace_events(void* out, uint64_t most, uint64_t* dropped);
AM_API uint64_t am_trace_event_bytes(void);
AM_API int am_error_is_fatal(int code);
AM_API const char* am_error_name(int code);
AM_API void am_error_message(const int32_t* record, char* text, uint64_t bytes);
AM_API void am_error_fields(const int32_t* record, char* text, uint64_t bytes);

// Explore mode: only in the library of the checked engine. Its structs are in engines/explore.cpp.
AM_API int am_engine_is_checked(void);
#ifdef TWIN_CHECKED
AM_API void* am_explore_create(int world, uint64_t data_bytes, uint64_t registered_bytes);
AM_API void am_explore_destroy(void* exploration);
// Uses A2 contexts in which this many ranks share a server; 0 (the default): window tables, all ranks share
// one server. To call before a program.
AM_API int am_explore_servers(void* exploration, int ranks_per_server, int intra_node_stores);
// Whether the following programs run the ops of all ranks as one launch (op_kernel/ascend_moe_one_card.cpp).
AM_API void am_explore_one_card(void* exploration, int one_card);
// Returns 1 when the registered areas have no room for the rows of its combines.
AM_API int am_explore_program(void* exploration, const void* steps, int count);
AM_API void am_explore_run(void* exploration, const void* options, void* result);
// Different traces seen since the last am_explore_forget.
AM_API uint64_t am_explore_distinct(void* exploration);
AM_API void am_explore_forget(void* exploration);
// Choices of the last schedule (widths: how many each had, exhaustive policy only); returns their number.
AM_API uint64_t am_explore_choices(void* exploration, int widths, uint16_t* out, uint64_t capacity);
// "place waiting ready" a line; returns the bytes that the text needs.
AM_API uint64_t am_explore_polls(void* exploration, char* text, uint64_t bytes);
AM_API int am_explore_trace(void* exploration, const char* path, const char* header);
// Error code of a step of the last schedule, with its record; -1 when the step did not end.
AM_API int am_explore_code(void* exploration, int step, int32_t* record);
#endif

// The timed engine: only in its library. Its structs are in engines/timed.cpp.
#ifdef TWIN_TIMED
AM_API void* am_timed_create(int world, uint64_t data_bytes, uint64_t registered_bytes);
AM_API void* am_timed_registered(void* timed, int rank);
AM_API void am_timed_destroy(void* timed);
// A rank's communicator, for am_comm_timestamps.
AM_API void* am_timed_communicator(void* timed, int rank);
// Uses A2 contexts in which this many ranks share a server; 0 (the default): window tables. Call before a program.
AM_API int am_timed_servers(void* timed, int ranks_per_server);
// Names of the costs of am_timed_run, in their order, separated by blanks.
AM_API const char* am_timed_cost_names(void);
// Runs one op of every rank (twin/engine/predict.h): a step a rank, in any order. Windows and epochs live on
// between runs.
AM_API void am_timed_run(void* timed, const void* steps, int count, const double* costs, const void* options,
                         void* result);
// Of the last run. The critical path: "phase<tab>cause<tab>ns" a line. The links:
// "name<tab>rank<tab>bytes<tab>GB/s" a line. Both return the bytes that the text takes.
AM_API uint64_t am_timed_path(void* timed, char* text, uint64_t bytes);
AM_API uint64_t am_timed_links(void* timed, char* text, uint64_t bytes);
// Start and end of a step, ns; its error code, with its record.
AM_API int am_timed_outcome(void* timed, int step, double* times, int32_t* record);
// Copies at most `capacity` twin::TimelineEvent; returns their number. Their texts live as long as the library.
AM_API uint64_t am_timed_events(void* timed, void* out, uint64_t capacity);
#endif

AM_API const char* am_source_hash(void);
#ifdef ASCEND_MOE_SANITIZE
AM_API int am_sanitizer_control(int which);
#endif
