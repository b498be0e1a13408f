"""Several hosts on one machine, as namespaces of the kernel: `python -m tests.hosts` runs every case and prints a table."""
