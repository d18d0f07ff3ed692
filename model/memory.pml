/* Windows, the stores under way to them, and the rules that both must keep.

   A store is issued by a core (a bit in pr, ps or pa) and becomes visible later, when a process Memory of
   that core lets it land. Without FIFO in any order; with FIFO in order per (core, destination). A status
   message lands block by block; with WHOLE_RUN at once. */

#define CORE(r, c) ((r) * C + (c))
/* Halves: data by DHALF, status by SHALF. Two mutants have a single half. */
#ifdef M_single_half
#define DHALF(e) 0
#else
#define DHALF(e) PARITY(e)
#endif
#ifdef M_single_status_half
#define SHALF(e) 0
#else
#define SHALF(e) PARITY(e)
#endif
#define ROW_AT(q, h, s) ((((q) * 2 + (h)) * W + (s)) * R)
#define RUN_AT(q, h, s) ((((q) * 2 + (h)) * W + (s)) * B)
#define MINE(r, e) (PARITY(e) * W + (r))

/* A row in a window: its op's tag and its slot. 0: poison. */
#define ROW(e, m) (TAG(e) | (m) << 3)

byte row[2 * W * W * R];   /* [owner][half][source][place] */
byte st[2 * W * W * B];    /* [owner][half][source][block]: the epoch that it carries, 0 in a new window */
byte ab[W];                /* bit s: an abort block of source s lies here */
byte word[W];              /* the epoch word */
byte board[W * ROUNDS * C];/* status codes of the cores */
byte ws[W * W];            /* workspace: tag of the counts kept of a source */

PENDING pr[W * C];         /* rows under way: bit q * R + m */
PENDING ps[W * C];         /* status blocks: bit q * B + b */
byte pa[W * C];            /* abort blocks: bit q */
byte rE[W * C];            /* epoch of those rows */

/* Where a rank is, and what its op is, by parity of its epoch. A rank learns these of another rank only through a
   status block that carries the epoch; the rules read them directly. */
byte cur[W];               /* epoch of its launch */
byte busy[W];              /* bit c: core c is inside it */
bit kind[2 * W];           /* 0 dispatch, 1 combine */
bit bad[2 * W];            /* the rank raises a collective error */
PENDING rows[2 * W];       /* rows that the rank sends: bit q * R + m */
byte culprit[W];           /* the rank that its abort blocks name */
byte failedIn[W];          /* the epoch in its abort blocks; 0: it has posted none */
byte failed[W];            /* launches that have ended with a fatal error */

#define MASK_OF(e) rows[MINE(r, e)]
#define I CORE(r, c)

/* Rule: nothing of another epoch lands in a half in which its owner works. */
#define QUIET_DATA(q, h, e) (!(busy[q] && DHALF(cur[q]) == (h) && cur[q] != (e)))
#define QUIET_STATUS(q, e) (!(busy[q] && SHALF(cur[q]) == SHALF(e) && cur[q] != (e)))

#ifdef M_wrong_half_for_combine
#define TARGET_HALF(e) (kind[MINE(r, e)] -> 1 - DHALF(e) : DHALF(e))
#else
#define TARGET_HALF(e) DHALF(e)
#endif

#ifdef FIFO
#define BEHIND(pending, before) (((pending) & (before)) == 0)
#else
#define BEHIND(pending, before) true
#endif

#define LAND_ROW(q, m, mask, before, place) \
    :: atomic { (pr[I] & mask) && BEHIND(pr[I], before) AT_MEMORY(EV_LAND_ROW, q, m) -> \
           CHECK("violated: a row lands in a buffer in use\n", QUIET_DATA(q, TARGET_HALF(rE[I]), rE[I])); \
           row[ROW_AT(q, TARGET_HALF(rE[I]), r) + place] = ROW(rE[I], m); \
           pr[I] = pr[I] & ~(mask); DONE }
#ifdef WHOLE_RUN
#define LAND_BLOCK(q, b, mask, before, rowmask)
#define LAND_RUN(q, mask, rowmask) \
    :: atomic { (ps[I] & mask) && BEHIND(pr[I], rowmask) -> \
           CHECK("violated: a status block lands in a buffer in use\n", QUIET_STATUS(q, cur[r])); \
           k = 0; \
           do :: k < B -> st[RUN_AT(q, SHALF(cur[r]), r) + k] = cur[r]; k++ :: else -> break od; \
           k = 0; ps[I] = ps[I] & ~(mask) }
#else
#define LAND_RUN(q, mask, rowmask)
#define LAND_BLOCK(q, b, mask, before, rowmask) \
    :: atomic { (ps[I] & mask) && BEHIND(ps[I], before) && BEHIND(pr[I], rowmask) \
                AT_MEMORY(EV_LAND_BLOCK, q, b) -> \
           CHECK("violated: a status block lands in a buffer in use\n", QUIET_STATUS(q, cur[r])); \
           st[RUN_AT(q, SHALF(cur[r]), r) + b] = cur[r]; \
           ps[I] = ps[I] & ~(mask); DONE }
#endif
#ifdef FAILURES
#define LAND_ABORT(q, mask, rowmask, runmask) \
    :: atomic { (pa[I] & mask) && BEHIND(pr[I], rowmask) && BEHIND(ps[I], runmask) \
                AT_MEMORY(EV_LAND_ABORT, q, 0) -> \
           ab[q] = ab[q] | (1 << r); pa[I] = pa[I] & ~(mask); DONE }
#else
#define LAND_ABORT(q, mask, rowmask, runmask)
#endif

proctype Memory(byte r; byte c) {
#ifdef WHOLE_RUN
    byte k;
#endif
end_memory:
    do
    LANDINGS
#ifdef KILL
    :: atomic { killed == r + 1 && (pr[I] || ps[I] || pa[I]) -> pr[I] = 0; ps[I] = 0; pa[I] = 0 } /* lost */
#endif
    od
}
