"""What `longhaul prepare` does: corpora become shards, with progress and a summary."""
