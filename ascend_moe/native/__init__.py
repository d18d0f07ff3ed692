"""ascend_moe/native."""
