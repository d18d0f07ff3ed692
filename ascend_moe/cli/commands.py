"""The commands by name, without typer and rich: for help, and for what is said where those are missing."""

#: name -> line in the help; module ascend_moe.cli.NAME (`-` as `_`) has its typer application as `app`
COMMANDS = {  # in the order of use
    "run": "Run a MoE layer over EP ranks of this machine on real text, and check every result.",
    "doctor": "Look at this machine: versions, variables, devices; every finding with its fix.",
    "plan": "What a configuration needs: window, HCCL_BUFFSIZE, UB, tiling, limits.",
    "validate": "Dispatch and combine against the reference, on whatever device is here.",
    "bench": "Time dispatch and combine against torch.distributed, MPI and the machine's limit, in one run.",
    "predict": "Predict times on NPUs by a model; its assumptions.",
    "trace": "Where the time of dispatch and combine goes, measured or predicted.",
    "explore": "Look for races, missing synchronisation, hangs and wrong results, schedule after schedule.",
    "vnpu": "Run a command with torch_npu on a virtual NPU of this machine.",
    "shim": "Run code written for torch_npu on CPU tensors, without torch_npu.",
    "twin": "AscendC kernels of your own on the CPU.",
}
