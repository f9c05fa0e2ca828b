"""The ledger in Redis: facts, and transitions that check and commit. It holds no policy."""
