"""What is checked, timed and compiled of power attention."""
