"""From a directory to a reference that can be committed."""
