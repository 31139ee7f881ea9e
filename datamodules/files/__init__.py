"""Files: read as anybody may have written them, written whole or not at all, and locked."""
