"""`longhaul verify`: one check of everything on this machine, in pieces of a few minutes."""
