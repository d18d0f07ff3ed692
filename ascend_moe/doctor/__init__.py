"""ascend_moe/doctor."""
