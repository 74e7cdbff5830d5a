"""A streaming query's checkpoint as a whole, in parallel on Spark."""
