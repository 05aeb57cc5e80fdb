"""Built-in advantage hooks, one file each; found through the entry-point group `trl_grpo_ext.advantage_hooks`."""
