"""From references to a commit, and the end of one."""
