"""New distributions with one plugin each, made from the templates beside this file. Importing this costs nothing."""
