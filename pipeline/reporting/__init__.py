"""What `longhaul report` reads, draws and writes."""
