"""The commands of `trl-grpo-ext`, a module each with `register(app)`. Importing one must be cheap: no torch, no plugin."""
