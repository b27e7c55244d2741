"""Who takes part: ranks, the symmetric heap, what the host exchanges, the order of calls."""
