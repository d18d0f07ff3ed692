/* Rows of direct combine in stages, of which two are enough: the first is there with the runs, the rest comes later.
   Included by direct.pml, for runs with STAGED. The last COPIERS cores of a rank copy the rest, core TELLER tells the
   peers, core 0 awaits all ranks and posts for the others.

   MIXED: rows of some ranks come whole, as in lent memory; the runs of the others say that late blocks follow.

   Copy blocks and what core 0 posts are there as soon as they are stored: each has one reader's patience to go by, who
   may look at any time, and nothing is stored after them that could be seen before them. */
#ifndef COPIERS
#define COPIERS 1
#endif
#ifndef TELLER
#define TELLER 0
#endif
#define COPIES(c) ((c) + COPIERS >= C)

byte rest[W * 2 * C];       /* [owner][half][core]: the op whose rest of rows lies there */
byte copied[W * C];         /* own state area: copy blocks */
byte late[W * 2 * W];       /* [reader][parity][source]: late blocks */
byte posted[W];             /* own state area: the op of which core 0 says that the rest is there */
bit restOut[W * C], lateOut[W]; /* issued, not yet visible */
#ifdef ODD
byte odd[W];                /* the op that core 0 has left for an error that only this rank has */
#endif
#define STAGES_DRAINED (!restOut[I] && (c != TELLER || !lateOut[r]))

#if W == 2
#define OF_ALL(x) (x(0) && x(1))
#define OF_ANY(x) (x(0) || x(1))
#else
#define OF_ALL(x) (x(0) && x(1) && x(2))
#define OF_ANY(x) (x(0) || x(1) || x(2))
#endif

#ifdef MIXED
byte whole[W];              /* the op that this rank's rows come whole in */
bit owes[W * 2 * W];        /* in the runs: [reader][half][source] */
#define STAGES (a == COMBINE && whole[r] != e)
#define OWES(q) owes[(r * 2 + HALF(e)) * W + (q)]
#ifdef M_own_phase_for_all
#define SOME_FOLLOW STAGES
#else
#define SOME_FOLLOW (a == COMBINE && OF_ANY(OWES))
#endif
#else
#define STAGES (a == COMBINE)
#define OWES(q) true
#define SOME_FOLLOW STAGES
#endif

#ifdef M_single_late_block
#define LHALF(e) 0
#else
#define LHALF(e) HALF(e)
#endif
inline LandRest() {
    Land(r, DHALF(epochOf[I]), epochOf[I]);
    rest[(r * 2 + DHALF(epochOf[I])) * C + c] = epochOf[I]; restOut[I] = 0
}
inline LandLate() {
    q = 0;
    do :: q < W -> late[(q * 2 + LHALF(epochOf[I])) * W + r] = epochOf[I]; q++ :: else -> break od;
    q = 0; lateOut[r] = 0
}

/* A core's share of the rest, after the runs; then its block. */
#ifdef M_copied_before_stored
#define STORED true
#else
#define STORED (!restOut[I])
#endif
inline Copy() {
    atomic { restOut[I] = 1 };
    if :: atomic { STORED -> copied[I] = e } fi
}

#ifdef M_announced_before_copied
#define ALL_COPIED true
#else
#define COPIED(c) (!COPIES(c) || copied[r * C + (c)] == e)
#if C == 1
#define ALL_COPIED COPIED(0)
#elif C == 2
#define ALL_COPIED (COPIED(0) && COPIED(1))
#else
#define ALL_COPIED (COPIED(0) && COPIED(1) && COPIED(2))
#endif
#endif
inline Tell() {
    if :: atomic { ALL_COPIED -> lateOut[r] = 1 } fi
}

#ifdef M_late_of_any_epoch
#define IS_LATE(q) (!OWES(q) || late[(r * 2 + LHALF(e)) * W + (q)] != 0)
#else
#define IS_LATE(q) (!OWES(q) || late[(r * 2 + LHALF(e)) * W + (q)] == e)
#endif
#define ALL_LATE OF_ALL(IS_LATE)

/* Core 0, with the first stage of all ranks there. Whatever it leaves for, but for giving up, the peers still get their
   late blocks. */
inline FindOdd() {
#ifdef ODD
    if :: skip :: atomic { fails = 1; odd[r] = e } fi
#else
    skip
#endif
}
inline AwaitLate() {
    do
    :: atomic { ALL_LATE -> posted[r] = e; break }
#ifdef GIVEUP
    :: atomic {
        !ALL_LATE && EXPIRES(r) -> fails = 1; gave[r] = 1;
#ifdef M_posted_with_failure
        posted[r] = e;
#endif
        break
    }
#endif
    od
}
inline AwaitRest() {
#ifdef M_leaves_untold
    FindOdd();
    if :: !fails && STAGES && TELLER == 0 -> Tell() :: else fi;
#else
    if :: STAGES && TELLER == 0 -> Tell() :: else fi;
    FindOdd();
#endif
#ifdef M_core_0_awaits_no_rest
    skip
#else
    if :: !fails -> AwaitLate() :: else fi
#endif
}

/* The others go by what core 0 posts alone. */
#ifdef ODD
#define LEFT_BY_CORE_0 (gave[r] || odd[r] == e)
#else
#define LEFT_BY_CORE_0 gave[r]
#endif
inline AwaitPost() {
    do
    :: atomic { posted[r] == e -> break }
#if !defined(M_fail_block_ignored) && !defined(M_fail_block_ignored_later)
    :: atomic { LEFT_BY_CORE_0 -> fails = 1; break }
#endif
    od
}
/* A core whose share of the sums is empty. */
#ifdef M_core_0_awaits_no_rest
#define HAS_NONE(c) ((c) == 0)
#else
#define HAS_NONE(c) false
#endif
inline ReadRest() {
    q = 0;
    do
    :: q < W ->
        j = 0;
        do
        :: j < C ->
            CHECK("violated: the rest of a row of another op is read\n",
                  !COPIES(j) || !OWES(q) || rest[(q * 2 + DHALF(e)) * C + j] == e);
            j++
        :: else -> break
        od;
        q++
    :: else -> break
    od;
    q = 0; j = 0
}
