"""New distributions with one plugin each: the templates, and what fills them."""
