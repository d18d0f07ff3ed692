"""Cases of explore mode, larger than any that is drawn: shares of several chunks or batches, and of nothing."""

LARGE_SHARES = (
    "w2,c1,l8,k16,b33,u1,v1,equal,ids:distinct,D,direct",  # more than 512 list entries
    "w2,c1,l8,k16,b66,u1,v2,equal,ids:distinct,DC,direct,weights",  # two whole chunks of 512 pairs, of source indices
    "w2,c1,l8,k16,b66,u1,v2,equal,ids:distinct,DC",  # rows whose tails leave by themselves
    "w3,c9,l8,k4,b33,u1,v2,DC,weights,fp32",  # rows that leave with their tails
    "w2,c8,l8,k4,b33,u1,v2,equal,D,int8",
    "w1,c1,l16,k16,b66,u1,v1,equal,ids:none,D,direct,weights",  # chunks without a row
    "w1,c1,l1,k1,b4,u512,v1,equal,smooth,D",  # a row in several pieces
    "w7,c16,l8,k4,b64,u3,v2,s1,bf16,int8,ids:hot,equal,D,direct",  # shared rows, in two batches
    "w1,c8,l32,k32,b80,u1,v2,equal,ids:distinct,D,direct",  # a batch has fewer rows than load at a time
    "w1,c8,l2,k2,b700,u1,v2,equal,ids:distinct,D,direct",  # a batch fills its room
    "w8,c2,l2,k1,b0,u1,v1,equal,D,direct",  # W a multiple of 8, without tokens
    "w2,c8,l1,k1,b3,u1,v1,zero-rank,mask:pair,m5,DC,direct",  # list cores without experts, and without pairs
    "w2,c8,l2,k2,b3,u1,v2,no-tokens,mask:token,m5,DC,direct",
)
