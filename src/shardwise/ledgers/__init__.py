"""``sw.memory_ledger``: memory and bytes of a process over time, and by the phases of its operations."""
