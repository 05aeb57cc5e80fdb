"""Built-in rewards, a file each or a file for a family; found through the entry-point group `trl_grpo_ext.rewards`."""
