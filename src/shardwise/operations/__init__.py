"""How far operations are: each counts its bytes; hooks, bars on a terminal and lines of the log follow it."""
