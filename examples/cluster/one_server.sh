#!/usr/bin/env bash
# One A2 or A3 server, everything in order: the probes, how large the windows must be, what is here, is it right, a layer.
#
#   RANKS=16 examples/cluster/one_server.sh                            on the server
#   RANKS=4 ascend-moe vnpu -- bash examples/cluster/one_server.sh     on any machine, on virtual NPUs
#
# RANKS: default all NPUs here. PRESET, BATCH: the layer that is planned for; BATCH tokens a rank at most.
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
export PYTHONSAFEPATH=1 # the installed package, not a folder of its name here
ranks=${RANKS:-$("$python" -c 'import torch, torch_npu; print(torch.npu.device_count())')}
layer=(--preset "${PRESET:-deepseek-v3}" --ranks "$ranks" --batch "${BATCH:-32}")

plan() { # needs no device, so torch need not load torch_npu
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" -m ascend_moe plan "${layer[@]}" "$@"
}

echo "== bring-up"
"$python" -m ascend_moe validate --bringup --ranks "$ranks" || [[ $? == 3 ]] ||
    echo "a probe did not pass: docs/cluster.md says what to do; comm_alg auto is window if the probes of direct did not"

echo "== plan"
plan | sed -n '1,4p'
HCCL_BUFFSIZE=$(plan --json | "$python" -c 'import json, sys; print(json.load(sys.stdin)["buffsize_mib"])')
export HCCL_BUFFSIZE

echo "== doctor"
"$python" -m ascend_moe doctor "${layer[@]}" | tail -n 1

echo "== validate"
"$python" -m ascend_moe validate --ranks "$ranks" | tail -n 1

echo "== a layer"
"$python" -c 'from torch.distributed.run import main; main()' --standalone --nproc-per-node "$ranks" \
    "$folder/../npu_moe_layer.py"
