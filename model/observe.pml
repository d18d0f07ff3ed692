/* Replay: a step of the model that a trace shows waits for its event. The process Observer compares each load of the
   trace with the model's memory. replay.py writes trace.h. */
c_decl {
\#include "trace.h"
}

int pos;                    /* events that have happened */
bit reading[W * C];         /* this core may read rows */

#define AT_MEMORY(event, x, y) && c_expr { trace_at (now.pos, event, PMemory->r, PMemory->c, x, y) }
#define AT_CORE(event, x) && c_expr { trace_at (now.pos, event, PCore->r, PCore->c, x, 0) }
#define DONE pos++
#define CHECK(text, x) (x)

inline ReplayedOp() {
    c_code {
        now.kind[PARITY(PCore->e) * W + PCore->r] = trace_kind[PCore->r][PCore->e];
        now.bad[PARITY(PCore->e) * W + PCore->r] = trace_bad[PCore->r][PCore->e];
        now.rows[PARITY(PCore->e) * W + PCore->r] = trace_rows[PCore->r][PCore->e];
    }
}

#define SEEN(event, condition) \
    :: atomic { c_expr { trace_is (now.pos, event) && (condition) } -> pos++ }
#define EVENT trace[now.pos]

proctype Observer() {
end_observer:
    do
    /* a store lands: the model has issued it, and it has not landed before */
    SEEN(EV_STORE_ROW, now.pr[EVENT.r * C + EVENT.c] >> (EVENT.x * R + EVENT.y) & 1)
    SEEN(EV_STORE_BLOCK, now.ps[EVENT.r * C + EVENT.c] >> (EVENT.x * B + EVENT.y) & 1)
    SEEN(EV_STORE_ABORT, now.pa[EVENT.r * C + EVENT.c] >> EVENT.x & 1)
    /* a load: x says where, y what the trace has read there */
    SEEN(EV_LOAD_BLOCK, now.st[EVENT.x] == EVENT.y)
    SEEN(EV_LOAD_ABORT, (now.ab[EVENT.r] >> EVENT.x & 1) == EVENT.y)
    SEEN(EV_LOAD_EPOCH, now.word[EVENT.r] == EVENT.y)
    SEEN(EV_LOAD_ROW, now.reading[EVENT.r * C + EVENT.c] && now.row[EVENT.x] == EVENT.y)
    od
}
