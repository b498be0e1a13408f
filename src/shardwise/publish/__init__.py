"""Files and steps that appear completely or not at all: directories, object stores, several hosts."""
