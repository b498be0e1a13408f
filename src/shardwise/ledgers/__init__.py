"""``sw.ledger``: memory and bytes of a process over time, by phases; and the hook through which calls announce their phases."""
