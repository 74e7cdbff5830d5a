"""Files of this machine, and bytes between them and a store."""
