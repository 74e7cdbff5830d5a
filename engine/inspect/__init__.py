"""Look at what is committed, for people: verify, history, explain, browse; discard removes what verify names."""
