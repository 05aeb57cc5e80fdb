"""The commands of `trl-grpo-ext`, one module each. Importing one is cheap: no torch, no plugin."""
