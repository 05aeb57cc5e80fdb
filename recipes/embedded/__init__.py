"""The embedded defaults of the recipes: tiny models and generators of text that need neither network nor GPU."""
