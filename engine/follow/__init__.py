"""A directory that is kept at the newest commit of a job, until a writer claims it."""
