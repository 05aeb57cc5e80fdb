"""New distributions with one plugin each, from templates."""
