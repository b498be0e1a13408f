"""Agreement and publishing under seeded schedules: the production code over a simulated store, clock, disk and ranks."""
