"""The embedded default of the GSM8K recipe: a tiny model and a problem generator that need neither network nor GPU."""
