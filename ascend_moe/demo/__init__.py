"""`ascend-moe run`: a real MoE layer over EP ranks on this machine, checked against two references.

layers (what is run) -> rank (one rank) -> check -> report -> launch (all ranks, and the command).
"""
