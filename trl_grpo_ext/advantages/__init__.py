"""Built-in advantage hooks, by family; found through the entry-point group `trl_grpo_ext.advantage_hooks`."""
