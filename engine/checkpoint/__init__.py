"""Care for a streaming query's checkpoint as a whole: pictures, restores and checks (design 0005)."""
