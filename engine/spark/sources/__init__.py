"""The data sources: state, its changes, and files as DataFrames."""
