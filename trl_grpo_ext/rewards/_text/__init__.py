"""Reading what a completion says."""
