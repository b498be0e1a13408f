"""Models of other libraries, as docs/howto/other-models.md loads them. ``make matrix MATRIX='--pairs others'`` has these libraries."""
