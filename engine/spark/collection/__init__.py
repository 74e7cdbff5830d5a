"""Collection in Spark's tasks."""
