"""`ascend-moe run`: a real MoE layer over EP ranks on this machine, checked against two references.

layers (what is run) -> rank (one rank) -> launch (all of them) -> check -> report, heatmap.
"""
