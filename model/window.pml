/* The window protocol of dispatch and combine: each core is a process, with a process Memory that lets its stores
   land. A "run" in names of this file is a status message. See docs/model.md.

   Macros of a run: FIFO, WHOLE_RUN (see memory.pml); MISMATCH (each rank chooses its own op), COLLECTIVE
   (ranks find errors that travel in the status header), DEADLINES (1: the deadlines of a single rank fire, at any
   time; 2: those of every rank), KILL (a rank stops for good anywhere; then deadlines fire), ALL_ROWS (no op
   without rows), REPLAY (see observe.pml); M_<mutant>. */
#include "constants.pml"

#ifdef REPLAY
#define PENDING int
#include "observe.pml"
#else
#define PENDING short
#define AT_MEMORY(event, x, y)
#define AT_CORE(event, x)
#define DONE
#define CHECK(text, x) if :: (x) :: else -> printf(text); assert(false) fi
#endif

#ifdef KILL
byte killed;     /* 1 + the rank that has stopped */
#define STOP :: atomic { killed == r + 1 -> goto stopped }
#define ALIVE killed != r + 1
#else
#define STOP
#define ALIVE true
#endif

#if defined(DEADLINES) || defined(KILL) || defined(REPLAY)
#define FAILURES
#endif
#if DEADLINES == 1
byte quitter;    /* the rank whose deadlines fire */
#define EXPIRES (r == quitter)
#elif defined(KILL)
#define EXPIRES (killed != 0)
#elif DEADLINES == 2
#define EXPIRES true
#else
#define EXPIRES false
#endif

#include "memory.pml"

/* ---- status codes: code | source << 2 | reporter << 4 */
#define CODE(v) ((v) & 3)
#define SOURCE(v) (((v) >> 2) & 3)
#define REPORTER(v) ((v) >> 4)
#define STATUS_CODE(code, source, reporter) ((code) | (source) << 2 | (reporter) << 4)
#define WORSEN(v, other) if \
    :: SEVERITY(CODE(other)) < SEVERITY(CODE(v)) || \
       (SEVERITY(CODE(other)) == SEVERITY(CODE(v)) && SOURCE(other) < SOURCE(v)) -> v = other \
    :: else \
    fi

/* The outcome of the abort blocks, for core 0 or a waiting core in epoch e: that of the lowest source. Those of the next
   op count there. */
#define ABORT_OF(r, s) (((ab[r] >> (s)) & 1) && failedIn[s] != NEXT(e))
#if W == 2
#define ABORT_SEEN(r) (ABORT_OF(r, 0) || ABORT_OF(r, 1))
#define FIRST_ABORT(r) (ABORT_OF(r, 0) -> 0 : 1)
#elif W == 3
#define ABORT_SEEN(r) (ABORT_OF(r, 0) || ABORT_OF(r, 1) || ABORT_OF(r, 2))
#define FIRST_ABORT(r) (ABORT_OF(r, 0) -> 0 : (ABORT_OF(r, 1) -> 1 : 2))
#else
#define ABORT_SEEN(r) (ABORT_OF(r, 0) || ABORT_OF(r, 1) || ABORT_OF(r, 2) || ABORT_OF(r, 3))
#define FIRST_ABORT(r) (ABORT_OF(r, 0) -> 0 : (ABORT_OF(r, 1) -> 1 : (ABORT_OF(r, 2) -> 2 : 3)))
#endif

#ifdef FAILURES
#define ABORT_STATUS_CODE(r) STATUS_CODE(TIMEOUT, culprit[FIRST_ABORT(r)], FIRST_ABORT(r))
#else
#define ABORT_STATUS_CODE(r) OK
#endif

#ifdef M_single_status_round
#define BOARD(r, round, c) (((r) * ROUNDS + 0) * C + (c))
#else
#define BOARD(r, round, c) (((r) * ROUNDS + (round)) * C + (c))
#endif
inline ReadBoard(round) {
    v = OK; k = 0;
    do
    :: k < C ->
        if :: CODE(board[BOARD(r, round, k)]) != OK -> WORSEN(v, board[BOARD(r, round, k)]) :: else fi;
        k++
    :: else -> break
    od;
    k = 0
}

/* All cores of the rank take the same status from a core barrier. */
#if C > 1
byte said[W * ROUNDS];
#define AGREE(round) \
    if :: said[r * ROUNDS + round] == 0 -> said[r * ROUNDS + round] = v + 1 :: else fi; \
    CHECK("violated: cores of a rank leave with different status codes\n", said[r * ROUNDS + round] == v + 1)
#define FORGET_SAID said[r * ROUNDS] = 0; said[r * ROUNDS + 1] = 0; said[r * ROUNDS + 2] = 0
#else
#define AGREE(round) skip
#define FORGET_SAID skip
#endif
#if defined(REPLAY) && C > 1
#define FORGET_ARRIVED arrived[r * ROUNDS] = 0; arrived[r * ROUNDS + 1] = 0; arrived[r * ROUNDS + 2] = 0
#else
#define FORGET_ARRIVED skip
#endif

/* ---- Core barriers. With a single core their two sides are one step, and so are reads, sums and the end of a launch:
   nobody can see a state between them. */
#if C == 1
#define SYNCHRONIZE(round, ready)
#else
#define SYNCHRONIZE(round, ready) } STOP fi; SYNC(round) if :: atomic { ALIVE && ready ->
#endif
#if C == 2 && !defined(REPLAY)
chan meet[W] = [0] of { bit };
#define SYNC(round) if :: c == 0 -> meet[r] ! 0 :: c == 1 -> meet[r] ? _ STOP fi;
#elif C > 1
byte arrived[W * ROUNDS];   /* cores that have come to the barrier, in this launch */
#define SYNC(round) \
    arrived[r * ROUNDS + round]++; \
    atomic { arrived[r * ROUNDS + round] == C AT_CORE(EV_SYNC, round) -> DONE };
#endif

/* ---- a status message as its reader sees it */
#define HEAD(s) st[RUN_AT(r, SHALF(e), s)]
#define RUN_HERE(s) RUN_AT(r, SHALF(e), s)
#define DIFFERS(s) (kind[MINE(s, e)] != kind[MINE(r, e)])
#ifdef M_config_not_compared
#define NAMED(s) bad[MINE(s, e)]
#else
#define NAMED(s) (DIFFERS(s) || bad[MINE(s, e)])
#endif
#if defined(M_torn_run)
#define ARRIVED(s) (HEAD(s) == e)
#elif defined(M_no_epoch)
#define ARRIVED(s) (HEAD(s) != 0)
#elif defined(M_stale_epoch_accepted)
#define ARRIVED(s) (HEAD(s) == e || (HEAD(s) != 0 && STALE(HEAD(s), e)))
#else
#define ARRIVED(s) (HEAD(s) == e && st[RUN_HERE(s) + 1] == e && (NAMED(s) || COUNTS_COMPLETE(RUN_HERE(s), e)))
#endif
#define CORRUPT(s) (HEAD(s) != e && HEAD(s) != 0 && !STALE(HEAD(s), e))

/* The next message of the core's share is good: the core takes its status and keeps its counts in the workspace. */
inline Accept() {
    if
#ifndef M_config_not_compared
    :: DIFFERS(s) -> WORSEN(v, STATUS_CODE(CONFIG, s, r))
#endif
    :: else ->
        if
        :: bad[MINE(s, e)] -> WORSEN(v, STATUS_CODE(BADIDS, s, s))
        :: else ->
            CHECK("violated: counts of another op are accepted\n",
                  HEAD(s) == e && st[RUN_HERE(s) + 1] == e && COUNTS_COMPLETE(RUN_HERE(s), e));
            ws[r * W + s] = TAG(e)
        fi
    fi;
    s++
}

/* ---- launches */
byte chosen[2];   /* a common op: 1 + its kind while not all ranks have it, and how many have */
byte takers[2];

inline ChooseOp() {
    p = PARITY(e);
#ifdef REPLAY
    ReplayedOp()
#else
#ifdef MISMATCH
    if :: kind[MINE(r, e)] = 0 :: kind[MINE(r, e)] = 1 fi;
#else
    if
    :: takers[p] == 0 -> if :: chosen[p] = 1 :: chosen[p] = 2 fi
    :: else
    fi;
    kind[MINE(r, e)] = chosen[p] - 1;
    takers[p]++;
    if :: takers[p] == W -> takers[p] = 0; chosen[p] = 0 :: else fi;
#endif
#ifdef COLLECTIVE
    if :: bad[MINE(r, e)] = 0 :: bad[MINE(r, e)] = 1 fi;
#endif
#ifdef ALL_ROWS
    rows[MINE(r, e)] = ROWS_OF_ALL;
#else
    CHOOSE_MASK(rows[MINE(r, e)]);
#endif
#endif
    p = 0
}

/* The last core to leave poisons the rows that were read, and clears state that nobody can ask for any more. */
inline Forget() {
    k = 0;
    do :: k < W * R -> row[ROW_AT(r, DHALF(e), 0) + k] = 0; k++ :: else -> break od;
    k = 0;
    do :: k < W -> ws[r * W + k] = 0; k++ :: else -> break od;
    k = 0;
    do :: k < ROUNDS * C -> board[r * ROUNDS * C + k] = 0; k++ :: else -> break od;
    k = 0;
    p = (1 - PARITY(e)) * W + r; /* of the last op */
    kind[p] = 0; bad[p] = 0; rows[p] = 0; p = 0
}

#ifdef M_no_drain_before_flags
#define DRAINED true
#else
#define DRAINED (pr[I] == 0)
#endif
#define FLUSHED (ps[I] == 0)
#if defined(M_no_sync_before_flags)
#define SYNCHRONIZE_1
#else
#define SYNCHRONIZE_1 SYNCHRONIZE(1, true)
#endif
/* A mutant of combine, and a mutant of dispatch. */
#if defined(M_no_sync_after_wait)
#define UNSYNCHRONIZED (kind[MINE(r, e)] == 1)
#elif defined(M_wait_for_own_share_only)
#define UNSYNCHRONIZED (kind[MINE(r, e)] == 0)
#endif
#ifdef UNSYNCHRONIZED
#define SYNCHRONIZE_2 } STOP fi; if :: UNSYNCHRONIZED -> skip :: else -> SYNC(2) skip fi; if :: atomic { ALIVE ->
#else
#define SYNCHRONIZE_2 SYNCHRONIZE(2, true)
#endif

/* Messages to this core's peers: rank + 1 + i for i = core, core + C, ... */
inline IssueRuns() {
    k = c;
    do
    :: k < W ->
        p = (r + 1 + k) % W;
#ifdef M_skip_flag_when_zero_rows
        if
        :: ((rows[MINE(r, e)] >> (p * R)) & ((1 << R) - 1)) == 0 -> k = k + C
        :: else -> ps[I] = ps[I] | ((1 << B) - 1) << (p * B); k = k + C
        fi
#else
        ps[I] = ps[I] | ((1 << B) - 1) << (p * B);
        k = k + C
#endif
    :: else -> break
    od;
    k = 0; p = 0
}
inline IssueRows() {
    if
    :: v == OK -> rE[I] = e; pr[I] = rows[MINE(r, e)] & CORE_ROWS(c)
    :: else
    fi
}

/* Every core reads the rows of every source, which is more than its share. Places are packed in slot order. */
inline ReadRows() {
    s = 0;
    do
    :: s < W ->
        /* Dispatch reads rows by the counts that the waiting cores have kept. */
        CHECK("violated: counts of another op are read\n",
              kind[MINE(r, e)] == 1 || ws[r * W + s] == TAG(e));
        k = 0; p = 0;
        do
        :: k < R ->
            if
            :: (rows[MINE(s, e)] >> (r * R + k)) & 1 ->
                CHECK("violated: a row of another op is read\n",
                      row[ROW_AT(r, TARGET_HALF(e), s) + p] == ROW(e, k));
                p++
            :: else
            fi;
            k++
        :: else -> break
        od;
        s++
    :: else -> break
    od;
    s = 0; k = 0; p = 0
}

/* The ranks have to agree: the same error everywhere, or none. */
inline JudgeTogether() {
    k = 0; p = 0; s = W;
    do
    :: k < W ->
        if :: DIFFERS(k) -> p = 1 :: else fi;
        if :: s == W && bad[MINE(k, e)] -> s = k :: else fi;
        k++
    :: else -> break
    od;
    if
    :: p -> CHECK("violated: ranks do not agree on the error\n", CODE(v) == CONFIG)
    :: !p && s < W -> CHECK("violated: ranks do not agree on the error\n", v == STATUS_CODE(BADIDS, s, s))
    :: else -> CHECK("violated: ranks do not agree on the error\n", v == OK)
    fi;
    k = 0; p = 0; s = 0
}

inline Arrivals() {   /* p: ranks whose message of this epoch has come */
    p = 0; k = 0;
    do
    :: k < W -> if :: HEAD(k) == e -> p = p | 1 << k :: else fi; k++
    :: else -> break
    od;
    k = 0
}
#ifdef M_sticky_abort_missing
#define TO_SELF 0
#else
#define TO_SELF (1 << r)
#endif

/* A launch begins with the epoch, the sticky aborts (core 0) and this core's own status. */
inline Enter() {
    e = NEXT(word[r]);
    CHECK("violated: cores of a rank are in different epochs\n", e == cur[r]);
    v = OK;
    if :: c == C - 1 && bad[MINE(r, e)] -> v = STATUS_CODE(BADIDS, r, r) :: else fi;
    if :: c == 0 && ABORT_SEEN(r) -> v = ABORT_STATUS_CODE(r) :: else fi;
#ifdef M_publish_epoch_too_early
    if :: c == 0 -> word[r] = e :: else fi;
#endif
    board[BOARD(r, 0, c)] = v
}

/* After the first core barrier core 0 publishes the epoch, and all cores issue rows. */
inline Send() {
    if :: CODE(v) == TIMEOUT -> goto leave :: else fi;
    CHECK("violated: a failed communicator is used again\n", failed[r] == 0);
#if !defined(M_publish_epoch_too_early) && !defined(M_publish_epoch_too_late) && !defined(REPLAY)
    if :: c == 0 -> word[r] = e :: else fi;
#endif
#ifdef M_flag_before_data
    IssueRuns()
#else
    IssueRows()
#endif
}

/* After the second core barrier: status messages. */
inline SetStatus() {
#if defined(M_flag_before_data)
    IssueRows()
#elif defined(M_error_without_status)
    if :: CODE(v) == OK -> IssueRuns() :: else fi
#else
    IssueRuns()
#endif
}

inline End() {
#ifdef M_publish_epoch_too_late
    if :: c == 0 && v == OK -> word[r] = e :: else fi;
#endif
    busy[r] = busy[r] & ~(1 << c);
    if :: busy[r] == 0 -> Forget(); FORGET_SAID; FORGET_ARRIVED :: else fi;
    v = OK; e = 0
}

proctype Core(byte r; byte c) {
    byte e, v, s, k, p;
    bit last;

    /* The host starts a launch when all cores of the last launch have ended. */
launch:
    if
    :: c == 0 ->
end_host:
        if
        :: atomic { busy[r] == 0 && (RING || word[r] < N || failed[r]) && failed[r] < 2 && ALIVE ->
               e = NEXT(word[r]); cur[r] = e;
               /* After a failure the rank sends nothing, and nobody may learn of this launch. */
               if :: failed[r] == 0 -> ChooseOp() :: else fi;
               busy[r] = (1 << C) - 1
#ifdef REPLAY
               } fi; if :: atomic { ALIVE AT_CORE(EV_BEGIN, 0) -> DONE
#endif
               ; Enter();
               SYNCHRONIZE(0, pr[I] == 0) ReadBoard(0); AGREE(0); Send() }
        STOP
        fi
    :: else ->
end_core:
        if
        :: atomic { ((busy[r] >> c) & 1) AT_CORE(EV_BEGIN, 0) ->
               DONE; Enter();
               SYNCHRONIZE(0, pr[I] == 0) ReadBoard(0); AGREE(0); Send() }
        STOP
        fi
    fi;
#ifdef REPLAY
#ifdef PUBLISH_SEEN
    if :: c == 0 -> atomic { true AT_CORE(EV_PUBLISH, 0) -> word[r] = e; DONE } :: else fi;
#else
    if :: c == 0 -> word[r] = e :: else fi;
#endif
#endif
    if
    :: atomic { DRAINED && ALIVE -> board[BOARD(r, 1, c)] = v; SYNCHRONIZE_1 ReadBoard(1); AGREE(1); SetStatus() }
    STOP
    fi;
    if
    :: atomic { FLUSHED && ALIVE -> s = PART(c)
#ifdef M_leave_on_collective_error
           ; if :: CODE(v) != OK -> s = PART(c + 1) :: else fi
#endif
       }
    STOP
    fi;

    /* The wait for this core's share of the sources. */
    do
    :: atomic { s < PART(c + 1) && ARRIVED(s) && ALIVE -> Accept() }
    :: atomic { s < PART(c + 1) && !ARRIVED(s) && CORRUPT(s) ->
           CHECK("violated: a status word that nobody can have written\n", false) }
#ifdef FAILURES
    :: atomic { s < PART(c + 1) && !ARRIVED(s) && !last && (ABORT_SEEN(r) || EXPIRES) && ALIVE -> last = 1 }
    :: atomic { s < PART(c + 1) && !ARRIVED(s) && last && ALIVE ->
           /* The message is still missing after a new look. */
           if :: ABORT_SEEN(r) -> v = ABORT_STATUS_CODE(r) :: else -> v = STATUS_CODE(TIMEOUT, s, r) fi;
#ifdef M_timeout_leaves_alone
           goto leave;
#endif
           s = PART(c + 1) }
#endif
    :: atomic { s == PART(c + 1) && ALIVE ->
           last = 0; s = 0; board[BOARD(r, 2, c)] = v;
           break }
    STOP
    od;
    if
    :: atomic { ALIVE ->
           SYNCHRONIZE_2
           ReadBoard(2);
           AGREE(2);
           if :: CODE(v) == TIMEOUT -> goto leave :: else fi;
#ifdef REPLAY
           JudgeTogether();
           reading[I] = (v == OK) } fi; if :: atomic { ALIVE AT_CORE(EV_END, 0) -> reading[I] = 0;
#else
           if :: v == OK -> ReadRows() :: else fi;
           JudgeTogether();
#endif
           End(); DONE }
    STOP
    fi;
    goto launch;

leave:
    /* Fatal: core 0 posts abort blocks, first to ranks that have come, then to those awaited. */
#ifdef FAILURES
    if
    :: c == 0 && REPORTER(v) == r ->
        atomic { Arrivals(); culprit[r] = SOURCE(v);
                 if :: failedIn[r] == 0 -> failedIn[r] = e :: else fi;
#ifdef M_abort_kept_to_oneself
                 pa[I] = TO_SELF };
        if :: atomic { pa[I] == 0 && ALIVE } STOP fi
#else
                 pa[I] = TO_SELF | p & ~(1 << r) };
        if :: atomic { pa[I] == 0 && ALIVE } STOP fi;
        pa[I] = ((1 << W) - 1) & ~p & ~(1 << r);
        if :: atomic { pa[I] == 0 && ALIVE } STOP fi
#endif
    :: else
    fi;
#endif
    if
    :: atomic { ALIVE AT_CORE(EV_END, 0) ->
           busy[r] = busy[r] & ~(1 << c);
           if :: busy[r] == 0 -> FORGET_SAID; FORGET_ARRIVED; failed[r]++; cur[r] = word[r] :: else fi;
           v = OK; e = 0; s = 0; p = 0; last = 0; DONE }
    STOP
    fi;
    goto launch;
#ifdef KILL
stopped:
    skip
#endif
}

init {
    byte i, j;
    atomic {
#if DEADLINES == 1
        select(quitter : 0 .. W - 1);
#endif
        do
        :: i < W ->
            j = 0;
            do :: j < C -> run Core(i, j); run Memory(i, j); j++ :: else -> break od;
            i++
        :: else -> break
        od;
        i = 0; j = 0;
#ifdef REPLAY
        run Observer()
#endif
    };
#ifdef KILL
    if
    :: atomic { killed == 0 -> select(i : 1 .. W); killed = i; i = 0 }
    :: skip
    fi
#endif
}
