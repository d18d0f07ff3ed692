/* Algorithm "direct" mixed with "window" in any order on one communicator: each core is a process.
   A "run" in names of this file is a status message. See docs/model.md.

   This file has what direct adds to window.pml, and leaves out what both share (status words, wrap of the epoch,
   the content of errors): a rank fills its own half before its cores have synchronized. In dispatch the cores synchronize again
   before the status messages, unless some make lists and the others store rows. In both ops every core waits for all
   ranks, only core 0 gives up, and no core synchronizes after that. Rows of combine may lie in registered buffers. A store becomes
   visible at any time after it was issued, at the latest when its core drains.
   And V2's window combine, which waits in the same way: its rows leave for the slots of their tokens in the peers'
   halves before its cores have synchronized.

   Macros of a run: ROLES (in dispatch core 0 makes all lists from all ids, the others store rows, and they synchronize
   once), REGISTERED (rows of direct combine lie in registered buffers), SLOTS (some ops are V2's window combine), GIVEUP (core 0 of
   one rank may give up, or find its rank's counts wrong after all messages have come); M_<mutant>. W, C, N: ranks,
   cores of each, ops. Stores of a core land in any order. */
#define WINDOW 0
#define DISPATCH 1
#define COMBINE 2
#define RETURN 3  /* V2's window combine */
#define HALF(e) ((e) & 1)
#ifdef M_single_half
#define DHALF(e) 0  /* of rows and tables */
#else
#define DHALF(e) HALF(e)
#endif
#define CELL(q, h, s, c) ((((q) * 2 + (h)) * W + (s)) * C + (c))
#define I ((r) * C + (c))
#define CHECK(text, x) if :: (x) :: else -> printf(text); assert(false) fi

#ifdef ROLES
#define LISTS(c) ((c) == 0)  /* whether core c stores lists in dispatch */
#define ROWS(c) ((c) != 0)   /* whether it stores rows */
#else
#define LISTS(c) true
#define ROWS(c) true
#endif

byte algorithm[N + 3];      /* 1 + the algorithm of op e, the same on all ranks: the first rank to begin chooses */
byte cell[W * 2 * W * C];   /* [owner][half][writer's rank and core]: the op whose rows, or tables, lie there */
byte table[W * 2 * C];      /* [owner][half][core]: lists of dispatch */
byte registered[W];         /* the op whose rows lie in the registered buffer */
byte hist[W * C];           /* workspace: the op that this core has counted for */
byte seen[W * 2 * W];       /* [reader][half][source]: epoch of the message there */
byte done[W];               /* ops that the rank has completed */
byte inside[W];             /* bit c: core c is in the op done + 1 */
byte arrived[W * 2];        /* cores at a core barrier, by round */
bit gave[W];                /* local abort flag of the rank's own op */
bit judged[W];              /* core 0 has found the counts of the rank's own op wrong */
byte reported[W], stored[W]; /* combine: cores that have reported their status to the others; that store their sums */
bit dead[W];                /* the rank has failed: its aborts are there, it launches no more */
bit rowsOut[W * C], tablesOut[W * C], runsOut[W * C]; /* issued, not yet visible */
byte epochOf[W * C];

/* A store into a half overwrites all that lies there, whatever the places in each algorithm. */
inline Land(q, h, e) {
    j = 0;
    do
    :: j < W * C ->
        if :: cell[(q * 2 + h) * W * C + j] != e -> cell[(q * 2 + h) * W * C + j] = 0 :: else fi;
        j++
    :: else -> break
    od;
    j = 0;
    do
    :: j < C -> if :: table[(q * 2 + h) * C + j] != e -> table[(q * 2 + h) * C + j] = 0 :: else fi; j++
    :: else -> break
    od;
    j = 0
}
inline LandRows() {
    if
    :: algorithm[epochOf[I]] - 1 == WINDOW || algorithm[epochOf[I]] - 1 == RETURN ->
        q = 0;
        do
        :: q < W -> Land(q, DHALF(epochOf[I]), epochOf[I]);
            cell[CELL(q, DHALF(epochOf[I]), r, c)] = epochOf[I]; q++
        :: else -> break
        od;
        q = 0
    :: else ->
        Land(r, DHALF(epochOf[I]), epochOf[I]);
        cell[CELL(r, DHALF(epochOf[I]), r, c)] = epochOf[I]
    fi;
    rowsOut[I] = 0
}
inline LandTables() {
    Land(r, DHALF(epochOf[I]), epochOf[I]);
    table[(r * 2 + DHALF(epochOf[I])) * C + c] = epochOf[I]; tablesOut[I] = 0
}
/* The peers to which a core sends messages. */
#define SHARE(q) ((q) % C == c)
inline LandRuns() {
    q = 0;
    do :: q < W -> if :: SHARE(q) -> seen[(q * 2 + HALF(epochOf[I])) * W + r] = epochOf[I] :: else fi; q++ :: else -> break od;
    q = 0; runsOut[I] = 0
}
proctype Memory(byte r; byte c) {
    byte q, j;
end:
    do
    :: atomic { rowsOut[I] -> LandRows() }
    :: atomic { tablesOut[I] -> LandTables() }
    :: atomic { runsOut[I] -> LandRuns() }
    od
}

#ifdef GIVEUP
byte quitter;               /* 1 + the rank whose core 0 may give up at any time; others, when it has failed */
#define EXPIRES(r) (quitter == (r) + 1 || (quitter != 0 && dead[quitter - 1]))
#endif

#define DRAINED (!rowsOut[I] && !tablesOut[I])
#define EVERYBODY ((1 << C) - 1)
#define SYNCHRONIZE(round, drained) \
    if :: atomic { drained -> arrived[r * 2 + round] = arrived[r * 2 + round] | 1 << c } fi; \
    arrived[r * 2 + round] == EVERYBODY

#ifdef M_no_first_barrier
#define SYNCHRONIZE_0 skip
#else
#define SYNCHRONIZE_0 SYNCHRONIZE(0, DRAINED)
#endif
#ifdef M_lists_still_leaving
#define SYNCHRONIZE_1 skip
#else
#define SYNCHRONIZE_1 SYNCHRONIZE(1, DRAINED)
#endif
#ifdef M_registered_free_too_early
#define REGISTERED_IS_FREE true
#else
#define REGISTERED_IS_FREE (done[r] + 1 >= registered[r] + 2)
#endif

/* A core that has seen all messages reads what every core of every rank has stored. */
inline ReadAll() {
    q = 0;
    do
    :: q < W ->
        j = 0;
        do
        :: j < C ->
            if
            :: a == WINDOW || a == RETURN ->
                CHECK("violated: a row of another op is read\n", cell[CELL(r, DHALF(e), q, j)] == e)
            :: a == DISPATCH ->
                CHECK("violated: a row of another op is read\n", !ROWS(j) || cell[CELL(q, DHALF(e), q, j)] == e);
                CHECK("violated: a list of another op is read\n", !LISTS(j) || table[(q * 2 + DHALF(e)) * C + j] == e)
            :: a == COMBINE ->
#ifdef REGISTERED
                CHECK("violated: registered rows of another op are read\n", registered[q] == e)
#else
                CHECK("violated: a row of another op is read\n", cell[CELL(q, DHALF(e), q, j)] == e)
#endif
            fi;
            j++
        :: else -> break
        od;
        q++
    :: else -> break
    od;
    q = 0; j = 0
}
#ifdef M_follower_does_not_wait
#define AWAITS(q) (c == 0)
#else
#define AWAITS(q) true
#endif
#define HAS(q) (seen[(r * 2 + HALF(e)) * W + (q)] == e || !AWAITS(q))
#if W == 2
#define ARRIVED (HAS(0) && HAS(1))
#else
#define ARRIVED (HAS(0) && HAS(1) && HAS(2))
#endif
#define SUMS (a == COMBINE || a == RETURN)
#ifdef M_sums_not_heard
#define HEAR skip
#else
#define HEAR reported[r] == EVERYBODY
#endif
/* Whether a core uses the counts of the others. */
#ifdef ROLES
#define TOGETHER (a != DISPATCH)
#else
#define TOGETHER true
#endif
inline Counted() {
    j = 0;
    do
    :: j < C -> CHECK("violated: places are counted before all cores have\n", hist[r * C + j] == e); j++
    :: else -> break
    od;
    j = 0
}

proctype Core(byte r; byte c) {
    byte e, a, q, j;
    bit fails;
launch:
    /* The host starts a launch when all cores of the last launch have ended; the caller has filled its registered buffer. */
    if
    :: c == 0 ->
end_host:
        atomic {
            inside[r] == 0 && done[r] < N && !dead[r] ->
            e = done[r] + 1;
            if
            :: algorithm[e] == 0 ->
                if
                :: algorithm[e] = 1 + WINDOW
                :: algorithm[e] = 1 + DISPATCH
                :: algorithm[e] = 1 + COMBINE
#ifdef SLOTS
                :: algorithm[e] = 1 + RETURN
#endif
                fi
            :: else
            fi;
#ifdef REGISTERED
            if :: algorithm[e] - 1 == COMBINE && !REGISTERED_IS_FREE -> algorithm[e] = 1 + DISPATCH :: else fi;
            if :: algorithm[e] - 1 == COMBINE -> registered[r] = e :: else fi;
#endif
            arrived[r * 2] = 0; arrived[r * 2 + 1] = 0; reported[r] = 0; stored[r] = 0; judged[r] = 0;
            inside[r] = EVERYBODY
        }
    :: else ->
end_core:
        (inside[r] >> c) & 1
    fi;
    atomic {
        e = done[r] + 1; a = algorithm[e] - 1; epochOf[I] = e;
        hist[I] = e;
        if
        :: a == DISPATCH ->
            rowsOut[I] = ROWS(c);
#ifdef ROLES
            tablesOut[I] = LISTS(c)
#endif
        :: a == COMBINE ->
#if !defined(REGISTERED) && !defined(M_rows_after_runs)
            rowsOut[I] = 1
#else
            skip
#endif
        :: a == RETURN ->
#ifndef M_rows_after_runs
            rowsOut[I] = 1
#else
            skip
#endif
        :: else
        fi
    };
#if defined(ROLES) && defined(M_lists_still_leaving)
    if :: a != DISPATCH -> SYNCHRONIZE_0 :: else fi;
#else
    SYNCHRONIZE_0;
#endif
    atomic {
        if :: TOGETHER -> Counted() :: else fi;
        if
        :: a == WINDOW -> rowsOut[I] = 1
        :: a == DISPATCH -> if :: TOGETHER -> tablesOut[I] = 1 :: else fi
        :: a == COMBINE ->
#if !defined(REGISTERED) && defined(M_rows_after_runs)
            rowsOut[I] = 1
#else
            skip
#endif
        :: a == RETURN ->
#ifdef M_rows_after_runs
            rowsOut[I] = 1
#else
            skip
#endif
        fi
    };
    if :: (a == WINDOW || a == DISPATCH) && TOGETHER -> SYNCHRONIZE_1 :: else fi;
    atomic { runsOut[I] = 1 };
    /* The wait, for all ranks. */
    do
    :: atomic { ARRIVED -> break }
#ifdef GIVEUP
#ifdef M_follower_decides
    :: atomic { !ARRIVED && EXPIRES(r) -> fails = 1; if :: c == 0 -> gave[r] = 1 :: else fi; break }
#else
    :: atomic { c == 0 && !ARRIVED && EXPIRES(r) -> fails = 1; gave[r] = 1; break }
#endif
#ifndef M_local_abort_flag_ignored
    :: atomic { c != 0 && gave[r] -> fails = 1; break }
#endif
#endif
    od;
#ifdef GIVEUP
    if :: atomic { c == 0 && !fails && SUMS && EXPIRES(r) -> if :: judged[r] = 1; fails = 1 :: skip fi } :: else fi;
#endif
    atomic {
        if :: SUMS -> reported[r] = reported[r] | 1 << c :: else fi;
        if
        :: fails -> CHECK("violated: a core leaves an op that core 0 continues\n", gave[r] || judged[r])
        :: else -> ReadAll()
        fi
    };
    /* Each hears the others when it has summed. */
    if
    :: SUMS && !fails -> HEAR; atomic { if :: !gave[r] && !judged[r] -> stored[r] = stored[r] | 1 << c :: else fi }
    :: else
    fi;
    if :: atomic { !runsOut[I] && DRAINED -> skip } fi;
    atomic {
        inside[r] = inside[r] & ~(1 << c); epochOf[I] = e;
        if
        :: inside[r] == 0 ->
            CHECK("violated: a core stores its sums of an op that has failed\n", !(gave[r] || judged[r]) || stored[r] == 0);
            if :: gave[r] -> dead[r] = 1 :: else -> done[r]++ fi
        :: else
        fi;
        e = 0; a = 0; fails = 0
    };
    goto launch
}

init {
    byte i, j;
    atomic {
        do
        :: i < W ->
            j = 0;
            do :: j < C -> run Core(i, j); run Memory(i, j); j++ :: else -> break od;
            i++
        :: else -> break
        od;
#ifdef GIVEUP
        select(quitter : 1 .. W);
#endif
        i = 0; j = 0
    }
}
