/* Algorithm "hierarchy": two servers of two ranks, ops in any order, also mixed with "window" between servers.
   A "run" in names of this file is a status message. See docs/model.md.

   This file has what the relay adds to window.pml: rows and messages that reach their owner by way of the rank of its
   server with the source's local rank, two or three waits in an op, sums that are staged where rows were. Cores of a rank, blocks of a
   message and the wrap are window.pml's. A rank is one process, and Memory lets its stores become visible: in any
   order, at the latest when it drains. What it has posted for the other server leaves at any time, an item's rows
   before its messages, one after the other.

   Macros of a run: FINALIZE (an op ends when its items have left), PASSES (combine sends this server's rows
   when it has posted the sums, not all at once as in two launches), MIXED (some ops are window's, over the same halves
   and windowsOut), COLLECTIVE (ranks find errors that travel in the messages), ODD (one rank takes a good message for
   a collective error, once), DEADLINES (the deadlines of one rank fire, at any time), KILL (a rank stops for good
   anywhere; when nothing can move, the deadline of any rank fires); M_<mutant>. A rank whose deadline is over asks the
   rank that it misses, which answers by its abort; notes of this are seen at once. */
#include "constants.pml"

#define DISPATCH 0
#define COMBINE 1
#define WINDOW 2
#define SERVER(q) ((q) / PER_SERVER)
#define LOCAL_RANK(q) ((q) % PER_SERVER)
#define MINE SERVER(r)
#define OTHER (1 - MINE)
/* The other rank of the server; the rank of the other server with the same local rank; the last one. */
#define NEAR (MINE * PER_SERVER + 1 - LOCAL_RANK(r))
#define RAIL_PEER (OTHER * PER_SERVER + LOCAL_RANK(r))
#define ACROSS (OTHER * PER_SERVER + 1 - LOCAL_RANK(r))
#define CHECK(text, x) if :: (x) :: else -> printf(text); assert(false) fi

/* A half holds what a single op has stored: a store of another op goes over all that lies there, because places in
   different ops are not the same. Bits say which rows and messages of that op are there. */
#define RELAYED(server, local) (W + (server) * PER_SERVER + (local))
#define AT(q, e) ((q) * 2 + PARITY(e))
#ifdef M_single_half_of_windows_out
#define OUT(half) (r * 2)
#else
#define OUT(half) (r * 2 + (half))
#endif

byte op[2 * W];       /* [rank][half] */
byte row[2 * W];      /* of region q < W: of rank q; of region W + s: of server s */
byte message[2 * W];  /* behind the region of rank q; RELAYED: behind those of a server, of each of its ranks */
byte outOp[2 * W];    /* windowsOut, as halves */
byte outRow[2 * W];
byte outMessage[2 * W];
short st[2 * W];      /* state area: messages, for each source three bits, the op */
#define CELL(word, c) (((word) >> (3 * (c))) & 7)
#define WITH(word, c, tag) (((word) & ~(7 << (3 * (c)))) | (tag) << (3 * (c)))
byte ab[W];           /* bit s: an abort block of source s lies here */

#define ROWS_NEAR 1   /* stores under way: rows to the neighbour; combine: those of the other server */
#define ROWS_OUT 2    /* rows to windowsOut */
#define RUN_NEAR 4    /* the message to the neighbour */
#define RUN_RAIL 8    /* combine: the message for the inter-node rank with the neighbour's local rank */
#define RUNS_OUT 16   /* messages to windowsOut */
#define FORWARDED 32  /* dispatch: rows of the other server to the neighbour */
#define RELAY 64      /* dispatch: the message of the other server to the neighbour */
#define ROWS_HERE 128 /* combine: this server's rows to the neighbour */
#ifdef PASSES
#define AT_ONCE false
#else
#define AT_ONCE true
#endif
byte way[W];
byte abortWay[W];     /* abort blocks under way: bit q */
byte item[2 * W];     /* posted, [rank][half]: 0 nothing, 1 all is to leave, then rows have left, then a message */
bit itemRows[2 * W];  /* whether it has rows */
byte items[2 * W];    /* window: posted to rank q, bit q; bit W + q: its rows have left */

byte kind[N + 2];     /* 1 + what op e is: the first rank to begin chooses */
byte cur[W];          /* epoch of the launch */
bit busy[W];
byte done[W];         /* ops that the rank has completed */
bit bad[2 * W];       /* [parity][rank]: the rank has a collective error, its messages say so */
bit noSums[2 * W];     /* combine: the rank sends no sums, its block says so */
bit failed[W];        /* it has ended with a fatal error, and launches no more */
byte culprit[W];      /* whom the rank's abort blocks name */
byte failedIn[W];     /* the op that they name */
byte waits[W];        /* 1: the rank waits for messages, 2: for an answer */
byte accuses[W];      /* 1 + the rank that it asks whom that one misses */
byte turns[W];        /* so many it waits for the answer */
#define MOST_TURNS 5

#ifdef KILL
byte killed;          /* 1 + the rank that has stopped, the first: ranks are alike */
bit late[W];          /* the deadline of the rank's wait is over, or the time for the answer */
#define STOP :: atomic { killed == r + 1 -> goto stopped }
#define ALIVE killed != r + 1
#define EXPIRES late[r]
#else
#define STOP
#define ALIVE true
#endif
/* Whom an error may name; and in which ops the others may fail: in none that this rank, or the one whose deadlines
   fire, has completed. */
#ifdef KILL
#define BLAMED(q) ((q) == killed - 1)
#define MAY_FAIL (done[killed - 1] < e)
#else
#define BLAMED(q) true
#define MAY_FAIL (done[0] < e)
#endif
#ifdef DEADLINES
#define EXPIRES (r == 0)  /* ranks are alike */
#endif
#ifdef KILL
#define FORGET_LATE late[r] = 0
#else
#define FORGET_LATE skip
#endif
#ifdef ODD
byte odd;             /* 1 + the rank that may take a message for an error, the first: ranks are alike; 0: it has */
#endif
#if defined(KILL) || defined(DEADLINES)
#define FAILURES
#endif

/* Rule: nothing of another op lands in a half in which its owner works. */
#define QUIET(q, half, e) (!(busy[q] && PARITY(cur[q]) == (half) && cur[q] != (e)))

inline PutRow(q, half, e, region) {
    CHECK("violated: a row lands in a buffer in use\n", QUIET(q, half, e));
    if :: op[q * 2 + half] != e -> op[q * 2 + half] = e; row[q * 2 + half] = 0; message[q * 2 + half] = 0 :: else fi;
    row[q * 2 + half] = row[q * 2 + half] | 1 << (region)
}
inline PutRun(q, half, e, at) {
    CHECK("violated: a status block lands in a buffer in use\n", QUIET(q, half, e));
    if :: op[q * 2 + half] != e -> op[q * 2 + half] = e; row[q * 2 + half] = 0; message[q * 2 + half] = 0 :: else fi;
    message[q * 2 + half] = message[q * 2 + half] | 1 << (at)
}
inline Stage(e, rows, messages) {
    if
    :: outOp[OUT(PARITY(e))] != e ->
        outOp[OUT(PARITY(e))] = e; outRow[OUT(PARITY(e))] = 0; outMessage[OUT(PARITY(e))] = 0
    :: else
    fi;
    outRow[OUT(PARITY(e))] = outRow[OUT(PARITY(e))] | (rows);
    outMessage[OUT(PARITY(e))] = outMessage[OUT(PARITY(e))] | (messages)
}
inline PutStatus(q, e, source) {
    CHECK("violated: a status block lands in a buffer in use\n", QUIET(q, PARITY(e), e));
    st[AT(q, e)] = WITH(st[AT(q, e)], source, e)
}
#ifdef M_relayed_to_the_other_parity
#define RELAYED_AT(q) ((q) * 2 + 1 - PARITY(cur[r]))
#else
#define RELAYED_AT(q) AT(q, cur[r])
#endif
inline PutRelayed(q) {
    CHECK("violated: a status block lands in a buffer in use\n", QUIET(q, PARITY(cur[r]), cur[r]));
    st[RELAYED_AT(q)] = WITH(st[RELAYED_AT(q)], RAIL_PEER, cur[r])
}
#define OTHERS (((1 << W) - 1) & ~(1 << r))
#define KIND (kind[cur[r]] - 1)
#define LANDS(bit) :: atomic { (way[r] & bit) -> way[r] = way[r] & ~(bit);

/* Of an item whatever lies in windowsOut now leaves. */
inline LeaveRow(q, half, from, to) {
    e = outOp[OUT(half)];
    if :: (outRow[OUT(half)] >> (from)) & 1 -> PutRow(q, half, e, to) :: else fi;
    e = 0
}
inline LeaveRun(q, half, from, to) {
    e = outOp[OUT(half)];
    if :: (outMessage[OUT(half)] >> (from)) & 1 -> PutRun(q, half, e, to) :: else fi;
    e = 0
}
#ifdef M_messages_before_rows
#define ROWS_AT 3
#define RUN_AT(local) ((local) + 1)
#else
#define ROWS_AT 1
#define RUN_AT(local) ((local) + 2)
#endif
#define ITEM_LEAVES(half) \
    :: atomic { item[r * 2 + half] -> \
        if \
        :: item[r * 2 + half] == ROWS_AT -> \
            if :: itemRows[r * 2 + half] -> LeaveRow(RAIL_PEER, half, W + OTHER, W + MINE) :: else fi \
        :: item[r * 2 + half] == RUN_AT(0) -> LeaveRun(RAIL_PEER, half, RELAYED(OTHER, 0), RELAYED(MINE, 0)) \
        :: item[r * 2 + half] == RUN_AT(1) -> LeaveRun(RAIL_PEER, half, RELAYED(OTHER, 1), RELAYED(MINE, 1)) \
        fi; \
        item[r * 2 + half] = (item[r * 2 + half] + 1) % (PER_SERVER + 2) }
#ifdef MIXED
#define WINDOW_ITEM_LEAVES(half, q) \
    :: atomic { ((items[r * 2 + half] >> q) & 1) -> \
        if \
        :: (items[r * 2 + half] >> (W + q)) & 1 -> \
            LeaveRun(q, half, q, r); items[r * 2 + half] = items[r * 2 + half] & ~(17 << q) \
        :: else -> \
            if :: itemRows[r * 2 + half] -> LeaveRow(q, half, q, r) :: else fi; \
            items[r * 2 + half] = items[r * 2 + half] | 16 << q \
        fi }
#else
#define WINDOW_ITEM_LEAVES(half, q)
#endif
#define LEFT(half) (item[r * 2 + half] == 0 && items[r * 2 + half] == 0)
#ifdef FAILURES
#define ABORT_LANDS(q) :: atomic { ((abortWay[r] >> q) & 1) -> abortWay[r] = abortWay[r] & ~(1 << q); ab[q] = ab[q] | 1 << r }
#else
#define ABORT_LANDS(q)
#endif

proctype Memory(byte r) {
    byte e;
end_memory:
    do
    LANDS(ROWS_NEAR)
        e = cur[r];
        if :: KIND == COMBINE -> PutRow(NEAR, PARITY(e), e, RAIL_PEER) :: else fi;
        if :: KIND != COMBINE || AT_ONCE -> PutRow(NEAR, PARITY(e), e, r) :: else fi; e = 0 }
    LANDS(ROWS_HERE) e = cur[r]; PutRow(NEAR, PARITY(e), e, r); e = 0 }
    LANDS(ROWS_OUT)
        e = cur[r];
        if
        :: KIND == WINDOW -> Stage(e, OTHERS, 0)
        :: else -> Stage(e, 1 << (W + OTHER), 0)
        fi; e = 0 }
    LANDS(RUN_NEAR) e = cur[r]; PutStatus(NEAR, e, r); e = 0 }
    LANDS(RUN_RAIL) e = cur[r]; PutRun(NEAR, PARITY(e), e, RAIL_PEER); e = 0 }
    LANDS(RUNS_OUT)
        e = cur[r];
        if
        :: KIND == WINDOW -> Stage(e, 0, OTHERS)
        :: else -> Stage(e, 0, 1 << RELAYED(OTHER, 0) | 1 << RELAYED(OTHER, 1))
        fi; e = 0 }
    LANDS(FORWARDED) e = cur[r]; PutRow(NEAR, PARITY(e), e, RAIL_PEER); e = 0 }
    LANDS(RELAY) PutRelayed(NEAR) }
    ITEM_LEAVES(0)
    ITEM_LEAVES(1)
    WINDOW_ITEM_LEAVES(0, 0) WINDOW_ITEM_LEAVES(0, 1) WINDOW_ITEM_LEAVES(0, 2) WINDOW_ITEM_LEAVES(0, 3)
    WINDOW_ITEM_LEAVES(1, 0) WINDOW_ITEM_LEAVES(1, 1) WINDOW_ITEM_LEAVES(1, 2) WINDOW_ITEM_LEAVES(1, 3)
    ABORT_LANDS(0) ABORT_LANDS(1) ABORT_LANDS(2) ABORT_LANDS(3)
#ifdef KILL
    :: atomic { killed == r + 1 && (way[r] || abortWay[r] || !LEFT(0) || !LEFT(1)) -> /* lost */
           way[r] = 0; abortWay[r] = 0; item[r * 2] = 0; item[r * 2 + 1] = 0; items[r * 2] = 0; items[r * 2 + 1] = 0 }
#endif
    od
}

/* ---- messages as the rank sees them */
#define HAS(source) (CELL(st[AT(r, e)], source) == e)
#define HAS_RUN(at) (op[AT(r, e)] == e && ((message[AT(r, e)] >> (at)) & 1))
#define HAS_RELAYED (HAS_RUN(RELAYED(OTHER, 0)) && HAS_RUN(RELAYED(OTHER, 1)))
#define HAS_ROW(region) (op[AT(r, e)] == e && ((row[AT(r, e)] >> (region)) & 1))
#define BAD(q) bad[PARITY(e) * W + (q)]
#define ARRIVED_1 (HAS(r) && \
    (a == DISPATCH -> HAS(NEAR) && HAS_RELAYED : \
    (a == COMBINE -> (!AT_ONCE || HAS(NEAR)) && HAS_RUN(OTHER * PER_SERVER) && HAS_RUN(OTHER * PER_SERVER + 1) : \
                     HAS_RUN(NEAR) && HAS_RUN(RAIL_PEER) && HAS_RUN(ACROSS))))
#ifdef M_own_rows_not_awaited
#define ARRIVED_HERE true
#else
#define ARRIVED_HERE HAS(NEAR)
#endif
#ifdef M_relayed_message_not_awaited
#define ARRIVED_2 (a == COMBINE -> HAS_RELAYED : HAS(RAIL_PEER))
#else
#define ARRIVED_2 (a == COMBINE -> HAS_RELAYED : HAS(RAIL_PEER) && HAS(ACROSS))
#endif
#define ROW_IS_HERE(source, region) \
    CHECK("violated: a row of another op is read\n", BAD(source) || HAS_ROW(region))

/* The worst of the collective errors: of the lowest rank. */
inline Learn(source) { if :: BAD(source) && (v == 0 || v > source + 1) -> v = source + 1 :: else fi }
#define OWN_ERROR 8   /* what one rank alone has found */
#define NO_SUMS 9
inline Misread() {
#ifdef ODD
    if
    :: odd == r + 1 && a != WINDOW -> if :: v = OWN_ERROR; odd = 0 :: skip fi
    :: else
    fi
#else
    skip
#endif
}

/* The abort blocks that count in op e: those of the next op do not. */
#ifdef M_abort_of_the_next_op_heeded
#define ABORT_OF(s) ((ab[r] >> (s)) & 1)
#else
#define ABORT_OF(s) (((ab[r] >> (s)) & 1) && failedIn[s] != e + 1)
#endif
#define ABORTED (ABORT_OF(0) || ABORT_OF(1) || ABORT_OF(2) || ABORT_OF(3))
/* The rank is asked by one in its op, or in the next one, that has more than a turn more. */
#ifdef M_accused_waits_as_long
#define FEWER 0
#else
#define FEWER 1
#endif
#define LEFT_BY(s) (turns[s] > FEWER -> turns[s] - FEWER : 1)
#define ASKED_BY(s, most) (accuses[s] == r + 1 && (cur[s] == e || cur[s] == e + 1) && LEFT_BY(s) < (most))
#define ASKED(most) (ASKED_BY(0, most) || ASKED_BY(1, most) || ASKED_BY(2, most) || ASKED_BY(3, most))
inline TakeTurns() {
    k = 0;
    do :: k < W -> if :: ASKED_BY(k, turns[r]) -> turns[r] = LEFT_BY(k) :: else fi; k++ :: else -> break od;
    k = 0
}
/* A wait: until all is there, an abort has come, or the deadline is over, or another rank asks whom this one misses. */
#ifdef FAILURES
#if defined(M_asked_rank_waits_on) || defined(DEADLINES)  /* before it has waited for a while itself */
#define ANSWERS false
#else
#define ANSWERS ASKED(MOST_TURNS + 1)
#endif
#define GIVE_UP(arrived, name) \
    :: atomic { ALIVE && !(arrived) && ABORTED -> v = 0; goto leave } \
    :: atomic { ALIVE && !(arrived) && !ABORTED && (EXPIRES || ANSWERS) -> name; goto ask }
#else
#define GIVE_UP(arrived, name)
#endif
#ifdef M_first_wait_names_its_neighbour
#define LATE_RECORDS NEAR
#else
#define LATE_RECORDS RAIL_PEER
#endif
/* Who has failed if a message does not come. v: 1 + the rank. */
inline NameFirst() {
    if
    :: a == DISPATCH && !HAS(NEAR) -> v = 1 + NEAR
    :: a == DISPATCH && !HAS_RELAYED -> v = 1 + LATE_RECORDS
    :: a == COMBINE -> v = 1 + NEAR
    :: a == WINDOW && !HAS_RUN(NEAR) -> v = 1 + NEAR
    :: a == WINDOW && !HAS_RUN(RAIL_PEER) -> v = 1 + RAIL_PEER
    :: a == WINDOW && !HAS_RUN(ACROSS) -> v = 1 + ACROSS
    fi
}
/* The rank that should have relayed it. */
inline NameSecond() { v = 1 + (a == DISPATCH -> NEAR : RAIL_PEER) }

#define DRAINED (way[r] == 0)
#ifdef FINALIZE
#define ENDS (LEFT(PARITY(e)) && abortWay[r] == 0)
#else
#define ENDS (((abortWay[r] >> NEAR) & 1) == 0)
#endif
inline Post() {
    CHECK("violated: an item of two ops ago has not left\n", LEFT(PARITY(e)));
    item[AT(r, e)] = 1
}
inline ChooseOp() {
    if
    :: kind[e] == 0 ->
        if
        :: kind[e] = 1 + DISPATCH
        :: kind[e] = 1 + COMBINE
#ifdef MIXED
        :: kind[e] = 1 + WINDOW
#endif
        fi
    :: else
    fi;
    a = kind[e] - 1;
#ifdef COLLECTIVE
    if :: BAD(r) = 0 :: BAD(r) = 1 fi;
#endif
    noSums[PARITY(e) * W + r] = 0
}
inline SendRows() {
    if
    :: BAD(r)
    :: else ->
        if :: a == COMBINE -> PutRow(r, PARITY(e), e, RAIL_PEER) :: else fi;
        if :: a == WINDOW || (a == COMBINE && AT_ONCE) -> PutRow(r, PARITY(e), e, r) :: else fi;
        way[r] = (a == COMBINE -> ROWS_NEAR : ROWS_OUT)
    fi
}
inline SendRuns() {
    if
    :: a == DISPATCH -> way[r] = way[r] | RUNS_OUT
    :: a == COMBINE -> PutStatus(r, e, r); PutRun(r, PARITY(e), e, RAIL_PEER);
        way[r] = way[r] | RUN_RAIL | (AT_ONCE -> RUN_NEAR : 0)
    :: a == WINDOW -> PutStatus(r, e, r); way[r] = way[r] | RUNS_OUT
    fi
}
inline PostFirst() {
    itemRows[AT(r, e)] = !BAD(r);
    if
    :: a == DISPATCH ->
        Post();
        if :: BAD(r) :: else -> PutRow(r, PARITY(e), e, r); way[r] = ROWS_NEAR fi
    :: a == COMBINE
    :: a == WINDOW ->
        CHECK("violated: an item of two ops ago has not left\n", LEFT(PARITY(e)));
        items[AT(r, e)] = OTHERS
    fi
}
/* Dispatch: the message to the own server, after the rows. */
inline SendRunHere() {
    if :: a == DISPATCH -> PutStatus(r, e, r); way[r] = way[r] | RUN_NEAR :: else fi
}
/* Dispatch: the other server's rows to their owners here, also if this rank has learnt of a collective error. */
inline Forward() {
    Learn(r); Learn(NEAR); Learn(RAIL_PEER); Misread();
#ifdef M_error_stops_forwarding
    if
    :: v -> skip
    :: else ->
#endif
    if
    :: BAD(RAIL_PEER)
    :: else ->
        ROW_IS_HERE(RAIL_PEER, W + OTHER);
        PutRow(r, PARITY(e), e, RAIL_PEER); way[r] = way[r] | FORWARDED
    fi
#ifdef M_error_stops_forwarding
    fi
#endif
}
/* Combine: a sum for each token of this rank. */
inline SumHere() {
    if
    :: v
    :: else -> ROW_IS_HERE(r, r); ROW_IS_HERE(NEAR, NEAR); PutRow(r, PARITY(e), e, W + MINE)
    fi
}
/* Combine: a sum for each token of the rail peer, and the messages to relay behind them. */
inline SumServer() {
    Learn(r); Learn(NEAR); Misread();
    if
    :: v -> noSums[PARITY(e) * W + r] = 1
    :: else ->
        ROW_IS_HERE(r, RAIL_PEER); ROW_IS_HERE(NEAR, ACROSS); way[r] = way[r] | ROWS_OUT;
        if :: AT_ONCE -> SumHere() :: else fi
    fi;
    way[r] = way[r] | RUNS_OUT
}
/* Combine: this server's rows, also if this rank has learnt of a collective error. */
inline SendHere() {
#ifdef M_error_stops_own_rows
    if
    :: BAD(r) || v
#else
    if
    :: BAD(r)
#endif
    :: else -> PutRow(r, PARITY(e), e, r); way[r] = ROWS_HERE
    fi
}
inline RelayRuns() { PutRelayed(r); way[r] = way[r] | RELAY }
/* What a rank reads when its second wait is over. */
inline ReadAll() {
    if
    :: v
    :: !v && a == DISPATCH ->
        ROW_IS_HERE(r, r); ROW_IS_HERE(NEAR, NEAR); ROW_IS_HERE(RAIL_PEER, RAIL_PEER); ROW_IS_HERE(ACROSS, ACROSS)
    :: !v && a == COMBINE ->
        CHECK("violated: a row of another op is read\n", HAS_ROW(W + MINE) &&
              (noSums[PARITY(e) * W + RAIL_PEER] || HAS_ROW(W + OTHER)));
        if :: noSums[PARITY(e) * W + RAIL_PEER] -> v = NO_SUMS :: else fi
    :: !v && a == WINDOW ->
        ROW_IS_HERE(r, r); ROW_IS_HERE(NEAR, NEAR); ROW_IS_HERE(RAIL_PEER, RAIL_PEER); ROW_IS_HERE(ACROSS, ACROSS)
    fi
}
inline LearnAll() { Learn(0); Learn(1); Learn(2); Learn(3) }
/* All ranks raise the error of the lowest rank that has one; else none, but for what one rank alone has found. */
inline JudgeTogether() {
    k = 0;
    do :: k < W && !BAD(k) -> k++ :: else -> break od;
#ifdef ODD
    CHECK("violated: ranks do not agree on the error\n", v == 0 || v >= OWN_ERROR);
#else
    CHECK("violated: ranks do not agree on the error\n", v == (k < W -> k + 1 : 0));
#endif
    k = 0
}
/* The half is not read any more. */
inline End() {
    op[AT(r, e)] = 0; row[AT(r, e)] = 0; message[AT(r, e)] = 0; done[r] = e; busy[r] = 0; e = 0; a = 0; v = 0
}

proctype Rank(byte r) {
    byte e, a, v, k;
launch:
end_host:
    if
    :: atomic { ALIVE && !failed[r] && done[r] < N ->
           e = done[r] + 1;
           if
           :: ABORTED -> goto leave
           :: else ->
               cur[r] = e; busy[r] = 1;
               ChooseOp(); SendRows()
           fi }
    STOP
    fi;
    if :: atomic { ALIVE && DRAINED -> SendRuns() } STOP fi;
    if :: atomic { ALIVE && DRAINED -> PostFirst() } STOP fi;
    if :: atomic { ALIVE && DRAINED -> SendRunHere(); waits[r] = 1 } STOP fi;
    do
    :: atomic { ALIVE && ARRIVED_1 ->
           waits[r] = 0;
           if
           :: a == DISPATCH -> Forward()
           :: a == COMBINE -> SumServer()
           :: a == WINDOW -> LearnAll(); ReadAll(); JudgeTogether()
           fi;
           break }
    GIVE_UP(ARRIVED_1, NameFirst())
    STOP
    od;
    if
    :: atomic { ALIVE && a == WINDOW }
#ifdef M_messages_overtake_forwarded_rows
    :: atomic { ALIVE && a == DISPATCH -> RelayRuns(); waits[r] = 1 }
#elif defined(M_relays_after_its_own_wait)
    :: atomic { ALIVE && a == DISPATCH && DRAINED -> PutRelayed(r); waits[r] = 1 }
#elif defined(M_error_stops_messages)
    :: atomic { ALIVE && a == DISPATCH && DRAINED ->
           if :: v == 0 -> RelayRuns() :: else -> PutRelayed(r) fi; waits[r] = 1 }
#else
    :: atomic { ALIVE && a == DISPATCH && DRAINED -> RelayRuns(); waits[r] = 1 }
#endif
    :: atomic { ALIVE && a == COMBINE && DRAINED ->
           itemRows[AT(r, e)] = !noSums[PARITY(e) * W + r]; Post();
#ifdef PASSES
           SendHere() }
#else
           waits[r] = 1 }
#endif
    STOP
    fi;
#ifdef PASSES
    if
    :: a != COMBINE
    :: a == COMBINE ->
#ifdef M_own_message_overtakes_rows
        if :: atomic { ALIVE -> way[r] = way[r] | RUN_NEAR; waits[r] = 1 } STOP fi;
#else
        if :: atomic { ALIVE && DRAINED -> way[r] = RUN_NEAR; waits[r] = 1 } STOP fi;
#endif
        do
        :: atomic { ALIVE && ARRIVED_HERE -> SumHere(); break }
        GIVE_UP(ARRIVED_HERE, v = 1 + NEAR)
        STOP
        od
    fi;
#endif
    if
    :: a == WINDOW
    :: a != WINDOW ->
        do
        :: atomic { ALIVE && ARRIVED_2 && DRAINED ->
               waits[r] = 0;
#ifdef M_relays_after_its_own_wait
               if :: a == DISPATCH -> way[r] = RELAY :: else fi;
#endif
               LearnAll(); ReadAll(); JudgeTogether();
               break }
        GIVE_UP(ARRIVED_2, NameSecond())
        STOP
        od
    fi;
    if :: atomic { ALIVE && DRAINED && ENDS -> End() } STOP fi;
    goto launch;

#ifdef FAILURES
    /* The deadline is over. v: 1 + whom this rank misses. */
ask:
#ifndef M_nobody_is_asked
    if :: atomic { ALIVE -> waits[r] = 2; turns[r] = MOST_TURNS; TakeTurns(); accuses[r] = v; FORGET_LATE } STOP fi;
    do
    :: atomic { ALIVE && ABORTED -> v = 0; break }
    :: atomic { ALIVE && !ABORTED && ASKED(turns[r]) -> TakeTurns() }
    :: atomic { ALIVE && !ABORTED && !ASKED(turns[r]) && EXPIRES -> break }
    STOP
    od;
#endif
#endif

leave:
    /* Fatal. v: 1 + whom this rank has missed; 0: it was notified. */
#ifdef FAILURES
    if
    :: atomic { ALIVE && DRAINED ->
           waits[r] = 0; accuses[r] = 0; turns[r] = 0;
           CHECK("violated: an op fails that another rank has completed\n", MAY_FAIL);
           if
           :: v ->
               CHECK("violated: an error names a rank that is not to blame\n", BLAMED(v - 1));
               culprit[r] = v - 1; failedIn[r] = e; ab[r] = ab[r] | 1 << r;
#ifdef M_abort_within_the_server
               abortWay[r] = 1 << NEAR
#else
               abortWay[r] = OTHERS
#endif
           :: else ->
               skip
           fi;
           v = 0 }
    STOP
    fi;
    if :: atomic { ALIVE && ENDS -> failed[r] = 1; busy[r] = 0; e = 0; a = 0 } STOP fi;
    goto launch;
#endif
#ifdef KILL
stopped:
    skip
#endif
}

#ifdef KILL
/* Time that passes when nothing can move: the deadline of a rank, or the answer of those that wait for the fewest turns. */
#define STUCK(q, what) (killed != (q) + 1 && waits[q] == what && !late[q])
#define ANY_STUCK (STUCK(0, 1) || STUCK(1, 1) || STUCK(2, 1) || STUCK(3, 1))
#define FEWEST(q) (STUCK(q, 2) && !LESS(0, q) && !LESS(1, q) && !LESS(2, q) && !LESS(3, q))
#define LESS(s, q) (STUCK(s, 2) && turns[s] < turns[q])
#define EXPIRE(q) :: STUCK(q, 1) -> late[q] = 1
proctype Clock() {
    bit a, b, c, d;
end_clock:
    do
    :: atomic { timeout && killed && ANY_STUCK ->
           if EXPIRE(0) EXPIRE(1) EXPIRE(2) EXPIRE(3) fi }
    :: atomic { timeout && killed && (FEWEST(0) || FEWEST(1) || FEWEST(2) || FEWEST(3)) ->
           a = FEWEST(0); b = FEWEST(1); c = FEWEST(2); d = FEWEST(3);
           late[0] = late[0] | a; late[1] = late[1] | b; late[2] = late[2] | c; late[3] = late[3] | d;
           a = 0; b = 0; c = 0; d = 0 }
    od
}
#endif

init {
    byte i;
    atomic {
#ifdef ODD
        odd = 1;
#endif
        do :: i < W -> run Rank(i); run Memory(i); i++ :: else -> break od;
        i = 0;
#ifdef KILL
        run Clock()
#endif
    };
#ifdef KILL
    if
    :: atomic { killed == 0 -> killed = 1 }
    :: skip
    fi
#endif
}
