"""What an exported folder holds, and how each part of it is written."""
