"""Steps kept in the memory of hosts: a ring on tmpfs, parts of files proved by checksums, copies on other hosts."""
