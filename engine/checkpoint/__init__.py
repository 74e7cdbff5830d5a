"""Care for a streaming query's checkpoint as a whole: backups, restores and checks (design 0005)."""
