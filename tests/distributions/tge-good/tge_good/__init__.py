"""One plugin of each kind, as an author would write them."""
