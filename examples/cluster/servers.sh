#!/usr/bin/env bash
# One of several servers: run it on every one, with its own SERVER.
#
#   SERVERS=2 SERVER=0 MASTER_ADDR=10.0.0.1 RANKS=8 examples/cluster/servers.sh        on the first, 10.0.0.1
#   SERVERS=2 SERVER=1 MASTER_ADDR=10.0.0.1 RANKS=8 examples/cluster/servers.sh        on the second
#   ... examples/cluster/servers.sh your_script.py --its-options                       instead of bring-up, validate
#
# RANKS: of one server, the same on all. MASTER_PORT: free on the first server, as the next one (29500, 29501).
# DEVICE=cpu: without NPUs, all "servers" on one machine.
set -euo pipefail
: "${SERVERS:?how many servers}" "${SERVER:?which one this is, from 0}" "${RANKS:?ranks of one server}"
: "${MASTER_ADDR:?address of server 0}"
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
# The same on every rank: HCCL makes a window of this size for each group.
export HCCL_BUFFSIZE=${HCCL_BUFFSIZE:-512}
# Ranks that load weights or compile come later than others.
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-600}

ranks() { # PORT COMMAND...: this server's ranks
    "${PYTHON:-python3}" -c 'from torch.distributed.run import main; main()' \
        --nnodes "$SERVERS" --node-rank "$SERVER" --nproc-per-node "$RANKS" \
        --master-addr "$MASTER_ADDR" --master-port "$@"
}

if [[ $# == 0 ]]; then
    export PYTHONSAFEPATH=1 # the installed package, not a folder of its name here
    # Another port: a server may be done before the first one has closed its own. Probe 12 needs two ranks per server;
    # HCCL_INTRA_PCIE_ENABLE and HCCL_INTRA_ROCE_ENABLE are set for each probe where CANN, before 8.3, needs them.
    ranks $((MASTER_PORT + 1)) -m ascend_moe validate --bringup --device "${DEVICE:-npu}" ||
        echo "a probe did not pass: docs/cluster.md says what to do"
    set -- -m ascend_moe validate --device "${DEVICE:-npu}"
fi
ranks "$MASTER_PORT" "$@"
