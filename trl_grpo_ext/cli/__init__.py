"""The commands of `trl-grpo-ext`, one module each with `register(app)`. Importing one is cheap: no torch, no plugin."""
