"""Operations: their progress, for hooks, bars and the log, and the ledger of a process's memory."""
