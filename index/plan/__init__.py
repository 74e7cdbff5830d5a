"""Every decision as a pure function of facts: what to upload, restore, keep and delete."""
