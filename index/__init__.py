"""Values and decisions: the snapshot model, its stored form, diffs and plans. No I/O, no clock, no randomness."""
